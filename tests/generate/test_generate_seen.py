"""Keys that came before are known, each of them, in little room."""

from __future__ import annotations

import collections
import hashlib
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuinfer.workloads.generate import input_rows
from gpuinfer.workloads.generate.input_rows import KeySet


def key(number: int) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=12).digest()


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(input_rows, "RECENT", 8)
    monkeypatch.setattr(input_rows, "LEAST_RUN", 64)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 60), max_size=40), max_size=40))
def test_it_counts_like_a_counter(blocks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(input_rows, "RECENT", 8)
        patch.setattr(input_rows, "LEAST_RUN", 64)
        known, counter = KeySet(), collections.Counter()
        for block in blocks:
            assert known.has([key(one) for one in block]) == [counter[one] > 0 for one in block]
            expected = []
            for one in block:
                expected.append(counter[one])
                counter[one] += 1
            assert known.count([key(one) for one in block]) == expected
        assert len(known) == counter.total()


def test_keys_that_agree_in_64_bits_are_not_the_same(small):
    known = KeySet()
    known.count([b"same bits"[:8] + b"aaaa"])
    known.count([key(number) for number in range(100)])
    assert known.has([b"same bits"[:8] + b"aaaa", b"same bits"[:8] + b"bbbb"]) == [True, False]


def test_a_hundred_thousand_keys_take_twelve_bytes_each_and_few_arrays():
    known, count = KeySet(), 200_000
    for start in range(0, count, 1000):
        assert not any(known.count([key(number) for number in range(start, start + 1000)]))
    taken = sum(part.nbytes for run in known._runs for part in run)
    assert taken <= 12 * count
    assert sys.getsizeof(known._recent) < 1 << 20
    assert len(known._runs) < 16
    assert all(known.has([key(number) for number in range(0, count, 997)]))
    assert not any(known.has([key(number) for number in range(count, count + 1000)]))
