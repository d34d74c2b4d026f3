"""What multiplies bfloat16 by itself here: the processor's matrix unit (AMX), its vectors (AVX512-BF16), or nothing.

It follows from what Numba compiles for, from what the switches of other libraries leave, and from what the system
permits, never from a measurement: a run that goes on computes as it began.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Mapping
from typing import Literal

from gpuinfer.models import processor
from gpuinfer.text.decoder.cpu_vectors import FEATURES

ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18  # Linux, x86-64: asm/prctl.h
WITHOUT_AMX: Mapping[str, frozenset[str]] = {
    "ATEN_CPU_CAPABILITY": frozenset({"avx512"}),
    "ONEDNN_MAX_CPU_ISA": frozenset({"avx512_core_bf16", "avx512_core_fp16", "avx10_1_512"}),
    "MKL_ENABLE_INSTRUCTIONS": frozenset({"avx512_e3", "avx512_e5"}),
}
"""Settings by which other libraries leave the matrix unit unused, though not bfloat16
(`models/processor.WITHOUT_BFLOAT16`): ours does so too, so that all are of one processor."""


@functools.cache
def kind_of_bfloat16() -> Literal["amx", "avx512", "none"]:
    """Which of our products of bfloat16 (`cpu_product`) this process can have computed."""
    if processor.excludes_bfloat16():
        return "none"
    features = frozenset(FEATURES.split(","))
    if {"+amx-bf16", "+amx-tile", "+avx512f"} <= features and not _excludes_amx() and _permitted():
        return "amx"
    return "avx512" if {"+avx512bf16", "+avx512f"} <= features else "none"


def _excludes_amx() -> bool:
    return any(os.environ.get(name, "").lower() in values for name, values in WITHOUT_AMX.items())


def _permitted() -> bool:
    """Ask the system for the matrix unit, for all threads of this process; False where it does not give it."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0)
