"""Rows whose slots have been copied from one another are read once, and have the bits that each has alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import LLAMA, VARIANTS, random_weights
from steps import seeing, step_of

from gpuinfer.text.decoder.cpu import CpuDecoder, available
from gpuinfer.text.decoder.cpu_attention import BLOCK
from gpuinfer.text.decoder.cpu_sharing import Sharing

pytestmark = pytest.mark.skipif(not available(torch.float32), reason="this processor has no FMA")

LENGTH, SLOTS = 288, 5
SHAPES = {
    "two heads a key head": LLAMA,
    "a key head for each": replace(LLAMA, **VARIANTS["a key head for each"]),
    "six heads for one": replace(LLAMA, heads=6, kv_heads=1),
    "windows": replace(LLAMA, windows=(70, None)),
}
each_shape = pytest.mark.parametrize("shape", [pytest.param(shape, id=name) for name, shape in SHAPES.items()])
TOKENS = np.random.default_rng(1).integers(0, LLAMA.vocabulary, LENGTH).tolist()


def decoder(shape=LLAMA, dtype=torch.float32):
    weights = random_weights(shape, dtype)
    return CpuDecoder(shape, weights, dtype, slots=SLOTS, length=LENGTH, threads=1, deterministic=True)


def shared_with(sharing: Sharing, *starts: int, length: int = 1) -> list[tuple[int, int]]:
    """(slot, positions) that each slot reads, in the order of slots, when all go on at these positions."""
    turns = sharing.turns(step_of(*((slot, start, [1] * length) for slot, start in enumerate(starts))))
    found = {int(segment): (int(slot), int(count)) for segment, _, slot, count in turns}
    return [found[slot] for slot in range(len(starts))]


def test_copies_read_their_source_in_whole_blocks():
    sharing = Sharing(3, 64)
    sharing.copied(0, [1, 2], 200)
    assert shared_with(sharing, 200, 200, 200) == [(0, 192), (0, 192), (0, 192)]


def test_a_copy_of_a_copy_reads_the_first_source():
    sharing = Sharing(3, 64)
    sharing.copied(0, [1], 200)
    sharing.copied(1, [2], 140)
    assert shared_with(sharing, 200, 200, 140) == [(0, 192), (0, 192), (0, 128)]


def test_a_copy_that_has_more_of_its_source_than_that_shares_reads_the_source():
    sharing = Sharing(3, 64)
    sharing.copied(0, [1], 64)
    sharing.copied(1, [2], 200)
    assert shared_with(sharing, 64, 200, 200) == [(0, 64), (1, 192), (1, 192)]


def test_those_left_by_a_source_that_is_written_over_read_one_of_them():
    sharing = Sharing(3, 64)
    sharing.copied(0, [1, 2], 200)
    assert shared_with(sharing, 100, 200, 200) == [(0, 64), (1, 192), (1, 192)]


def test_prompts_read_their_own_memory():
    sharing = Sharing(2, 64)
    sharing.copied(0, [1], 100)
    assert [count for _, count in shared_with(sharing, 100, 100, length=2)] == [0, 0]


def test_a_token_that_sees_less_than_is_shared_reads_no_more():
    sharing = Sharing(2, 64)
    sharing.copied(0, [1], 200)
    turns = sharing.turns(seeing((0, 200, [1], [201]), (1, 200, [1], [100])))
    assert sorted((int(segment), int(count)) for segment, *_, count in turns) == [(0, 192), (1, 64)]


@each_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_share_a_beginning_have_the_bits_they_have_alone(shape, dtype):
    together, apart = decoder(shape, dtype), decoder(shape, dtype)
    for one in (together, apart):
        one.forward(step_of((3, 0, TOKENS[:150])))
    together.copy(3, [0, 1, 4], 140)
    for slot in (0, 1, 4):
        apart.forward(step_of((slot, 0, TOKENS[:140])))
    for at in range(3):
        step = step_of(*((slot, start + at, [slot + at]) for slot, start in ((0, 140), (1, 140), (3, 150), (4, 140))))
        assert torch.equal(together.forward(step), apart.forward(step))
    lone = [(slot, start + 3, [slot]) for slot, start in ((0, 140), (1, 140), (3, 150), (4, 140))]
    step = step_of(lone[0], lone[1], (2, 0, TOKENS[:30]), lone[2], lone[3], last_only=True)
    for asked in (step, replace(step, wanted=step.wanted[[0, 2, 4]])):  # of some rows nobody asks for the logits
        assert torch.equal(together.forward(asked), apart.forward(asked))
    together.close()
    apart.close()


SLOT = st.integers(0, SLOTS - 1)
ACTIONS = st.one_of(
    st.tuples(st.just("write"), SLOT, st.sampled_from([0, 30, 100, 190]), st.integers(1, 60)),
    st.tuples(st.just("copy"), SLOT, SLOT, st.sampled_from([40, 64, 100, 150, 220])),
    st.tuples(st.just("go on"), st.just(0), st.integers(0, 60), st.just(0)),
)


@settings(max_examples=examples(200), deadline=None)
@given(actions=st.lists(ACTIONS, min_size=4, max_size=20))
def test_whatever_is_copied_and_written_over_each_row_has_the_bits_it_has_alone(actions):
    """The other decoder is never told of a copy: it computes the tokens again."""
    together, apart = DECODERS
    held = [TOKENS[:200] for _ in range(SLOTS)]
    for one in DECODERS:
        one.forward(step_of(*((slot, 0, tokens) for slot, tokens in enumerate(held))))
    for kind, slot, number, count in actions:
        if kind == "copy" and slot != number:
            held[number] = held[slot][:count]
            together.copy(slot, [number], len(held[number]))
            apart.forward(step_of((number, 0, held[number])))
        elif kind == "write":
            start = min(number, len(held[slot]))
            held[slot] = held[slot][:start] + [(number + count + at) % LLAMA.vocabulary for at in range(count)]
            for one in DECODERS:
                one.forward(step_of((slot, start, held[slot][start:])))
        elif kind == "go on":
            step = step_of(*((slot, len(tokens), [(number + slot) % 7]) for slot, tokens in enumerate(held)))
            assert torch.equal(together.forward(step), apart.forward(step))
            held = [[*tokens, (number + slot) % 7] for slot, tokens in enumerate(held)]


DECODERS = (decoder(), decoder()) if available(torch.float32) else ()


def test_the_blocks_that_are_shared_are_whole_tiles():
    assert BLOCK % 16 == 0
