"""How a step is divided: every token once, in sizes that hold it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from steps import table_of

from gpuinfer.models.forward_cuda import bucket_for
from gpuinfer.text.decoder.attention_plan import ends_of, positions_of, sees_of, segments_of
from gpuinfer.text.decoder.torch_batch import back, parts_of, reach_buckets, row_buckets, rows_of, tiles
from gpuinfer.text.transformer import Step

ROOM = 512


@st.composite
def steps(draw):
    runs = draw(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 200)), min_size=1, max_size=12))
    starts, lengths = (np.array(part, np.int32) for part in zip(*runs, strict=True))
    tokens = np.arange(int(lengths.sum()), dtype=np.int32)
    return Step(tokens, table_of(range(len(runs)), 16), starts, lengths, tokens[:0])


@st.composite
def seeing_steps(draw):
    """Steps that say what is seen, or do not; each segment's tokens see alike, or as they please."""
    step = draw(steps())
    if draw(st.booleans()):
        return step
    sees = []
    for length in step.lengths.tolist():
        alike = draw(st.booleans())
        seen = st.integers(1, ROOM)
        sees += [draw(seen)] * length if alike else draw(st.lists(seen, min_size=length, max_size=length))
    return replace(step, sees=np.array(sees, np.int32))


@given(seeing_steps())
def test_each_segment_is_in_one_group_that_holds_it(step):
    ends = ends_of(step)
    tokens = np.repeat(np.arange(len(step.lengths)), step.lengths)
    seen = []
    for part in parts_of(step, ROOM):
        seen += part.segments.tolist()
        assert (step.lengths[part.segments] <= part.width).all()
        assert (ends[part.segments] <= part.reach).all()
        assert part.reach <= ROOM
        if part.order == "causal":
            assert part.width > 1
            assert (step.starts[part.segments] == 0).all()
        elif part.order == "whole":
            assert (sees_of(step)[np.isin(tokens, part.segments)] == part.reach).all()
    assert sorted(seen) == list(range(len(step.lengths)))


@given(steps())
def test_a_row_finds_its_own_among_what_the_groups_give(step):
    parts = list(parts_of(step, ROOM))
    rows = [rows_of(step, part) for part in parts]
    given_back = np.concatenate([asking.ravel() for asking in rows])
    assert (given_back[back(step, parts, rows)] == np.arange(len(step.tokens))).all()


@given(st.integers(1, 1024), st.data())
def test_a_decode_step_is_padded_to_a_little_more(most, data):
    rows = data.draw(st.integers(1, most))
    buckets = row_buckets(most)
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == most
    padded = bucket_for(rows, buckets)
    assert padded <= max(2 * rows - 1, 1)
    assert rows < 16 or padded <= 1.5 * rows + 1


@given(steps(), st.integers(1, 20))
def test_tiles_hold_each_token_once_after_those_before_it(step, size):
    positions, segments = positions_of(step), segments_of(step)
    reaches = reach_buckets(ROOM)
    done = step.starts.copy()
    for members, reach in tiles(positions + 1, size, reaches):
        assert len(members) <= size
        for token in members:
            assert positions[token] == done[segments[token]]
            assert reach == bucket_for(int(positions[token]) + 1, reaches)
            done[segments[token]] += 1
    assert (done == step.starts + step.lengths).all()
