"""Random numbers and bit tricks: the distributions are what they are called, streams depend on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from scipy import stats

from gpuinfer.workloads.selfplay import bits


@njit
def fill(draw, stream, out, argument):
    for i in range(out.shape[0]):
        out[i] = draw(stream, argument)


@njit
def fill_plain(draw, stream, out):
    for i in range(out.shape[0]):
        out[i] = draw(stream)


@njit
def count_bits(mask):
    return bits.popcount(mask), bits.trailing_zeros(mask)


def stream_of(seed, index=0):
    stream = np.zeros(2, np.uint64)
    bits.seed_stream(stream, seed, index)
    return stream


def sample(draw, *argument, count=20_000, seed=3, index=0):
    out = np.zeros(count)
    (fill if argument else fill_plain)(draw, stream_of(seed, index), out, *argument)
    return out


def test_random_below_is_uniform_and_exact_where_a_multiplication_alone_would_be_biased():
    assert not sample(bits.random_below, 1).any()
    for bound, modulus in ((2, 2), (3, 3), (7, 7), (52, 52), (100, 100), (3 << 30, 3)):
        drawn = sample(bits.random_below, bound).astype(np.int64)
        assert drawn.max() < bound
        assert stats.chisquare(np.bincount(drawn % modulus, minlength=modulus)).pvalue > 1e-4


@pytest.mark.parametrize(
    ("draw", "arguments", "law"),
    [
        (bits.random_unit, (), stats.uniform()),
        (bits.random_normal, (), stats.norm()),
        *((bits.random_gamma, (shape,), stats.gamma(shape)) for shape in (0.05, 0.3, 0.7, 1.0, 1.7, 10.0)),
    ],
)
def test_continuous_numbers_follow_their_law(draw, arguments, law):
    assert stats.kstest(sample(draw, *arguments), law.cdf).pvalue > 1e-4


def test_streams_are_independent_of_each_other_and_depend_on_seed_and_index_alone():
    first = [sample(bits.random_unit, count=1, seed=seed)[0] for seed in range(2000)]
    by_index = [sample(bits.random_unit, count=1, seed=0, index=index)[0] for index in range(2000)]
    for drawn in (first, by_index):
        assert stats.kstest(drawn, stats.uniform().cdf).pvalue > 1e-4
    assert abs(np.corrcoef(by_index[1:], by_index[:-1])[0, 1]) < 0.1
    assert (stream_of(1, 2) == stream_of(1, 2)).all()
    assert len({int(stream_of(seed, index)[0]) for seed in range(50) for index in range(50)}) == 2500


@given(mask=st.integers(0, 2**62))
def test_bits_are_counted(mask):
    lowest = (mask & -mask).bit_length() - 1 if mask else 64
    assert count_bits(mask) == (mask.bit_count(), lowest)
