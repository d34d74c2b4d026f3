"""How a model's makers recommend that its answers are drawn: generation_config.json of a folder (as transformers reads
it: `do_sample` false takes the likeliest tokens), `general.sampling.…` of a GGUF file, or of a packaged model the table
here. A conversation goes by it; whatever else is asked of a model has our defaults, which are the same for all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.checkpoint import Checkpoint
from gpuinfer.text.language.tokenizer import read_object
from gpuinfer.text.packaged_models import PACKAGED

GGUF_PREFIX, GGUF_TEMPERATURE = "general.sampling.", "temp"
MOST = {"temperature": 100.0, "top_k": 1 << 20, "top_p": 1.0, "min_p": 1.0}


def recommended_sampling(checkpoint: Checkpoint) -> dict[str, float]:
    """Those of `temperature`, `top_k`, `top_p`, `min_p` that are recommended, by name; what cannot be is left out."""
    given: Mapping[str, Any] = {}
    if (file := checkpoint.language.gguf) is not None:
        given = {name: file.metadata.get(f"{GGUF_PREFIX}{name}") for name in MOST}
        given = {**given, "temperature": file.metadata.get(f"{GGUF_PREFIX}{GGUF_TEMPERATURE}")}
    elif checkpoint.folder is not None:
        try:
            given = read_object(checkpoint.folder / "generation_config.json")
        except UsageError:  # a damaged file is told of where the model is opened
            return {}
        if given.get("do_sample") is False:
            return {"temperature": 0.0}
    found = {name: float(given[name]) for name, most in MOST.items() if _fits(given.get(name), most)}
    packaged = PACKAGED.get(checkpoint.name)
    if not found and packaged is not None and packaged.temperature is not None and file is not None:
        found["temperature"] = packaged.temperature
    return {name: int(value) if name == "top_k" else value for name, value in found.items()}


def _fits(value: Any, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and 0 < value <= most
