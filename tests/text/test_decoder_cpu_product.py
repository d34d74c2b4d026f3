"""Our own matrix products: right, and the same bits whatever comes along, on every processor that this runs on."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from gpuinfer.text.decoder.cpu import available
from gpuinfer.text.decoder.cpu_product import aligned, panels_of, product_with

pytestmark = pytest.mark.skipif(not available(torch.float32), reason="this processor has no FMA")

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
UNTOUCHED = 7.0


def drawn(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def product(rows, weight, panels=None):
    """rows · weight as the decoder would compute it, into rows that lie further apart than they are long."""
    panels = panels_of(weight) if panels is None else panels
    columns, inner = weight.shape
    given = rows.contiguous().numpy()
    found = np.full((len(rows), columns + 3), UNTOUCHED, np.float32)
    address = product_with(panels.dtype).ctypes
    address(len(rows), columns, inner, given.ctypes.data, inner, panels.ctypes.data, found.ctypes.data, columns + 3)
    assert (found[:, columns:] == UNTOUCHED).all()
    return torch.from_numpy(found[:, :columns].copy())


@each_dtype
@pytest.mark.parametrize(("columns", "inner"), [(1, 1), (16, 33), (40, 300), (61, 32), (130, 768), (7, 4864)])
def test_a_row_has_the_same_bits_among_any_number_of_rows_and_in_any_place(columns, inner, dtype):
    weight, rows = drawn(columns, inner).to(dtype), drawn(140, inner, seed=1)
    panels = panels_of(weight)
    whole = product(rows, weight, panels)
    exact = rows.double() @ weight.double().T
    torch.testing.assert_close(whole.double(), exact, rtol=0, atol=2e-6 * inner)
    for count in (*range(1, 20), 33, 64, 65, 128):
        assert torch.equal(product(rows[140 - count :], weight, panels), whole[140 - count :])


@each_dtype
def test_a_column_has_the_same_bits_among_any_others(dtype):
    weight, rows = drawn(100, 50).to(dtype), drawn(9, 50, seed=1)
    whole = product(rows, weight)
    for begin, end in ((0, 16), (16, 100), (3, 20), (99, 100)):
        assert torch.equal(product(rows, weight[begin:end]), whole[:, begin:end])


def test_a_product_has_the_same_bits_on_every_processor():
    inner, columns, count = 211, 37, 13
    rows, weight = (
        torch.from_numpy(((np.arange(size * inner) * 7919 % 1009 - 504) / 997).astype(np.float32).reshape(size, inner))
        for size in (count, columns)
    )
    found = [hashlib.sha256(product(rows, weight.to(dtype)).numpy()).hexdigest()[:16] for dtype in EXPECTED]
    assert found == list(EXPECTED.values())


EXPECTED = {torch.float32: "126b365d78151acb", torch.bfloat16: "b5d0265c9876d25b"}


def test_arrays_begin_where_a_cache_line_does():
    for size in (1, 3, 1000):
        assert aligned((size, 5), np.float32).ctypes.data % 64 == 0
