"""The matrix products of Intel's MKL that torch brings along, by address.

Compiled code calls them itself: a forward step is then one call from Python. Weights are packed once. Among two rows or
more, a row of the result does not depend on how many were asked for at once, which tests hold the library to.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

ROW_MAJOR, PLAIN, TRANSPOSED, B_MATRIX = 101, 111, 112, 162
NAMES = ("cblas_sgemm_pack_get_size", "cblas_sgemm_pack", "cblas_sgemm_compute", "cblas_gemm_bf16bf16f32")
ALIGNED = 64
EXPECTED_ROWS = 64  # in one product: the packing does not depend on it, as far as we have seen


@dataclass(frozen=True)
class Blas:
    """Addresses for compiled code, and the packing."""

    library: ctypes.CDLL
    sgemm_packed: int
    gemm_bfloat16: int

    def pack(self, weight: NDArray[np.float32]) -> NDArray[np.uint8]:
        """A weight [out, in] in the form that `sgemm_packed` reads."""
        out, inner = weight.shape
        sizes = (EXPECTED_ROWS, out, inner)
        packed = aligned(self.library.cblas_sgemm_pack_get_size(B_MATRIX, *sizes))
        self.library.cblas_sgemm_pack(
            ROW_MAJOR, B_MATRIX, TRANSPOSED, *sizes, ctypes.c_float(1.0), _pointer(weight), inner, _pointer(packed)
        )
        return packed

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
        addresses = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in NAMES]
        library.MKL_Set_Num_Threads_Local  # noqa: B018 (looked up)
    except (OSError, AttributeError):
        return None
    library.cblas_sgemm_pack_get_size.restype = ctypes.c_size_t
    return Blas(library, addresses[2] or 0, addresses[3] or 0)


def aligned(size: int) -> NDArray[np.uint8]:
    """Bytes that begin where a cache line does."""
    room = np.empty(size + ALIGNED, np.uint8)
    start = -room.ctypes.data % ALIGNED
    return room[start : start + size]


def _pointer(array: NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
