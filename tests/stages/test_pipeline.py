"""A model as a list of layers, which of them make a stage, and stages at work: order, failures, closing."""

import contextlib
import logging
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, pairwise

import pytest
import staged_models
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves

from gpuinfer.errors import BackendDied, UsageError
from gpuinfer.models.networks import BlobNet, BlobNetSmall
from gpuinfer.models.pipeline.layer_trace import segments_of
from gpuinfer.models.pipeline.schedule import Pipeline
from gpuinfer.models.pipeline.stage_plan import cores_by_stage, least_largest
from gpuinfer.stats import Lane

# A list of layers

FLOATS, BITS = torch.randn(5, 6), torch.randint(0, 2, (9, 40))


def frozen(network, dtype):
    return network(40, 7, 3).eval().freeze(device=torch.device("cpu"), dtype=dtype)


@pytest.mark.parametrize(
    ("module", "attribute", "count", "features"),
    [
        (staged_models.line(), None, 6, FLOATS),  # a Sequential within one, a layer that comes twice
        (staged_models.Named(), None, 5, FLOATS),
        (staged_models.Skipping(), "blocks", 4, FLOATS),  # with values that skip layers
        (staged_models.OneRow(), None, 4, FLOATS),
        (nn.Sequential(staged_models.Skipping()), "0.blocks", 4, FLOATS),
        (nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 2))), "1", 2, FLOATS),
        *((frozen(BlobNet, dtype), None, 8, BITS.to(dtype)) for dtype in (torch.float32, torch.bfloat16)),
        *((frozen(BlobNetSmall, dtype), None, 3, BITS.to(dtype)) for dtype in (torch.float32, torch.bfloat16)),
    ],
)
def test_layers_one_after_the_other_answer_as_the_model_to_the_bit(module, attribute, count, features):
    segments = segments_of(module.eval(), "a-model", attribute).modules
    assert len(segments) == count
    with torch.inference_mode():
        value, expected = features.clone(), module(features.clone())
        for segment in segments:
            value = segment(value)
    assert type(value) is type(expected)
    for ours, theirs in zip(tree_leaves(value), tree_leaves(expected), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("module", "attribute", "said"),
    [
        (staged_models.Skipping(), None, "-B layers=blocks \\(or other\\)"),
        (staged_models.Opaque(), None, "no ModuleList to name"),
        (staged_models.Skipping(), "embed", "'embed' is Linear"),
        (staged_models.Opaque(), "blocks", "has no such attribute"),
        (staged_models.Backwards(), "blocks", "once each and in their order"),
        (staged_models.Skipping(), "other", "once each and in their order"),
        (staged_models.Deciding(), "blocks", "Give it a method segments"),
        (staged_models.NoList(), None, "returned int"),
    ],
)
def test_a_model_whose_layers_cannot_be_told_apart_says_what_to_name(module, attribute, said):
    with pytest.raises(UsageError, match=said):
        segments_of(module, "a-model", attribute)


# Which layers make a stage

TIMES = st.lists(st.floats(0, 100), min_size=1, max_size=8)


def every_split(layers, stages):
    for points in combinations(range(1, layers), stages - 1):
        yield list(pairwise([0, *points, layers]))


def largest(split, seconds):
    return max(math.fsum(of_stage[start:stop]) for of_stage, (start, stop) in zip(seconds, split, strict=True))


@given(TIMES, st.integers(1, 4), st.data())
def test_no_other_split_has_a_smaller_largest_stage(layers, stages, data):
    if stages > len(layers):
        with pytest.raises(ValueError, match="layers make no"):
            least_largest([layers] * stages)
        return
    speeds = data.draw(st.lists(st.floats(0.5, 4), min_size=stages, max_size=stages))
    seconds = [[layer * speed for layer in layers] for speed in speeds]
    found = least_largest(seconds)
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == len(layers)
    assert all(start < stop for start, stop in found)
    best = min(largest(split, seconds) for split in every_split(len(layers), stages))
    assert largest(found, seconds) == pytest.approx(best)


