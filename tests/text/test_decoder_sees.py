"""What tokens see may lie before and after them: every decoder attends to that and to nothing else."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from counts import examples
from decoders import DECODERS, each_decoder
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_attention import masked_logits
from random_models import LLAMA, random_weights
from steps import COLUMNS, scattered, seeing

from gpuinfer.text.transformer import Masking

TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, LLAMA.vocabulary, 150)]
OTHER = TOKENS[::-1]
LENGTH = 160
BITWISE = [name for name in DECODERS if name == "torch, deterministic" or name.startswith("kernels")]
each_bitwise = pytest.mark.parametrize("make", [pytest.param(DECODERS[name], id=name) for name in BITWISE])


@contextlib.contextmanager
def decoder_of(make, shape=LLAMA, dtype=torch.float32, slots=4):
    decoder = make(shape, random_weights(shape, dtype), dtype, slots=slots, length=LENGTH)
    with contextlib.closing(decoder):
        yield decoder


def whole(slot, tokens):
    """A canvas of which each token sees all."""
    return slot, 0, tokens, [len(tokens)] * len(tokens)


def assert_alike(found, wanted):
    torch.testing.assert_close(found, wanted.float(), atol=1e-4, rtol=0)


@each_decoder
def test_a_part_that_is_computed_anew_sees_what_the_cache_has_behind_it(make):
    """What is not computed anew is as it was in the step before: here nothing of it has changed."""
    with decoder_of(make) as decoder:
        first = decoder.forward(seeing(whole(1, TOKENS[:90]), whole(2, OTHER[:40]))).clone()
        again = decoder.forward(seeing((2, 8, OTHER[8:24], [40] * 16), (1, 30, TOKENS[30:31], [90])))
        assert_alike(again[:16], first[98:114])
        assert_alike(again[16:], first[30:31])


@each_decoder
def test_blocks_one_after_another_are_the_whole_seen_up_to_each_ones_block(make):
    block = 16
    sees = [min((at // block + 1) * block, 75) for at in range(75)]
    with decoder_of(make) as decoder:
        found = [
            decoder.forward(seeing((2, at, TOKENS[at : min(at + block, 75)], sees[at : at + block]))).clone()
            for at in range(0, 75, block)
        ]
        at_once = decoder.forward(seeing((0, 0, TOKENS[:75], sees)))
        assert_alike(torch.cat(found), masked_logits(LLAMA, random_weights(LLAMA), TOKENS[:75], sees))
        assert_alike(at_once, torch.cat(found))


@pytest.mark.parametrize(
    ("lengths", "width"),
    [
        ([32, 32, 32], 32),
        ([4, 4, 4, 4, 3], 4),
        ([20, 17], 32),
        ([64, 64, 64], 64),
        ([65, 65, 65], None),
        ([64, 1, 1], None),
    ],
    ids=str,
)
def test_short_runs_of_about_the_same_length_are_padded_to_a_fixed_shape(lengths, width):
    with decoder_of(DECODERS["torch in fixed shapes"], replace(LLAMA, masking=Masking(0)), slots=5) as decoder:
        step = seeing(*((slot, 0, TOKENS[:length], [length] * length) for slot, length in enumerate(lengths)))
        found = decoder._static.form_of_runs(step)
        assert (found and found.width) == width


@pytest.mark.parametrize("sharing", [1, 2, 4])
@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_runs_in_fixed_shapes_are_those_in_shapes_that_fit(sharing, data):
    """What a diffusion model with a cache computes: blocks of canvases, of any lengths, in any slots."""
    shape = replace(LLAMA, kv_heads=4 // sharing, masking=Masking(0))
    fixed, fitting = (DECODERS[name] for name in ("torch in fixed shapes", "torch"))
    lengths = data.draw(st.lists(st.integers(1, 140), min_size=5, max_size=5))
    canvases = [whole(slot, TOKENS[:length]) for slot, length in enumerate(lengths)]
    with decoder_of(fixed, shape, slots=5) as decoder, decoder_of(fitting, shape, slots=5) as other:
        for some in (decoder, other):
            some.forward(seeing(*canvases))
        for _ in range(3):
            runs = []
            for slot in data.draw(st.lists(st.integers(0, 4), min_size=1, unique=True)):
                start = data.draw(st.integers(0, lengths[slot] - 1))
                size = data.draw(st.sampled_from([1, 4, 30, 64, 65]))
                tokens = OTHER[start : min(start + size, lengths[slot])]
                runs.append((slot, start, tokens, [lengths[slot]] * len(tokens)))
            step = seeing(*runs)
            torch.testing.assert_close(decoder.forward(step), other.forward(step), atol=1e-5, rtol=0)


@st.composite
def canvases(draw):
    """Tokens and what each sees: by blocks of any size, or any number."""
    tokens = draw(st.lists(st.integers(0, LLAMA.vocabulary - 1), min_size=1, max_size=70))
    if draw(st.booleans()):
        block = draw(st.integers(1, 40))
        return tokens, [min(len(tokens), (at // block + 1) * block) for at in range(len(tokens))]
    return tokens, draw(st.lists(st.integers(1, len(tokens)), min_size=len(tokens), max_size=len(tokens)))


@each_decoder
@settings(max_examples=examples(25), deadline=None)
@given(
    rows=st.lists(canvases(), min_size=1, max_size=4),
    slots=st.permutations(range(4)),
    order=st.permutations(range(4 * COLUMNS)),
)
def test_whatever_tokens_see(make, rows, slots, order):
    weights = random_weights(LLAMA)
    with decoder_of(make) as decoder:
        decoder.forward(seeing(*(whole(slot, TOKENS[: 40 + 30 * slot]) for slot in range(4))))
        step = seeing(*((slot, 0, *row) for slot, row in zip(slots, rows, strict=False)))
        found = decoder.forward(scattered(step, order))
        assert_alike(found, torch.cat([masked_logits(LLAMA, weights, *row) for row in rows]))


@st.composite
def block_causal(draw):
    """A block's positions, a canvas' length, and pieces of whole blocks in which it goes through: (start, end)."""
    block, length = draw(st.integers(1, 40)), draw(st.integers(1, 90))
    cuts = draw(st.lists(st.integers(0, -(-length // block)), max_size=6, unique=True))
    edges = sorted({0, length, *(min(length, cut * block) for cut in cuts)})
    return block, length, list(itertools.pairwise(edges))


@each_bitwise
@settings(max_examples=examples(25), deadline=None)
@given(data=block_causal(), order=st.permutations(range(4)), company=st.integers(0, 150))
def test_blocks_in_any_pieces_in_any_order_of_company_have_the_same_bits(make, data, order, company):
    block, length, pieces = data
    sees = [min((at // block + 1) * block, length) for at in range(length)]
    with decoder_of(partial(make, deterministic=True), slots=1) as single:
        alone = single.forward(seeing((0, 0, TOKENS[:length], sees))).clone()
    with decoder_of(partial(make, deterministic=True)) as several:
        for start, end in pieces:
            others = [whole(slot, OTHER[slot : company + slot]) for slot in (0, 1, 3) if company]
            runs = [*others, (2, start, TOKENS[start:end], sees[start:end])]
            runs = sorted(runs, key=lambda run: order[run[0]])
            firsts = {run[0]: sum(len(before[2]) for before in runs[:at]) for at, run in enumerate(runs)}
            found = several.forward(seeing(*runs))[firsts[2] :][: end - start]
            assert torch.equal(found, alone[start:end])
