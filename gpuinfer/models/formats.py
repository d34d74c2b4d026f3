"""The number format that a model of rows is computed in: the one of its weights, unless the processor crawls in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from gpuinfer import machine
from gpuinfer.api import Setup
from gpuinfer.errors import UsageError
from gpuinfer.models import processor

Compute = Literal["auto", "float32", "bfloat16", "float16"]
COMPUTE = "number format of the arithmetic; default --dtype's, or float32 on a processor without products of that"
NARROW: Mapping[str, Callable[[], bool]] = {"bfloat16": processor.has_bfloat16, "float16": processor.has_float16}


def computed_in(dtype: str, compute: str, on_cpu: bool) -> str:
    """The format of products and activations, where weights are rounded to `dtype`. Raises `UsageError`."""
    if compute not in ("auto", "float32", dtype):
        raise UsageError(
            f"compute={compute} with weights in {dtype} is not to be had. Use --dtype {compute}, or -B compute=auto."
        )
    if compute != "auto":
        return compute
    crawls = on_cpu and dtype in NARROW and not NARROW[dtype]()
    return "float32" if crawls else dtype


def notices(setup: Setup, compute: str) -> tuple[str, ...]:
    """What the user should know of it before the run. Asks no device, so that it costs nothing.

    Raises `UsageError` where there is no choice: a text model takes what the processor does best, or `deterministic`.
    """
    spec = setup.model
    on_cpu = setup.device == "cpu" or (setup.device == "auto" and not machine.has_cuda())
    if spec is not None and spec.kind == "text":
        return text_notices(setup, compute, on_cpu)
    if spec is None or spec.kind != "rows" or not on_cpu or compute != "auto":
        return ()
    if (computed := computed_in(setup.dtype, compute, on_cpu)) == setup.dtype:
        return ()
    return (
        f"this processor has no products of {setup.dtype}: weights are rounded to {setup.dtype} and computed with in "
        f"{computed}, which is several times as fast here (-B compute={setup.dtype} prevents that).",
    )


def text_notices(setup: Setup, compute: str, on_cpu: bool) -> tuple[str, ...]:
    if compute != "auto":
        raise UsageError("-B compute is for models of rows; a text model is computed in what is fastest. Leave it out.")
    if not on_cpu or setup.dtype != "bfloat16":
        return ()
    if not processor.has_bfloat16_in_mkl():
        return (
            "on this processor a text model in bfloat16 has its weights rounded to bfloat16 and is computed with in "
            "float32, which is faster here.",
        )
    if setup.deterministic:
        return ()
    return (
        "in bfloat16 what shares a step with an answer may change it here, in its last bits; --deterministic computes "
        "in float32, where nothing does.",
    )
