"""Loads as they go, on a virtual clock: when requests are sent, what is counted, how they end."""

import asyncio

import numpy as np
import pytest

from gpuinfer.api import ModelSpec, Priority, Progress, Setup
from gpuinfer.errors import BackendDied, BackendError, BadResult, Expired, QueueFull, UsageError
from gpuinfer.models.row_format import BITS
from gpuinfer.testing import FakeInfer, assert_ok, check_workload, run_virtual
from gpuinfer.workloads.load import Load, LoadTally, Payloads


class Slow(FakeInfer):
    """Answers after `seconds`, `lanes` requests at once; keeps the largest number that were under way."""

    has_model = False

    def __init__(self, seconds=0.0, answer=lambda request: None):
        super().__init__(answer)
        self._seconds, self.under_way, self.most = seconds, 0, 0

    async def __call__(self, payload, **said):
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            answer = await super().__call__(payload, **said)
            await asyncio.sleep(self._seconds)
            return answer
        finally:
            self.under_way -= 1


def driven(infer, stop_after=None, seed=0, **options):
    """All progress of one load, and the virtual seconds that it took."""

    async def followed():
        loop = asyncio.get_running_loop()
        began, seen = loop.time(), []
        if stop_after is not None:
            loop.call_later(stop_after, infer.stopping.set)
        async for progress in Load(Setup(seed=seed), model=None, **options).run(infer):
            seen.append(progress)
        return seen, loop.time() - began

    async def made():
        nonlocal infer
        infer = infer()
        return await followed()

    seen, seconds = run_virtual(made())
    return infer, seen, seconds


def test_requests_are_sent_when_they_are_due_however_slow_the_answers():
    infer, seen, _ = driven(lambda: Slow(seconds=5.0), rate=100, requests=200)
    due = [ask.at for ask in Load(rate=100, requests=200).asked()]
    began = 1000.0
    assert [request.arrived - began for request in infer.requests] == pytest.approx(due, abs=1e-6)
    assert infer.most > 150
    assert seen[-1].done == 200


def test_classes_rows_deadlines_and_senders_travel():
    infer, _, _ = driven(Slow, rate=100, requests=50, rows="3", classes="low=1", timeout=2, sources=1)
    request = infer.requests[0]
    assert (request.rows, request.priority, request.client) == (3, Priority.LOW, "source 0")
    assert request.deadline - request.arrived == pytest.approx(2)


def test_the_load_that_was_offered_is_told():
    _, seen, _ = driven(lambda: Slow(seconds=2.0), rate=200, rows="2", duration=10)
    assert seen[-1].facts["offered_rows_per_s"] == pytest.approx(200, rel=0.15)
    assert seen[0].setup
    assert not seen[1].setup


def test_clients_wait_for_their_answers():
    infer, seen, seconds = driven(lambda: Slow(seconds=0.1), clients=4, duration=1)
    assert infer.most == 4
    assert len(infer.requests) == pytest.approx(40, abs=4)
    assert len({request.client for request in infer.requests}) == 4
    assert infer.live == set()
    assert seen[-1].facts == {"clients": 4}
    assert seconds == pytest.approx(1.1, abs=0.11)


def raising(error):
    def answer(request):
        raise error

    return answer


@pytest.mark.parametrize("options", [{"rate": 100}, {"clients": 3}], ids=["open", "closed"])
@pytest.mark.parametrize("error", [QueueFull("full"), Expired("late")], ids=["full", "expired"])
def test_requests_that_are_turned_away_are_counted_and_the_load_goes_on(options, error):
    infer, seen, _ = driven(lambda: Slow(answer=raising(error)), **options, requests=30)
    assert len(infer.requests) == 30
    assert seen[-1].done == 30


@pytest.mark.parametrize("options", [{"rate": 100}, {"clients": 3}], ids=["open", "closed"])
def test_failed_batches_are_counted_as_long_as_some_are_answered(options):
    def every_second():
        infer = Slow()
        infer._answer = lambda request: None if len(infer.requests) % 2 else raising(BackendError("now and then"))(0)
        return infer

    _, seen, _ = driven(every_second, **options, requests=30)
    assert seen[-1].done == 30
    with pytest.raises(BadResult, match="always"):
        driven(lambda: Slow(answer=raising(BadResult("always"))), **options, requests=30)


@pytest.mark.parametrize("options", [{"rate": 0.001}, {"clients": 3}], ids=["open", "closed"])
@pytest.mark.parametrize("error", [BackendDied("gone"), ValueError("a bug")], ids=["died", "a bug"])
def test_what_is_not_for_one_request_alone_ends_the_load_at_once(options, error):
    with pytest.raises(type(error)):
        driven(lambda: Slow(answer=raising(error)), **options, duration=1e9)


@pytest.mark.parametrize("options", [{"rate": 100}, {"clients": 3}, {"clients": 3, "think": 100}])
def test_when_asked_to_stop_what_is_under_way_has_a_second(options):
    infer, seen, seconds = driven(lambda: Slow(seconds=0.5), stop_after=2.0, duration=1e9, **options)
    assert infer.under_way == 0
    assert seconds == pytest.approx(2.5, abs=0.61)
    assert seen[-1].done <= len(infer.requests)


def test_requests_larger_than_a_batch_are_refused_before_any_is_sent():
    with pytest.raises(UsageError, match="do not fit into a batch of 4096"):
        driven(Slow, rate=10, rows="1-5000")


def test_it_keeps_what_the_kit_promises():
    assert_ok(check_workload(lambda: Load(clients=4, requests=200, model=None), lambda request: None))


# What travels


@pytest.mark.parametrize(
    ("dtype", "width", "kind"), [("float32", 12, "float32"), ("uint8", 12, "uint8"), (BITS, 2, "uint8")]
)
def test_payloads_are_rows_of_the_model(dtype, width, kind):
    payloads = Payloads(ModelSpec("m:f", inputs=12, input_dtype=dtype), 50, seed=1)
    blocks = [payloads.take(rows) for rows in (1, 50, 7) * 400]
    assert {block.shape[1] for block in blocks} == {width}
    assert [len(block) for block in blocks] == [1, 50, 7] * 400
    assert {str(block.dtype) for block in blocks} == {kind}
    assert not np.array_equal(blocks[0], blocks[3])


# Honesty


def tally(late_s, latency_s, count=100):
    made = LoadTally()
    for _ in range(count):
        made.late.add(late_s)
        made.latency.add(latency_s)
    return made


def test_latency_counts_from_when_a_request_was_due():
    async def blocked():
        """Something holds the loop up for a second: all that was due meanwhile is late by up to that."""
        loop, infer, seen = asyncio.get_running_loop(), Slow(), []
        loop.call_later(0.5, loop.clock.advance, 1.0)
        async for progress in Load(model=None, rate=100, arrivals="constant", duration=3).run(infer):
            seen.append(progress)
        return seen

    last = run_virtual(blocked())[-1]
    assert isinstance(last, Progress)
    assert last.facts["late_s"] == pytest.approx(0.85, abs=0.1)  # a third of the requests, evenly late by 0 to 1 s
