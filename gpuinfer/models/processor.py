"""The narrow number formats that the processor multiplies in hardware; others are computed in a detour.

A model of rows computes in the format of its weights, unless the processor is slow in it. The decision rests on what
the system reports of the processor, never on a measurement: it, and so a run's numbers, do not depend on other load.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from gpuinfer.api import Setup
from gpuinfer.errors import UsageError
from gpuinfer.host import machine

CPUINFO = Path("/proc/cpuinfo")
FLAG_LINES = ("flags", "Features")  # on x86, on Arm
SERVED_BY_MKL = "GenuineIntel"  # the maker whose instructions for bfloat16 MKL uses

# One of these flags suffices: x86's, then Arm's.
BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
FLOAT16 = frozenset({"avx512_fp16", "amx_fp16", "asimdhp"})

# Libraries can be set to leave instructions unused, so that one processor emulates an older one.
# Settings without products of bfloat16, and settings without products of float16 either.
WITHOUT_BFLOAT16: Mapping[str, frozenset[str]] = {
    "ATEN_CPU_CAPABILITY": frozenset({"default", "avx2"}),
    "ONEDNN_MAX_CPU_ISA": frozenset(
        {"sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2", "avx512_core", "avx512_core_vnni"}
    ),
    "MKL_ENABLE_INSTRUCTIONS": frozenset({"sse4_2", "avx", "avx2", "avx2_e1", "avx512", "avx512_e1", "avx512_e2"}),
}
WITHOUT_FLOAT16: Mapping[str, frozenset[str]] = {
    **WITHOUT_BFLOAT16,
    "ONEDNN_MAX_CPU_ISA": WITHOUT_BFLOAT16["ONEDNN_MAX_CPU_ISA"] | {"avx512_core_bf16"},
    "MKL_ENABLE_INSTRUCTIONS": WITHOUT_BFLOAT16["MKL_ENABLE_INSTRUCTIONS"] | {"avx512_e3"},
}


def has_bfloat16(cpuinfo: Path = CPUINFO, environment: Mapping[str, str] | None = None) -> bool:
    """Whether products of bfloat16 are one instruction here; false if unknown."""
    return bool(BFLOAT16 & flags(cpuinfo)) and not _emulated(WITHOUT_BFLOAT16, environment)


def excludes_bfloat16() -> bool:
    """Whether a library is set to compute as a processor without products of bfloat16."""
    return _emulated(WITHOUT_BFLOAT16, None)


def has_float16(cpuinfo: Path = CPUINFO, environment: Mapping[str, str] | None = None) -> bool:
    """Whether products of float16 are one instruction here; false if unknown."""
    return bool(FLOAT16 & flags(cpuinfo)) and not _emulated(WITHOUT_FLOAT16, environment)


def has_bfloat16_in_mkl(cpuinfo: Path = CPUINFO, environment: Mapping[str, str] | None = None) -> bool:
    """Whether MKL has products of bfloat16 that are one instruction here."""
    return has_bfloat16(cpuinfo, environment) and SERVED_BY_MKL in _text(cpuinfo)


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    """The processor's product name, or the system's name for its kind."""
    lines = _text(cpuinfo).splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """The flags that every core has, on processors with cores of two kinds too. Empty if unknown."""
    split = (line.partition(":") for line in _text(cpuinfo).splitlines())
    found = [frozenset(words.split()) for name, _, words in split if name.strip() in FLAG_LINES]
    return frozenset.intersection(*found) if found else frozenset()


def _text(cpuinfo: Path) -> str:
    try:
        return cpuinfo.read_text(errors="replace")
    except OSError:
        return ""


def _emulated(without: Mapping[str, frozenset[str]], environment: Mapping[str, str] | None) -> bool:
    """Whether a library is set to compute as an older processor, one of those without."""
    given = os.environ if environment is None else environment
    return any(given.get(name, "").lower() in values for name, values in without.items())


Compute = Literal["auto", "float32", "bfloat16", "float16"]
COMPUTE = "number format of the arithmetic; default --dtype's, or float32 on a processor without products of that"
NARROW: Mapping[str, Callable[[], bool]] = {"bfloat16": has_bfloat16, "float16": has_float16}


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
    """Notices before the run of a model of rows. Asks no device."""
    if setup.model is None or machine.wants_cuda(setup.devices) or compute != "auto":
        return ()
    if (computed := computed_in(setup.dtype, compute, on_cpu=True)) == setup.dtype:
        return ()
    return (
        f"this processor has no products of {setup.dtype}: weights are rounded to {setup.dtype} and computed with in "
        f"{computed}, which is several times as fast here (-B compute={setup.dtype} prevents that).",
    )


def training_notices(setup: Setup, compute: str) -> tuple[str, ...]:
    """Notices before a training, whose weights are float32 in any case. Raises `UsageError` for float16."""
    refuse_float16_gradients(setup)
    if machine.wants_cuda(setup.devices) or computed_in(setup.dtype, compute, on_cpu=True) == setup.dtype:
        return ()
    return (
        f"this processor has no products of {setup.dtype}: gradients are computed in float32, which is several times "
        f"as fast here (-B compute={setup.dtype} prevents that).",
    )


def refuse_float16_gradients(setup: Setup) -> None:
    """Raises `UsageError` for float16, in which gradients underflow."""
    if setup.dtype == "float16":
        raise UsageError(
            "gradients vanish in float16. Use --dtype bfloat16, which has the range of float32, or float32."
        )