@given(TIMES, st.integers(1, 3), st.data())
def test_no_stage_holds_more_than_it_has_room_for(layers, stages, data):
    if stages > len(layers):
        return
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=len(layers), max_size=len(layers)))
    room = data.draw(st.lists(st.integers(0, 30), min_size=stages, max_size=stages))
    fitting = [
        split
        for split in every_split(len(layers), stages)
        if all(sum(sizes[start:stop]) <= most for (start, stop), most in zip(split, room, strict=True))
    ]
    found = least_largest([layers] * stages, sizes, room)
    assert (found in fitting) == bool(fitting)
    assert (found is None) == (not fitting)


def test_cores_go_to_all_stages_and_those_over_to_the_slowest():
    for cores, seconds, dealt in ((2, [1, 1], [1, 1]), (5, [1, 3], [2, 3]), (1, [1, 1, 1], [1, 1, 1])):
        assert cores_by_stage(cores, seconds) == dealt


# Stages at work


class Plain:
    """A stage that calls a function."""

    def __init__(self, name, function):
        self.name, self.function = name, function

    def at_work(self):
        return contextlib.nullcontext()

    def compute(self, value, lane):
        lane.enter("forward")
        return self.function(value)

    def settle(self):
        pass


@contextlib.contextmanager
def pipeline(*functions):
    found = Pipeline([Plain(f"stage {number}", function) for number, function in enumerate(functions)], Lane)
    try:
        yield found
    finally:
        found.close()


def stage_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("gpuinfer-stage")]


def test_batches_of_many_threads_go_through_all_stages_and_come_back_in_order():
    with pipeline(lambda x: x + 1, lambda x: x * 2, str) as found, ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda number: found.run(range(number, number + 10), 10), range(8)))
        assert found.counts()["micro_batches"] == 80
    assert answers == [[str((x + 1) * 2) for x in range(number, number + 10)] for number in range(8)]


def test_stages_work_at_once():
    """Two micro-batches, in two stages at the same time: neither goes on before the other is there."""
    meeting, seen = threading.Barrier(2), []

    def first(x):
        if x == 1:
            meeting.wait(30)
        return x

    def second(x):
        if x == 0:
            seen.append(meeting.wait(30))
        return x

    with pipeline(first, second) as found:
        assert found.run([0, 1], 2) == [0, 1]
    assert seen


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_stage_that_raises_fails_that_batch_alone(place):
    def raises_at_three(x):
        if x == 3:
            raise ValueError("three")
        return x

    functions = [lambda x: x] * 3
    functions[place] = raises_at_three
    with pipeline(*functions) as found:
        outcomes = found.run(range(8), 8)
        assert isinstance(outcomes[3], ValueError)
        assert all(outcome == x or outcome is outcomes[3] for x, outcome in enumerate(outcomes))
        assert found.run([7, 8], 2) == [7, 8]


def test_closing_ends_all_threads_and_fails_what_is_under_way(caplog):
    waits, let_go, errors = threading.Event(), threading.Event(), []

    def holds(x):
        waits.set()
        let_go.wait(60)
        return x

    def ask(found):
        try:
            errors.extend(found.run(range(10), 10))
        except BackendDied as error:
            errors.append(error)

    with pipeline(lambda x: x, holds) as found:
        asking = threading.Thread(target=ask, args=(found,))
        asking.start()
        waits.wait(30)
        with caplog.at_level(logging.WARNING, "gpuinfer"):
            found.close(within_s=0.05)
        asking.join(30)
        assert not asking.is_alive()
        assert errors
        assert all(isinstance(error, BackendDied) for error in errors)
        assert "the stage with stage 1 is still at its last micro-batch" in caplog.text
        let_go.set()
        with pytest.raises(BackendDied, match="closed"):
            found.run([1], 1)
    for thread in stage_threads():
        thread.join(30)
    assert not stage_threads()


def test_a_stage_that_cannot_begin_says_so():
    class Broken(Plain):
        def at_work(self):
            raise RuntimeError("no such core")

    with pytest.raises(RuntimeError, match="no such core"):
        Pipeline([Plain("one", abs), Broken("two", abs)], Lane)
    assert not stage_threads()
