"""Random numbers and bit tricks: the distributions are what they are called, streams depend on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
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


def sample(draw, *argument, count=20_000, seed=3):
    out = np.zeros(count)
    if argument:
        fill(draw, stream_of(seed), out, *argument)
    else:
        fill_plain(draw, stream_of(seed), out)
    return out


@pytest.mark.parametrize("bound", [1, 2, 3, 7, 52, 100])
def test_random_below_is_uniform(bound):
    found = np.bincount(sample(bits.random_below, bound).astype(int), minlength=bound)
    assert len(found) == bound
    assert bound == 1 or stats.chisquare(found).pvalue > 1e-4


def test_random_below_is_exact_where_a_multiplication_alone_would_be_biased():
    """Below 3 × 2**30 a scaled 32-bit number would take every third value twice as often."""
    found = np.bincount(sample(bits.random_below, 3 << 30).astype(np.int64) % 3, minlength=3)
    assert stats.chisquare(found).pvalue > 1e-4


@pytest.mark.parametrize(
    ("draw", "law"),
    [
        pytest.param(bits.random_unit, stats.uniform(), id="uniform"),
        pytest.param(bits.random_normal, stats.norm(), id="normal"),
    ],
)
def test_continuous_numbers_follow_their_law(draw, law):
    assert stats.kstest(sample(draw), law.cdf).pvalue > 1e-4


@pytest.mark.parametrize("shape", [0.05, 0.3, 0.7, 1.0, 1.7, 10.0])
def test_gamma_follows_its_law(shape):
    assert stats.kstest(sample(bits.random_gamma, shape), stats.gamma(shape).cdf).pvalue > 1e-4


def test_streams_are_independent_of_each_other():
    first = np.array([sample(bits.random_unit, count=1, seed=seed)[0] for seed in range(2000)])
    assert stats.kstest(first, stats.uniform().cdf).pvalue > 1e-4
    by_index = np.zeros((2000, 1))
    for index in range(2000):
        fill_plain(bits.random_unit, stream_of(0, index), by_index[index])
    assert stats.kstest(by_index[:, 0], stats.uniform().cdf).pvalue > 1e-4
    assert abs(np.corrcoef(by_index[1:, 0], by_index[:-1, 0])[0, 1]) < 0.1


def test_a_stream_depends_on_seed_and_index_alone():
    assert (stream_of(1, 2) == stream_of(1, 2)).all()
    assert len({int(stream_of(seed, index)[0]) for seed in range(50) for index in range(50)}) == 2500


@settings(deadline=None)
@given(mask=st.integers(0, 2**62))
def test_bits_are_counted(mask):
    lowest = (mask & -mask).bit_length() - 1 if mask else 64
    assert count_bits(mask) == (bin(mask).count("1"), lowest)
