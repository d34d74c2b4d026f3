"""Loads as they go, on a virtual clock: when requests are sent, what is counted, how they end."""

import asyncio

import numpy as np
import pytest

from gpuinfer.api import ModelSpec, Priority, Setup
from gpuinfer.errors import BackendDied, BackendError, BadResult, Expired, QueueFull, UsageError
from gpuinfer.models.row_format import BITS
from gpuinfer.testing import FakeInfer, assert_ok, check_workload, run_virtual
from gpuinfer.workloads.load import Load, Payloads

OPEN_AND_CLOSED = pytest.mark.parametrize("load", [{"rate": 100}, {"clients": 3}], ids=["open", "closed"])


class Slow(FakeInfer):
    """Answers after `seconds`; keeps the largest number of requests that were under way."""

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


def driven(seconds=0.0, answer=lambda request: None, stop_after=None, blocked=False, **options):
    """What was asked, all progress of the load, and the virtual seconds that it took."""

    async def followed():
        infer, loop = Slow(seconds, answer), asyncio.get_running_loop()
        began, seen = loop.time(), []
        if stop_after is not None:
            loop.call_later(stop_after, infer.stopping.set)
        if blocked:  # something holds the loop up for a second
            loop.call_later(0.5, loop.clock.advance, 1.0)
        async for progress in Load(Setup(), model=None, **options).run(infer):
            seen.append(progress)
        return infer, seen, loop.time() - began

    return run_virtual(followed())


def raising(error):
    def answer(request):
        raise error

    return answer


def test_an_open_load_sends_when_requests_are_due_however_slow_the_answers():
    infer, seen, _ = driven(5.0, rate=100, requests=200)
    due = [ask.at for ask in Load(rate=100, requests=200).asked()]
    assert [request.arrived - 1000.0 for request in infer.requests] == pytest.approx(due, abs=1e-6)
    assert infer.most > 150
    assert seen[-1].done == 200
    _, seen, _ = driven(2.0, rate=200, rows="2", duration=10)
    assert seen[-1].facts["offered_rows_per_s"] == pytest.approx(200, rel=0.15)
    assert (seen[0].setup, seen[1].setup) == (True, False)
    _, seen, _ = driven(rate=100, arrivals="constant", duration=3, blocked=True)
    assert seen[-1].facts["late_s"] == pytest.approx(0.85, abs=0.1)  # a third of the requests, evenly by 0 to 1 s


def test_classes_rows_deadlines_and_senders_travel():
    infer, _, _ = driven(rate=100, requests=50, rows="3", classes="low=1", timeout=2, sources=1)
    request = infer.requests[0]
    assert (request.rows, request.priority, request.client) == (3, Priority.LOW, "source 0")
    assert request.deadline - request.arrived == pytest.approx(2)


def test_clients_wait_for_their_answers():
    infer, seen, seconds = driven(0.1, clients=4, duration=1)
    assert (infer.most, infer.live, seen[-1].facts) == (4, set(), {"clients": 4})
    assert len(infer.requests) == pytest.approx(40, abs=4)
    assert len({request.client for request in infer.requests}) == 4
    assert seconds == pytest.approx(1.1, abs=0.11)


@OPEN_AND_CLOSED
def test_what_one_request_suffers_is_counted_and_the_load_goes_on(load):
    for error in (QueueFull("full"), Expired("late")):
        infer, seen, _ = driven(answer=raising(error), **load, requests=30)
        assert (len(infer.requests), seen[-1].done) == (30, 30)
    turns = iter([None, BackendError("now and then")] * 15)

    def every_second(request):
        if (error := next(turns)) is not None:
            raise error

    assert driven(answer=every_second, **load, requests=30)[1][-1].done == 30
    with pytest.raises(BadResult, match="always"):
        driven(answer=raising(BadResult("always")), **load, requests=30)


@pytest.mark.parametrize("load", [{"rate": 0.1}, {"clients": 3}], ids=["open", "closed"])
@pytest.mark.parametrize("error", [BackendDied("gone"), ValueError("a bug")], ids=["died", "a bug"])
def test_what_is_not_for_one_request_alone_ends_the_load_at_once(load, error):
    with pytest.raises(type(error)):
        driven(answer=raising(error), **load, duration=1e9)


@pytest.mark.parametrize("load", [{"rate": 100}, {"clients": 3}, {"clients": 3, "think": 100}], ids=str)
def test_when_asked_to_stop_what_is_under_way_has_a_second(load):
    infer, seen, seconds = driven(0.5, stop_after=2.0, duration=1e9, **load)
    assert infer.under_way == 0
    assert seconds == pytest.approx(2.5, abs=0.61)
    assert seen[-1].done <= len(infer.requests)


def test_requests_larger_than_a_batch_are_refused_and_the_kit_is_content():
    with pytest.raises(UsageError, match="do not fit into a batch of 4096"):
        driven(rate=10, rows="1-5000")
    assert_ok(check_workload(lambda: Load(clients=4, requests=200, model=None), lambda request: None))


@pytest.mark.parametrize(
    ("dtype", "width", "kind"), [("float32", 12, "float32"), ("uint8", 12, "uint8"), (BITS, 2, "uint8")]
)
def test_payloads_are_rows_of_the_model(dtype, width, kind):
    payloads, sizes = Payloads(ModelSpec("m:f", inputs=12, input_dtype=dtype), 50, seed=1), [1, 50, 7] * 400
    blocks = [payloads.take(rows) for rows in sizes]
    assert [block.shape for block in blocks] == [(rows, width) for rows in sizes]
    assert {str(block.dtype) for block in blocks} == {kind}
    assert not np.array_equal(blocks[0], blocks[3])
