"""What a backend says beside arrays of rows: answers in text, and facts about its device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gpuinfer.api import Result
from gpuinfer.generation import Generation, Prompt

DEVICE = {"utilisation": (0.0, 1.0), "allocated_mb": (0.0, 1e9), "reserved_mb": (0.0, 1e9)}
UNITS = {"utilisation": "0 to 1", "allocated_mb": "MB", "reserved_mb": "MB"}


def fault_of_generation(result: Result, prompt: Prompt) -> str | None:
    if not isinstance(result, Generation):
        return f"a prompt was answered with {result!r:.60}. Answer with a gpuinfer.generation.Generation"
    if len(result.completions) != prompt.samples:
        return f"{len(result.completions)} completions for {prompt.samples} samples. Give one for each"
    longest = max(len(answer.tokens) for answer in result.completions)
    if longest > prompt.sampling.max_tokens:
        return f"an answer of {longest} tokens, where max_tokens is {prompt.sampling.max_tokens}. Stop there"
    return None


def fault_of_device(told: Any) -> str | None:
    """It goes into reports and onto the screen four times a second."""
    if not isinstance(told, Mapping):
        return f"device() gave {told!r:.60}. Return a dict; an empty one when nothing is known."
    wrong = next(
        (key for key, (low, high) in DEVICE.items() if key in told and not _between(told[key], low, high)), None
    )
    if wrong is not None:
        return f"device() says {wrong} = {told[wrong]!r}. Leave it out, or give a number in {UNITS[wrong]}."
    if not isinstance(told.get("model", {}), Mapping) or not isinstance(told.get("tokens", {}), Mapping):
        return "device() says model or tokens otherwise than as a dict. Give plain facts by name, and {input, output}."
    try:
        json.dumps(told, allow_nan=False)
    except (TypeError, ValueError) as error:
        return f"device() gave what no report can hold: {error}. Return numbers and texts alone."
    return None


def _between(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and low <= value <= high
