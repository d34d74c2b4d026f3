"""In which number format the products of a text model are computed: its weights' own, or a wider one that is faster."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from gpuinfer.api import Setup
from gpuinfer.models import processor

if TYPE_CHECKING:
    import torch

FLOAT32 = "float32"


def computes_in(dtype: torch.dtype, device: torch.device, *, deterministic: bool) -> str:
    """The number format, by name, that rows have when they meet weights of `dtype`.

    On a CPU weights of bfloat16 meet rows of float32 unless the processor multiplies bfloat16 by itself: so they do
    with `deterministic` too, for there the same sums come out on any processor. It is a matter of what the processor
    can do, never of a measurement, so that a run that goes on computes as it began.
    """
    import torch

    if device.type == "cpu" and dtype == torch.bfloat16 and (deterministic or not multiplies_bfloat16()):
        return FLOAT32
    return str(dtype).removeprefix("torch.")


def computes_in_here(setup: Setup) -> str:
    """The same for a run on this machine. Raises `UsageError` when there is no such device."""
    import gpuinfer.text.passive  # noqa: F401  before torch
    from gpuinfer.models.device import resolve_device, resolve_dtype

    device = resolve_device(setup.device)
    return computes_in(resolve_dtype(setup.dtype), device, deterministic=setup.deterministic)


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether the processor does, and there is a library that has it do so: MKL, on processors of its own maker. On an
    AMD it took 16 times as long as our own kernels for a row of bfloat16.
    """
    from gpuinfer.text.decoder import blas

    return processor.has_bfloat16_in_mkl() and blas.find() is not None
