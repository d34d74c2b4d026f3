"""torch.compile for the parts of a layer that see each token for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from gpuinfer.errors import UsageError
from gpuinfer.models.memory import first_line, is_out_of_memory

Result = TypeVar("Result")


def compiled(function: Callable[..., Result]) -> Callable[..., Result]:
    """`function`, compiled when it is first called, for all layers together."""
    result: Callable[..., Result] = torch.compile(function)
    return result


def tried(trial: Callable[[], object]) -> None:
    """Run `trial`, which calls compiled functions. Raises `UsageError` with the compiler's words when it cannot."""
    try:
        trial()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UsageError(
            f"torch.compile cannot compile this model here: {type(error).__name__}: {first_line(error)}. "
            "It needs a C++ compiler on the CPU and Triton on a GPU: install them, or leave out -B compile=true."
        ) from error
