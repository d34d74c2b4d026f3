"""The matrix product of bfloat16 of Intel's MKL that torch brings along, by address.

It is the way to a processor's matrix unit. Its rounding of a row depends on how many rows there are, in another way on
each kind of processor: where bits count `cpu_product` serves instead.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch

NAME = "cblas_gemm_bf16bf16f32"


@dataclass(frozen=True)
class Blas:
    """The address for compiled code."""

    library: ctypes.CDLL
    gemm_bfloat16: int

    def one_thread_here(self) -> None:
        """In the calling thread products use no other thread."""
        self.library.MKL_Set_Num_Threads_Local(1)


@functools.cache
def find() -> Blas | None:
    """MKL inside this torch, or None: other processors and other builds have none."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not torch._C.has_mkl or not path.exists():
        return None
    try:
        library = ctypes.CDLL(str(path))
        address = ctypes.cast(getattr(library, NAME), ctypes.c_void_p).value
        library.MKL_Set_Num_Threads_Local  # noqa: B018 (looked up)
    except (OSError, AttributeError):
        return None
    return Blas(library, address) if address else None
