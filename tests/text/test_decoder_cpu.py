"""The compiled decoder: rows that share pages go through them together, threads that rest and are counted, memory."""

from __future__ import annotations

import contextlib
import copy
import itertools
import mmap
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
from random_models import LLAMA, random_weights
from steps import step_of, table_of

from gpuinfer.text.decoder import cpu_math, cpu_panels
from gpuinfer.text.decoder import cpu_sizes as at
from gpuinfer.text.decoder.attention_plan import sees_of
from gpuinfer.text.decoder.compiled_decoder import CpuDecoder, cpu_available
from gpuinfer.text.decoder.cpu_attention import SPAN
from gpuinfer.text.decoder.cpu_plan import AGAIN, SETTLE, TURNS, AttentionPlanner, FewestThreads
from gpuinfer.text.transformer import PAGE, Step, UnreadLayers

pytestmark = pytest.mark.skipif(not cpu_available(torch.float32), reason="this processor has no FMA")

LENGTH, ROWS, PAGES = 576, 5, 2048
TOKENS = np.random.default_rng(1).integers(0, LLAMA.vocabulary, LENGTH).tolist()


def decoder(weights=None, threads=2, slots=ROWS, pages=PAGES, **options):
    options = {"length": LENGTH, "deterministic": True, **options}
    weights = weights or random_weights(LLAMA)
    return CpuDecoder(LLAMA, weights, torch.float32, slots=slots, pages=pages, threads=threads, **options)


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

    def step(self, *segments: tuple[int, int, list[int]]) -> Step:
        """As `steps.step_of`, in these rows' pages."""
        pages = np.array([self.tables[row] for row, _, _ in segments], np.int32)
        return replace(step_of(*segments), pages=pages)


def pieces_of(step):
    """Of each wave of a step's plan for two heads the members of its pieces, their first span and the end."""
    segments = np.repeat(np.arange(len(step.lengths)), step.lengths)
    plan = AttentionPlanner(2).plan(step, np.arange(len(step.tokens)), segments, sees_of(step))
    return [
        [
            (plan.members[begin : begin + count].tolist(), int(piece[at.FIRST_SPAN]), int(piece[at.END_SPAN]))
            for piece in plan.pieces[first:end]
            for begin, count in [(piece[at.MEMBERS], piece[at.MEMBER_COUNT])]
        ]
        for first, end in itertools.pairwise(plan.waves)
    ]


def test_rows_that_share_whole_spans_go_through_them_together_from_the_root_of_a_tree():
    rows = Rows()
    for row in (1, 2, 3):
        rows.share(0, row, 2 * SPAN + PAGE)
    step = rows.step(*((row, 300, [1]) for row in range(4)))
    assert pieces_of(step) == [[([0, 1, 2, 3], 0, 2)], [([row], 2, -1) for row in range(4)]]
    rows = Rows()
    for row, shared in ((1, 4), (2, 4), (3, 1), (4, 1)):
        rows.share(0, row, shared * SPAN)
    waves = pieces_of(rows.step(*((row, 4 * SPAN + 10, [1]) for row in range(ROWS))))
    assert waves[:2] == [[([0, 1, 2, 3, 4], 0, 1)], [([0, 1, 2], 1, 4)]]
    assert waves[2] == [([0], 4, -1), ([1], 4, -1), ([2], 4, -1), ([3], 1, -1), ([4], 1, -1)]


def test_steps_in_the_same_pages_are_planned_once_until_a_row_sees_less():
    planner, places = AttentionPlanner(2), np.arange(2)
    step = Rows().step((0, 300, [1]), (1, 300, [2]))
    first, same, less = (planner.plan(step, places, places, np.array([sees, 302])) for sees in (301, 302, 100))
    assert same is first is not less


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
    rows, lone = Rows(), Rows()
    held = [TOKENS[:300] for _ in range(ROWS)]
    with contextlib.closing(decoder()) as together, contextlib.closing(decoder(threads=1)) as apart:
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
                assert torch.equal(together.forward(rows.step(*segments)), apart.forward(lone.step(*segments)))
                held = [[*tokens, (number + row) % 7] for row, tokens in enumerate(held)]


