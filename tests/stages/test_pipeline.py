"""Stages at work: order, failures, closing."""

import contextlib
import logging
import threading

import pytest

from gpuinfer.errors import BackendDied
from gpuinfer.models.pipeline.schedule import Pipeline
from gpuinfer.stats import Lane


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
def pipeline(*functions, lanes=None):
    def lane(name):
        made = Lane(name)
        if lanes is not None:
            lanes.append(made)
        return made

    found = Pipeline([Plain(f"stage {number}", function) for number, function in enumerate(functions)], lane)
    try:
        yield found
    finally:
        found.close()


def stage_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("gpuinfer-stage")]


def test_micro_batches_go_through_all_stages_and_come_back_in_order():
    with pipeline(lambda x: x + 1, lambda x: x * 2, str) as found:
        assert found.run(range(20), 20) == [str((x + 1) * 2) for x in range(20)]
        assert found.counts()["micro_batches"] == 20


def test_stages_work_at_once():
    """Two micro-batches, in two stages at the same time: neither goes on before the other is there."""
    meeting = threading.Barrier(2)
    seen = []

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


def test_batches_of_many_threads_are_answered_each_for_itself():
    with pipeline(lambda x: x + 1, lambda x: x * 3) as found:
        answers = {}

        def ask(number):
            answers[number] = found.run(range(number, number + 10), 10)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert answers == {number: [(x + 1) * 3 for x in range(number, number + 10)] for number in range(8)}


def raises_at_three(x):
    if x == 3:
        raise ValueError("three")
    return x


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_stage_that_raises_fails_that_batch_alone(place):
    functions = [lambda x: x] * 3
    functions[place] = raises_at_three
    with pipeline(*functions) as found:
        outcomes = found.run(range(8), 8)
        assert isinstance(outcomes[3], ValueError)
        assert all(outcome == x or outcome is outcomes[3] for x, outcome in enumerate(outcomes))
        assert found.run([7, 8], 2) == [7, 8]


def test_closing_ends_all_threads_and_fails_what_is_under_way(caplog):
    waits, let_go = threading.Event(), threading.Event()

    def holds(x):
        waits.set()
        let_go.wait(60)
        return x

    errors = []

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
        @contextlib.contextmanager
        def at_work(self):
            raise RuntimeError("no such core")
            yield

    with pytest.raises(RuntimeError, match="no such core"):
        Pipeline([Plain("one", abs), Broken("two", abs)], Lane)
    assert not stage_threads()
