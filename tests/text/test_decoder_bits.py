"""A row has the same logits, bit by bit, whatever shares its step, however it is cut, and on any number of threads."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from counts import examples
from decoders import DECODERS
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import LLAMA, MIXTURES, VARIANTS, random_weights
from steps import COLUMNS, scattered, seeing, step_of

from gpuinfer.text.transformer import Rope

SHAPES = {name: replace(LLAMA, **changes) for name, changes in (VARIANTS | MIXTURES).items()}
UNEVEN = {"hidden": 44, "heads": 4, "kv_heads": 1, "head_dim": 12, "intermediate": 75, "rope": Rope((1.0, 0.3, 0.1))}
EIGHT = {"head_dim": 8, "rope": Rope((1.0, 0.3, 0.1, 0.02))}
THREADED = SHAPES | {
    "sizes that no vector divides": replace(LLAMA, vocabulary=131, **UNEVEN),
    "14 heads over 2": replace(LLAMA, heads=14, kv_heads=2, **EIGHT),
    "71 heads over one": replace(LLAMA, heads=71, kv_heads=1, **EIGHT),
}
BITWISE = [name for name in DECODERS if name == "torch, deterministic" or name.startswith("kernels")]
each_bitwise = pytest.mark.parametrize("name", BITWISE)
kernels = pytest.mark.skipif("kernels" not in DECODERS, reason="this processor has no FMA")
TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, LLAMA.vocabulary, 90)]
OTHER = TOKENS[::-1]


def decoder_of(name, shape=LLAMA, dtype=torch.float32, slots=4, **options):
    make = partial(DECODERS[name], **{"deterministic": True, **options})
    return contextlib.closing(make(shape, random_weights(shape, dtype), dtype, slots=slots, length=160))


def alone(name, shape=LLAMA, dtype=torch.float32, tokens=TOKENS, **options):
    """The logits of one prompt that has a decoder to itself, token by token."""
    with decoder_of(name, shape, dtype, slots=1, **options) as one:
        return torch.cat([one.forward(step_of((0, at, [token]))).clone() for at, token in enumerate(tokens)])


@pytest.mark.sample(7)
@each_bitwise
@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_in_chunks_beside_others_has_the_bits_it_has_token_by_token(name, shape):
    """In each number format; in bfloat16 of kernels by the processor too, if it can."""
    ways = [(torch.float32, {}), (torch.bfloat16, {})]
    if name == "kernels":
        ways.append((torch.bfloat16, {"deterministic": False}))
    elif shape == "plain" and name.startswith("torch"):
        ways.append((torch.float16, {}))
    for dtype, options in ways:
        with decoder_of(name, SHAPES[shape], dtype, **options) as several:
            first = several.forward(step_of((0, 0, OTHER[:7]), (2, 0, TOKENS[:40]))).clone()
            second = several.forward(step_of((2, 40, TOKENS[40:43]), (1, 0, OTHER[:20]), (0, 7, OTHER[7:8]))).clone()
            third = several.forward(step_of((2, 43, TOKENS[43:]))).clone()
        found = torch.cat([first[7:], second[:3], third])
        assert torch.equal(found, alone(name, SHAPES[shape], dtype, **options))


@pytest.mark.sample(7)
@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", THREADED)
def test_any_number_of_threads_gives_the_same_bits_and_may_change_from_step_to_step(shape, dtype):
    expected = alone("kernels", THREADED[shape], dtype, TOKENS[:28])
    for threads in (2, 3, 5, 8):
        with decoder_of("kernels", THREADED[shape], dtype, threads=threads) as several:
            found = [several.forward(step_of((0, 0, OTHER[:3]), (2, 0, TOKENS[:20])))[3:].clone()]
            for at, count in enumerate([threads, 1, 2, threads, 1, 1, threads, 2], 20):
                several.use(count)
                found.append(several.forward(step_of((2, at, TOKENS[at : at + 1]))).clone())
                if count == threads:
                    several.rest()
        assert torch.equal(torch.cat(found), expected)


@cache
def seen_alone(name, block, length):
    sees = sees_of(block, length)
    with decoder_of(name, slots=1) as single:
        return single.forward(seeing((0, 0, TOKENS[:length], sees))).clone()


def sees_of(block, length):
    return [min((at // block + 1) * block, length) for at in range(length)]


@st.composite
def pieces(draw):
    """A block's positions (1: as a causal model), a row's length, and pieces of whole blocks in which it goes through:
    (start, end, the tokens whose logits are wanted).
    """
    block, length = draw(st.sampled_from([1, 1, 2, 7, 16, 40])), draw(st.integers(1, 90))
    cuts = draw(st.lists(st.integers(0, -(-length // block)), max_size=6, unique=True))
    edges = sorted({0, length, *(min(length, cut * block) for cut in cuts)})
    each = itertools.pairwise(edges)
    return block, length, [(a, b, draw(st.sets(st.integers(a, b - 1), min_size=1))) for a, b in each]


@each_bitwise
@settings(max_examples=examples(40), deadline=None)
@given(
    data=pieces(),
    order=st.permutations(range(4)),
    company=st.integers(0, 90),
    pages=st.permutations(range(4 * COLUMNS)),
)
def test_a_row_in_any_pieces_any_pages_and_any_company_has_the_same_bits(name, data, order, company, pages):
    """Whatever else is wanted: rows whose logits are not leave the last layer early."""
    block, length, parts = data
    sees, expected = sees_of(block, length), seen_alone(name, block, length)
    with decoder_of(name) as several:
        for start, end, wanted in parts:
            others = [(slot, 0, OTHER[slot : company + slot]) for slot in (0, 1, 3) if company]
            others = [(slot, at, run, [len(run)] * len(run)) for slot, at, run in others if run]
            runs = sorted([*others, (2, start, TOKENS[start:end], sees[start:end])], key=lambda run: order[run[0]])
            first = sum(len(run[2]) for run in itertools.takewhile(lambda run: run[0] != 2, runs))
            chosen = np.array(sorted(wanted), np.int32)
            step = replace(scattered(seeing(*runs), pages), wanted=chosen - np.int32(start - first))
            assert torch.equal(several.forward(step), expected[chosen])


@each_bitwise
@pytest.mark.parametrize("shape", SHAPES)
def test_few_logits_are_those_of_all_and_canvases_those_that_they_are_alone(name, shape):
    """And the cache has what all rows have stored."""
    runs = [
        (slot, 0, tokens, [len(tokens)] * len(tokens))
        for slot, tokens in enumerate((TOKENS[:40], OTHER[:1], TOKENS[50:79]))
    ]
    wanted, on = [0, 7, 8, 30, 40, 69], step_of((0, 40, TOKENS[40:43]), (2, 29, TOKENS[3:5]))
    with decoder_of(name, SHAPES[shape]) as whole, decoder_of(name, SHAPES[shape]) as few:
        every, after = whole.forward(seeing(*runs)).clone(), whole.forward(on).clone()
        found = few.forward(replace(seeing(*runs), wanted=np.array(wanted, np.int32)))
        assert torch.equal(found, every[wanted])
        assert torch.equal(few.forward(on), after)
        assert torch.equal(few.forward(seeing((3, 0, *runs[2][2:]))), every[41:])


@each_bitwise
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_goes_on_in_the_midst_of_what_was_proposed(name, shape):
    """As if that had never been there, in the same page and in the next."""
    expected, spoilt = alone(name, SHAPES[shape], tokens=TOKENS[:70]), OTHER[:9]
    with decoder_of(name, SHAPES[shape]) as one:
        found = [one.forward(step_of((1, 0, TOKENS[:18]), (2, 0, OTHER[:5]))).clone()[:18]]
        for at, right in ((18, 3), (22, 0), (23, 7), (31, 0), (32, 1), (34, 9)):
            proposed = [*TOKENS[at : at + right + 1], *spoilt]
            some = one.forward(step_of((0, 0, OTHER[:2]), (1, at, proposed)))
            found.append(some[2 : 3 + right].clone())
        found.append(one.forward(step_of((1, 44, TOKENS[44:70]))))
    assert torch.equal(torch.cat(found), expected)
