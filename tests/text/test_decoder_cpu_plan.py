"""Rows that share pages go through them together, and have the bits that each has alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import LLAMA, random_weights

from gpuinfer.text.decoder import cpu_sizes as at
from gpuinfer.text.decoder.attention_plan import sees_of
from gpuinfer.text.decoder.compiled_decoder import CpuDecoder, cpu_available
from gpuinfer.text.decoder.cpu_attention import SPAN
from gpuinfer.text.decoder.cpu_plan import AttentionPlan, AttentionPlanner
from gpuinfer.text.transformer import PAGE, Step

pytestmark = pytest.mark.skipif(not cpu_available(torch.float32), reason="this processor has no FMA")

LENGTH, ROWS, PAGES = 576, 5, 128
TOKENS = np.random.default_rng(1).integers(0, LLAMA.vocabulary, LENGTH).tolist()


class Rows:
    """Rows of tokens in pages, which they may have in common."""

    def __init__(self) -> None:
        self._pages = itertools.count()
        self.tables = [self.fresh() for _ in range(ROWS)]

    def fresh(self, shared: list[int] = ()) -> list[int]:
        """A table that begins with these pages."""
        return [*shared, *(next(self._pages) for _ in range(LENGTH // PAGE - len(shared)))]

    def share(self, source: int, target: int, positions: int) -> int:
        """The target begins with the source's whole pages; how many positions they hold."""
        whole = positions // PAGE
        self.tables[target] = self.fresh(self.tables[source][:whole])
        return whole * PAGE

    def step(self, *segments: tuple[int, int, list[int]], last_only: bool = False) -> Step:
        """As `steps.step_of`, in these rows' pages."""
        tokens = [token for _, _, run in segments for token in run]
        lengths = [len(run) for _, _, run in segments]
        wanted = np.cumsum(lengths) - 1 if last_only else np.arange(len(tokens))
        pages = [self.tables[row] for row, _, _ in segments]
        arrays = (tokens, pages, [start for _, start, _ in segments], lengths, wanted)
        return Step(*(np.ascontiguousarray(part, np.int32) for part in arrays))


def decoder(shape=LLAMA, dtype=torch.float32, threads=2):
    weights = random_weights(shape, dtype)
    return CpuDecoder(shape, weights, dtype, slots=ROWS, pages=2048, length=LENGTH, threads=threads, deterministic=True)


def planned(step: Step, heads: int = 2) -> AttentionPlan:
    rows = np.arange(len(step.tokens))
    return AttentionPlanner(heads).plan(
        step, rows, np.repeat(np.arange(len(step.lengths)), step.lengths), sees_of(step)
    )


def pieces_of(plan: AttentionPlan) -> list[list[tuple[list[int], int, int]]]:
    """Of each wave the members of its pieces, their first span and the end."""
    found = []
    for first, end in itertools.pairwise(plan.waves):
        of_wave = []
        for piece in plan.pieces[first:end]:
            begin = piece[at.MEMBERS]
            members = plan.members[begin : begin + piece[at.MEMBER_COUNT]].tolist()
            of_wave.append((members, int(piece[at.FIRST_SPAN]), int(piece[at.END_SPAN])))
        found.append(of_wave)
    return found


def test_rows_that_share_whole_spans_go_through_them_together_first():
    rows = Rows()
    for row in (1, 2, 3):
        rows.share(0, row, 2 * SPAN + PAGE)
    step = rows.step(*((row, 300, [1]) for row in range(4)))
    rest = [([row], 2, -1) for row in range(4)]
    assert pieces_of(planned(step)) == [[([0, 1, 2, 3], 0, 2)], rest]


def test_a_tree_of_beginnings_is_gone_through_from_its_root():
    rows = Rows()
    for row in (1, 2):
        rows.share(0, row, 4 * SPAN)
    for row in (3, 4):
        rows.share(0, row, SPAN)
    step = rows.step(*((row, 4 * SPAN + 10, [1]) for row in range(ROWS)))
    waves = pieces_of(planned(step))
    assert waves[0] == [([0, 1, 2, 3, 4], 0, 1)]
    assert waves[1] == [([0, 1, 2], 1, 4)]
    assert waves[2] == [([0], 4, -1), ([1], 4, -1), ([2], 4, -1), ([3], 1, -1), ([4], 1, -1)]


def test_steps_in_the_same_pages_are_planned_once_until_a_row_sees_less():
    rows, planner = Rows(), AttentionPlanner(2)
    step = rows.step((0, 300, [1]), (1, 300, [2]))
    places = np.arange(2)
    first = planner.plan(step, places, places, np.array([301, 301]))
    assert planner.plan(step, places, places, np.array([302, 302])) is first
    assert planner.plan(step, places, places, np.array([100, 302])) is not first


ROW = st.integers(0, ROWS - 1)
ACTIONS = st.one_of(
    st.tuples(st.just("write"), ROW, st.sampled_from([0, 30, 100, 190, 300]), st.integers(1, 60)),
    st.tuples(st.just("share"), ROW, ROW, st.sampled_from([40, 64, 130, 260, 390])),
    st.tuples(st.just("go on"), st.just(0), st.integers(0, 60), st.just(0)),
)


@settings(max_examples=examples(60), deadline=None)
@given(actions=st.lists(ACTIONS, min_size=4, max_size=16))
def test_whatever_is_shared_each_row_has_the_bits_it_has_alone(actions):
    """The other decoder shares nothing: it computes the tokens again."""
    together, apart = DECODERS
    rows, lone = Rows(), Rows()
    held = [TOKENS[:300] for _ in range(ROWS)]
    for one, where in ((together, rows), (apart, lone)):
        one.forward(where.step(*((row, 0, tokens) for row, tokens in enumerate(held))))
    for kind, row, number, count in actions:
        if kind == "share" and row != number:
            kept = rows.share(row, number, min(count, len(held[row])))
            held[number] = held[row][: max(kept, 1)]
            if not kept:
                together.forward(rows.step((number, 0, held[number])))
            apart.forward(lone.step((number, 0, held[number])))
        elif kind == "write":
            start = min(number, len(held[row])) // PAGE * PAGE
            rows.tables[row] = rows.fresh(rows.tables[row][: start // PAGE])  # what is shared is never written
            held[row] = held[row][:start] + [(number + count + place) % LLAMA.vocabulary for place in range(count)]
            for one, where in ((together, rows), (apart, lone)):
                one.forward(where.step((row, start, held[row][start:])))
        elif kind == "go on":
            segments = [(row, len(tokens), [(number + row) % 7]) for row, tokens in enumerate(held)]
            for row, tokens in enumerate(held):  # a page that is begun is a row's own
                if any(
                    rows.tables[row][len(tokens) // PAGE] == other[len(tokens) // PAGE] for other in rows.tables[:row]
                ):
                    raise AssertionError("a test shares whole pages alone")
            assert torch.equal(together.forward(rows.step(*segments)), apart.forward(lone.step(*segments)))
            held = [[*tokens, (number + row) % 7] for row, tokens in enumerate(held)]


DECODERS = (decoder(), decoder(threads=1)) if cpu_available(torch.float32) else ()
