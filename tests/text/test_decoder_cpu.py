"""The compiled decoder: a row's logits are the same, bit by bit, whatever shares its step."""

from __future__ import annotations

import copy
import functools
import itertools
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from random_models import LLAMA, VARIANTS, random_weights
from steps import COLUMNS, step_of, table_of

from gpuinfer.text.decoder import cpu_math, cpu_sizes
from gpuinfer.text.decoder.compiled_decoder import CpuDecoder, cpu_available
from gpuinfer.text.transformer import PAGE, Rope, UnreadLayers

pytestmark = pytest.mark.skipif(not cpu_available(torch.float32), reason="this processor has no FMA")

CASES = [pytest.param(replace(LLAMA, **changes), id=name) for name, changes in VARIANTS.items()]
UNEVEN = replace(
    LLAMA, vocabulary=131, hidden=44, heads=4, kv_heads=1, head_dim=12, intermediate=75, rope=Rope((1.0, 0.3, 0.1))
)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
TOKENS = list(np.random.default_rng(0).integers(0, LLAMA.vocabulary, 90))


def decoder(shape=LLAMA, dtype=torch.float32, slots=4, length=96, threads=2, **options):
    weights, pages = random_weights(shape, dtype), slots * max(COLUMNS, -(-length // PAGE))
    return CpuDecoder(shape, weights, dtype, slots=slots, pages=pages, length=length, threads=threads, **options)


def alone(shape, dtype, tokens, **options):
    """The logits of one prompt that has a decoder to itself, token by token on one thread."""
    one = decoder(shape, dtype, slots=1, **{"threads": 1} | options)
    found = [one.forward(step_of((0, at, [token]))).clone() for at, token in enumerate(tokens)]
    one.close()
    return torch.cat(found)


@pytest.mark.parametrize(
    ("dtype", "deterministic"),
    [
        pytest.param(torch.float32, False, id="float32"),
        pytest.param(torch.bfloat16, True, id="bfloat16, widened"),
        pytest.param(torch.bfloat16, False, id="bfloat16, by the processor if it can"),
    ],
)
@pytest.mark.parametrize("shape", CASES)
def test_a_prompt_in_chunks_beside_others_has_the_bits_it_has_token_by_token(shape, dtype, deterministic):
    expected = alone(shape, dtype, TOKENS, deterministic=deterministic)
    other = list(reversed(TOKENS))
    several = decoder(shape, dtype, deterministic=deterministic)
    first = several.forward(step_of((0, 0, other[:7]), (2, 0, TOKENS[:40]))).clone()
    second = several.forward(step_of((2, 40, TOKENS[40:43]), (1, 0, other[:20]), (0, 7, other[7:8]))).clone()
    third = several.forward(step_of((2, 43, TOKENS[43:]))).clone()
    several.close()
    assert torch.equal(torch.cat([first[7:], second[:3], third]), expected)


@each_dtype
@pytest.mark.parametrize("shape", [*CASES, pytest.param(UNEVEN, id="sizes that no vector divides")])
def test_any_number_of_threads_gives_the_same_bits(shape, dtype):
    found = []
    for threads in (1, 2, 3, 5):
        several = decoder(shape, dtype, threads=threads, deterministic=True)
        prompt = several.forward(step_of((0, 0, TOKENS[:20]), (2, 0, TOKENS[:3]))).clone()
        found.append(torch.cat([prompt, several.forward(step_of((0, 20, TOKENS[20:21])))]))
        several.close()
    assert all(torch.equal(found[0], other) for other in found[1:])


@settings(max_examples=examples(15), deadline=None)
@given(cuts=st.lists(st.integers(1, 89), max_size=6, unique=True), slot=st.integers(0, 3), company=st.integers(0, 30))
def test_any_chunks_any_slot_and_any_company_give_the_same_bits(cuts, slot, company):
    several = decoder()
    edges = [0, *sorted(cuts), len(TOKENS)]
    found = []
    for begin, end in itertools.pairwise(edges):
        others = [((slot + 1) % 4, 0, TOKENS[:company])] if company else []
        logits = several.forward(step_of(*others, (slot, begin, TOKENS[begin:end])))
        found.append(logits[company:].clone())
    several.close()
    assert torch.equal(torch.cat(found), expected())


@functools.cache
def expected():
    """Each row alone: when the first test asks, as collecting waits for no kernel."""
    return alone(LLAMA, torch.float32, TOKENS)


def asleep(several):
    """Wait until the second thread sleeps: for a minute at most."""
    until = time.monotonic() + 60
    while not several._threads._control[cpu_sizes.OF_THREAD + cpu_sizes.LINE + cpu_sizes.ASLEEP]:
        assert time.monotonic() < until
        time.sleep(0.001)


@each_dtype
@pytest.mark.parametrize("shape", [*CASES, pytest.param(UNEVEN, id="sizes that no vector divides")])
def test_how_many_threads_take_part_may_change_from_step_to_step(shape, dtype):
    several = decoder(shape, dtype, threads=4, deterministic=True)
    found = []
    for at, threads in enumerate([4, 1, 2, 3, 1, 1, 4, 2]):
        several.use(threads)
        found.append(several.forward(step_of((1, at, TOKENS[at : at + 1]))).clone())
        if threads == 4:
            several.rest()
    several.close()
    assert torch.equal(torch.cat(found), alone(shape, dtype, TOKENS[:8], deterministic=True))


@pytest.mark.parametrize("lengths", [(1,), (1, 1), (3, 1)], ids=str)
def test_a_page_that_is_copied_brings_at_most_what_its_source_had(lengths):
    """Of a row that turned into NaN behind what is taken from it."""
    weights, poison = random_weights(LLAMA), 60
    weights.embedding[poison] = torch.nan
    healthy = [token for token in TOKENS if token != poison]
    several = CpuDecoder(LLAMA, weights, torch.float32, slots=2, pages=16, length=96, threads=1)
    expected = several.forward(step_of((0, 0, healthy[:24])))[20:].clone()
    several.forward(step_of((0, 20, [poison] * 60)))
    several.copy_pages([0, 1], [8, 9])
    at, found = 20, []
    for length in lengths:
        found.append(several.forward(step_of((1, at, healthy[at : at + length]))).clone())
        at += length
    several.close()
    assert torch.equal(torch.cat(found), expected[: sum(lengths)])


def test_threads_that_are_told_to_rest_sleep_at_once_and_come_back():
    several = decoder()
    several.forward(step_of((0, 0, TOKENS[:1])))
    several._threads._control[cpu_sizes.REST] = 0
    several.rest()
    assert several._threads._control[cpu_sizes.REST] == 1
    asleep(several)
    assert torch.equal(several.forward(step_of((0, 1, TOKENS[1:2]))), expected()[1:2])
    assert several._threads._control[cpu_sizes.REST] == 0
    several.close()


@pytest.mark.parametrize(("heads", "kv_heads", "threads"), [(9, 3, 2), (14, 2, 4), (7, 1, 3), (3, 3, 8), (71, 1, 2)])
def test_heads_that_threads_do_not_divide_are_shared_out_all_the_same(heads, kv_heads, threads):
    shape = replace(LLAMA, heads=heads, kv_heads=kv_heads, head_dim=8, rope=Rope((1.0, 0.3, 0.1, 0.02)))
    several = decoder(shape, threads=threads)
    found = several.forward(step_of((0, 0, TOKENS[:33]), (1, 0, TOKENS[:5])))
    assert torch.equal(found[:33], alone(shape, torch.float32, TOKENS[:33]))
    several.close()


def test_usage_counts_what_the_threads_computed_and_how_long_they_waited():
    several = decoder(threads=2)
    assert several.usage()["busy_s"] == 0
    several.forward(step_of((0, 0, TOKENS)))
    used = several.usage()
    assert used["threads"] == 2
    assert used["busy_s"] > 0
    assert used["waited_s"] > 0
    several.close()
    assert several.usage()["busy_s"] >= used["busy_s"] / 2  # what closed threads did still counts


@pytest.mark.parametrize("length", [4, 300])
def test_a_row_of_any_step_is_found_where_it_was_before(length):
    """Steps of all sizes in one decoder: buffers that grow lose nothing of the cache."""
    several = decoder(length=512)
    tokens, pages = (TOKENS * 6)[: length + 1], table_of([1], 16)
    several.forward(replace(step_of((1, 0, tokens[:length])), pages=pages))
    found = several.forward(replace(step_of((1, length, tokens[length:])), pages=pages))
    one = decoder(slots=1, length=512, threads=1)
    steps = (replace(step_of((0, at, [token])), pages=table_of([0], 16)) for at, token in enumerate(tokens))
    logits = [one.forward(step).clone() for step in steps]
    assert torch.equal(found, logits[-1])
    several.close()
    one.close()


def test_exp_is_right_to_seven_digits():
    @njit
    def each(x, out):
        for i in range(len(x)):
            out[i] = cpu_math.exp(x[i])

    x = -np.linspace(0, 86, 5001, dtype=np.float32)
    out = np.empty_like(x)
    each(x, out)
    np.testing.assert_allclose(out, np.exp(x.astype(np.float64)), rtol=5e-7)


def test_each_layer_is_read_once_and_let_go_before_the_next_is_read():
    weights, alive, most = random_weights(LLAMA, torch.float32), [], []

    def read(number):
        layer = copy.deepcopy(weights.layers[number])
        alive.append(weakref.ref(layer.down.weight))
        most.append(sum(weight() is not None for weight in alive))
        return layer

    lazy = replace(weights, layers=UnreadLayers(len(weights.layers), read))
    CpuDecoder(LLAMA, lazy, torch.float32, slots=1, pages=2, length=64, threads=1)
    assert most == [1] * len(weights.layers)
