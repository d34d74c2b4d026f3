"""The number format in which a text model computes, its weights' own or a wider one that is faster here; and the notice
about it for the user.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from gpuinfer.api import Setup
from gpuinfer.errors import UsageError
from gpuinfer.host import machine
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
    name = str(dtype).removeprefix("torch.")
    return FLOAT32 if device.type == "cpu" and widens(name, deterministic=deterministic) else name


def widens(dtype: str, *, deterministic: bool) -> bool:
    """Whether rows are wider than weights of this format, on this machine's CPU."""
    return dtype == "bfloat16" and (deterministic or not multiplies_bfloat16())


def computes_in_here(setup: Setup) -> str:
    """The same for a run on this machine. Raises `UsageError` when there is no such device."""
    import gpuinfer.text.torch_import  # noqa: F401  before torch
    from gpuinfer.models.device import resolve_device, resolve_dtype

    device = resolve_device(setup.devices[0])  # they are all of one kind
    return computes_in(resolve_dtype(setup.dtype), device, deterministic=setup.deterministic)


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether the processor does, in its matrix unit or its vectors, by products of ours."""
    if not processor.has_bfloat16():
        return False  # known without importing torch
    import gpuinfer.text.torch_import  # noqa: F401  before torch
    from gpuinfer.text.decoder.cpu_panels import kind_of_bfloat16

    return kind_of_bfloat16() != "none"


def notices(setup: Setup, compute: str) -> tuple[str, ...]:
    """What the user should know of the arithmetic before the run, whatever kind of model it has.

    Raises `UsageError` for a `compute` where there is no choice: a text model takes what the processor does best, or
    `deterministic`.
    """
    if setup.model is None or setup.model.kind != "text":
        return processor.notices(setup, compute)
    if compute != "auto":
        raise UsageError("-B compute is for models of rows; a text model is computed in what is fastest. Leave it out.")
    if setup.dtype != "bfloat16" or machine.wants_cuda(setup.devices):
        return ()
    if not multiplies_bfloat16():
        return (
            "on this machine a text model in bfloat16 has its weights rounded to bfloat16 and is computed with in "
            "float32, which is faster here.",
        )
    return ()


def decoder_notices(setup: Setup, computed_by: str) -> tuple[str, ...]:
    """What the user should know of `deterministic` once it is known whose code computes a text model's layers."""
    if not setup.deterministic or computed_by != "transformers":
        return ()
    return (
        "--deterministic: transformers' own code computes this model, in part with torch. Its answers have the same "
        "bits in any company and when a run goes on, on this machine with this torch and transformers and as many "
        "threads; elsewhere they may be rounded otherwise. A native family has -B decoder=native, which promises more.",
    )
