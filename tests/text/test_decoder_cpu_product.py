"""Products of compiled kernels: close to the exact sums, and of the same bits in any company, for every kind that this
processor has.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap

import numpy as np
import pytest
import torch

from gpuinfer.text.decoder.cpu_math import FEATURES
from gpuinfer.text.decoder.cpu_panels import kind_of_bfloat16, panel_bytes, panels_of
from gpuinfer.text.decoder.cpu_product import product_with

BUILT_FOR = FEATURES.split(",")  # what Numba compiles for
pytestmark = pytest.mark.skipif("+fma" not in BUILT_FOR, reason="this processor has no FMA")
MISSING = {"avx512": "+avx512bf16" not in BUILT_FOR, "amx": kind_of_bfloat16() != "amx"}
FORMATS = {  # of rows and of weights
    "float32": (torch.float32, torch.float32),
    "widened": (torch.float32, torch.bfloat16),
    "avx512": (torch.bfloat16, torch.bfloat16),
    "amx": (torch.bfloat16, torch.bfloat16),
}
EXPECTED = {"float32": "126b365d78151acb", "widened": "b5d0265c9876d25b"}  # on every processor
UNTOUCHED = 7.0


def skip_unless_here(kind):
    return pytest.mark.skipif(MISSING.get(kind, False), reason=f"this processor has no products of kind {kind}")


each_kind = pytest.mark.parametrize("kind", [pytest.param(kind, marks=skip_unless_here(kind)) for kind in FORMATS])


def drawn(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def given(kind, count, columns, inner):
    """Rows, and a weight with its panels."""
    of_rows, of_weights = FORMATS[kind]
    weight = drawn(columns, inner).to(of_weights)
    return drawn(count, inner, seed=1).to(of_rows), weight, panels_of(weight)


def bits(rows):
    return rows.view(torch.int16).numpy() if rows.dtype == torch.bfloat16 else rows.numpy()


def product(kind, rows, columns, panels, start=0):
    """rows · weight, of so many columns from panel `start` on, into rows that lie further apart than they are long."""
    inner, values = rows.shape[1], bits(rows.contiguous())
    found = np.full((len(rows), columns + 3), UNTOUCHED, np.float32)
    weight = panels.ctypes.data + start * panel_bytes(inner, panels.itemsize)
    sizes = (len(rows), columns, inner)
    product_with(kind).ctypes(*sizes, values.ctypes.data, inner, weight, found.ctypes.data, columns + 3)
    assert (found[:, columns:] == UNTOUCHED).all()
    return torch.from_numpy(found[:, :columns].copy())


SIZES = [(1, 1), (16, 33), (40, 100), (61, 32), (130, 768), (7, 4864), (100, 3000), (64, 31), (33, 2)]


@each_kind
@pytest.mark.parametrize(("columns", "inner"), SIZES)
def test_a_row_has_the_same_bits_among_any_number_of_rows_and_in_any_place(columns, inner, kind):
    rows, weight, panels = given(kind, 140, columns, inner)
    whole = product(kind, rows, columns, panels)
    torch.testing.assert_close(whole.double(), rows.double() @ weight.double().T, rtol=0, atol=2e-6 * inner)
    for count in (*range(1, 41), 64, 65, 128):
        assert torch.equal(product(kind, rows[140 - count :], columns, panels), whole[140 - count :])


@each_kind
@pytest.mark.parametrize("count", [1, 9, 35, 70])
def test_a_column_has_the_same_bits_in_any_share_of_the_panels(count, kind):
    rows, _, panels = given(kind, count, 200, 2100)
    whole = product(kind, rows, 200, panels)
    for first, columns in ((0, 16), (1, 16), (3, 96), (5, 120), (12, 8), (4, 3)):
        part = product(kind, rows, columns, panels, first)
        assert torch.equal(part, whole[:, 16 * first : 16 * first + columns])


@each_kind
@pytest.mark.parametrize("sizes", [(1, 5, 3), (7, 16, 33), (19, 40, 31), (35, 70, 97), (3, 1, 64)], ids=str)
def test_nothing_beyond_the_arrays_is_read_or_written(sizes, kind):
    count, columns, inner = sizes
    rows, _, panels = given(kind, *sizes)
    pages = [AtTheEdge(array) for array in (bits(rows), panels, np.zeros((count, columns), np.float32))]
    a, b, c = (page.address for page in pages)
    product_with(kind).ctypes(count, columns, inner, a, inner, b, c, columns)
    assert np.array_equal(pages[2].values(np.float32), product(kind, rows, columns, panels).numpy().ravel())


class AtTheEdge:
    """A copy of an array that ends where memory begins that may not be touched."""

    def __init__(self, array):
        whole = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, whole + mmap.PAGESIZE)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address, self._size = begin + whole - array.nbytes, array.nbytes
        ctypes.memmove(self.address, np.ascontiguousarray(array).ctypes.data, array.nbytes)
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        assert protect(begin + whole, mmap.PAGESIZE, 0) == 0

    def values(self, kind):
        return np.frombuffer(ctypes.string_at(self.address, self._size), kind)


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_product_has_the_same_bits_on_every_processor(kind):
    inner, columns, count = 211, 37, 13
    rows, weight = (
        torch.from_numpy(((np.arange(size * inner) * 7919 % 1009 - 504) / 997).astype(np.float32).reshape(size, inner))
        for size in (count, columns)
    )
    found = product(kind, rows, columns, panels_of(weight.to(FORMATS[kind][1])))
    assert hashlib.sha256(found.numpy()).hexdigest()[:16] == EXPECTED[kind]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("out", "inner"), [(1, 1), (16, 32), (37, 45), (2000, 300)])
def test_panels_have_16_columns_side_by_side_and_zeros_behind_the_last(out, inner, dtype):
    wider = drawn(out, inner + 5).to(dtype)
    for weight in (wider[:, :inner], wider[:, :inner].contiguous(), wider.T.contiguous().T[:, :inner]):
        panels = panels_of(weight)
        together = 2 if dtype == torch.bfloat16 else 1
        terms = panel_bytes(inner, panels.itemsize) // panels.itemsize // 16
        padded = torch.zeros(-(-out // 16) * 16, terms, dtype=dtype)
        padded[:out, :inner] = weight
        expected = padded.reshape(-1, 16, terms // together, together).transpose(1, 2).reshape(len(panels), -1)
        assert np.array_equal(panels.view(bits(expected).dtype), bits(expected))