@pytest.mark.parametrize("lengths", [(1,), (1, 1), (3, 1)], ids=str)
def test_a_page_that_is_copied_brings_at_most_what_its_source_had(lengths):
    """Of a row that turned into NaN behind what is taken from it."""
    weights, poison = random_weights(LLAMA), 60
    weights.embedding[poison] = torch.nan
    healthy = [token for token in TOKENS if token != poison]
    with contextlib.closing(decoder(weights, 1, 2, 16, length=96)) as several:
        expected = several.forward(step_of((0, 0, healthy[:24])))[20:].clone()
        several.forward(step_of((0, 20, [poison] * 60)))
        several.copy_pages([0, 1], [8, 9])
        ends, found = np.cumsum((20, *lengths)), []
        for begin, end in itertools.pairwise(ends):
            found.append(several.forward(step_of((1, begin, healthy[begin:end]))).clone())
        assert torch.equal(torch.cat(found), expected[: sum(lengths)])


@pytest.mark.parametrize("length", [4, 300])
def test_a_row_of_any_step_is_found_where_it_was_before(length):
    """Steps of all sizes in one decoder: buffers that grow lose nothing of the cache."""
    tokens = TOKENS[: length + 1]
    with contextlib.closing(decoder()) as several, contextlib.closing(decoder(slots=1, threads=1)) as one:
        pages = table_of([1], 16)
        several.forward(replace(step_of((1, 0, tokens[:length])), pages=pages))
        found = several.forward(replace(step_of((1, length, tokens[length:])), pages=pages))
        for place, token in enumerate(tokens):
            logits = one.forward(replace(step_of((0, place, [token])), pages=table_of([0], 16)))
        assert torch.equal(found, logits)


def test_threads_rest_come_back_and_count_what_they_computed_and_how_long_they_waited():
    several, control = decoder(length=96), None
    assert several.usage()["busy_s"] == 0
    first = several.forward(step_of((0, 0, TOKENS[:90]))).clone()
    used, control = several.usage(), several._threads._control
    assert used["threads"] == 2
    assert min(used["busy_s"], used["waited_s"]) > 0
    control[at.REST] = 0
    several.rest()
    assert control[at.REST] == 1
    until = time.monotonic() + 60
    while not control[at.OF_THREAD + at.LINE + at.ASLEEP]:
        assert time.monotonic() < until
        time.sleep(0.001)
    assert torch.equal(several.forward(step_of((0, 89, TOKENS[89:90]))), first[89:])
    assert control[at.REST] == 0
    several.close()
    assert several.usage()["busy_s"] >= used["busy_s"] / 2  # what closed threads did still counts


def threads_of(choice, count, enough, most=8):
    """How many threads each of these steps had, where so many read as fast as memory gives."""
    found = []
    for _ in range(count):
        threads = choice.threads_for(1, most)
        choice.took(1, threads, 1.0 / min(threads, enough))
        found.append(threads)
    return found


@pytest.mark.parametrize("enough", [1, 2, 4, 8])
def test_the_fewest_threads_that_reach_the_memory_compute(enough):
    choice = FewestThreads()
    found = threads_of(choice, SETTLE + 8 * TURNS, enough)
    assert enough < 8 or found.count(4) == 1  # a number that is far slower is tried once
    assert set(threads_of(choice, 100, enough)) == {enough}
    threads_of(choice, AGAIN + 8 * TURNS, 8)  # what else read memory is gone
    assert set(threads_of(choice, 100, 8)) == {8}
    for most in (4, 1):  # another number of threads begins anew
        assert threads_of(choice, 2, 1, most=most) == [most, most]


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

    decoder(replace(weights, layers=UnreadLayers(len(weights.layers), read)), 1, 1, 2, length=64).close()
    assert most == [1] * len(weights.layers)


def test_a_kernel_without_large_pages_gives_memory_all_the_same(monkeypatch):
    class Plain(mmap.mmap):
        def madvise(self, *given):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Plain)
    memory = cpu_panels.map_memory(5000)
    assert (len(memory), memory.any()) == (5000, False)
    assert memory.ctypes.data % cpu_panels.LARGE == 0
