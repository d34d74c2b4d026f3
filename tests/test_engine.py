"""The engine's promises, one by one, on a virtual clock: seconds pass, and no test sleeps."""

import asyncio
import contextlib
import functools
import logging
import math

import numpy as np
import pytest
import torch

from gpuinfer.api import Backend, Event, Limits, Reason, Strategy, enter_station
from gpuinfer.engine.engine import Engine
from gpuinfer.errors import (
    BackendDied,
    BackendError,
    BadResult,
    Closed,
    Expired,
    QueueFull,
    RequestError,
    StrategyError,
    UsageError,
)
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.testing import run_virtual


class Scripted(Backend):
    """Takes a second for each batch, and answers as `answer` says: by default with the payloads."""

    def __init__(self, limits=Limits(max_rows=4), answer=None):  # noqa: B008 (frozen)
        super().__init__()
        self.limits = limits
        self.batches = []
        self.cancelled = []
        self.closed = 0
        self._answer = answer or (lambda batch: [request.payload for request in batch])

    async def infer(self, batch):
        self.batches.append([request.payload for request in batch])
        await asyncio.sleep(1.0)
        return self._answer(batch)

    def cancel(self, request):
        self.cancelled.append(request.payload)

    async def close(self):
        self.closed += 1


ENGINES = []  # those that the running test has started


def virtual(test):
    """Run a coroutine test on a loop that jumps from timer to timer, and close its engines."""

    async def main(arguments):
        await test(**arguments)
        while ENGINES:
            await ENGINES.pop().close()

    @functools.wraps(test)
    def run(**arguments):
        ENGINES.clear()
        run_virtual(main(arguments))

    return run


async def started(backend=None, strategy=None, **options):
    engine = Engine(backend or Scripted(), strategy or Dynamic(), clock=asyncio.get_running_loop().time, **options)
    await engine.start()
    ENGINES.append(engine)
    return engine


def submit(engine, payload, **options):
    return asyncio.ensure_future(engine.submit(payload, **options))


async def outcomes(tasks):
    """What became of each: its answer, or the class of its error."""
    results = await asyncio.gather(*tasks, return_exceptions=True)
    return [type(result) if isinstance(result, BaseException) else result for result in results]


def now():
    return asyncio.get_running_loop().time()


# Queue and batches


@virtual
async def test_the_batch_grows_while_the_backend_is_busy():
    backend = Scripted()
    engine = await started(backend)
    first = submit(engine, "first")
    await asyncio.sleep(0.1)
    later = []
    for number in range(3):
        later.append(submit(engine, number))
        await asyncio.sleep(0.1)
    await outcomes([first, *later])
    assert backend.batches == [["first"], [0, 1, 2]]


@pytest.mark.parametrize(
    ("options", "error", "cure"),
    [
        pytest.param({"rows": 5}, RequestError, "a batch takes 1 to 4 rows", id="too wide"),
        pytest.param({"rows": 0}, RequestError, "a batch takes 1 to 4 rows", id="empty"),
        pytest.param({"rows": 2}, QueueFull, "3 of 4 rows wait, and 2 more do not fit", id="a full queue"),
        pytest.param({"timeout": 0.0}, Expired, "Give a positive one", id="no time"),
        pytest.param({"timeout": math.nan}, Expired, "Give a positive one", id="no number"),
        pytest.param({"group": []}, TypeError, "unhashable", id="a group that cannot be hashed"),
        pytest.param({"client": []}, TypeError, "unhashable", id="a client that cannot be hashed"),
    ],
)
@virtual
async def test_a_request_that_cannot_enter_the_queue_is_refused_at_once_and_leaves_nothing_behind(options, error, cure):
    engine = await started(max_queue_rows=4)
    waiting = submit(engine, "waiting", rows=3)
    await asyncio.sleep(0)
    with pytest.raises(error, match=cure):
        await engine.submit("refused", **options)
    assert await waiting == "waiting"
    assert engine.snapshot().errors["rejected"] == (error in (RequestError, QueueFull))


class CannotStart(Scripted):
    async def start(self, context):
        raise UsageError("no such device. Try --device cpu.")


@pytest.mark.parametrize(
    ("backend", "options", "cure"),
    [(Scripted, {"max_queue_rows": 3}, "at least 4"), (CannotStart, {}, "--device cpu")],
)
@virtual
async def test_a_backend_whose_engine_cannot_start_is_closed(backend, options, cure):
    backend = backend()
    with pytest.raises(UsageError, match=cure):
        await started(backend, **options)
    assert backend.closed == 1


@virtual
async def test_a_busy_group_does_not_starve_a_quiet_one():
    class Impatient(Dynamic):
        def cut_at(self, queue):
            return -math.inf

    backend = Scripted(Limits(max_rows=1))
    engine = await started(backend, Impatient())
    busy = [submit(engine, "busy", group="busy") for _ in range(3)]
    await asyncio.sleep(0.5)
    quiet = submit(engine, "quiet", group="quiet")
    await asyncio.sleep(0.1)
    busy += [submit(engine, "busy", group="busy") for _ in range(20)]
    await outcomes([quiet])
    assert len(backend.batches) == 4
    await outcomes(busy)


@virtual
async def test_a_remote_backend_is_not_kept_waiting():
    class Remote(Scripted):
        remote = True

    engine = await started(Remote(), Dynamic(max_wait=60.0))
    began = now()
    await engine.submit("now")
    assert now() - began == pytest.approx(1.0)


@virtual
async def test_a_strategy_that_waits_is_woken_when_its_time_has_come():
    backend = Scripted()
    engine = await started(backend, Dynamic(max_wait=2.0))
    began = now()
    first = submit(engine, "first")
    await asyncio.sleep(1.5)
    second = submit(engine, "second")
    await outcomes([first, second])
    assert (backend.batches, now() - began) == ([["first", "second"]], pytest.approx(3.0))
    assert engine.snapshot().reasons == {"waited": 1}


# Clients


@virtual
async def test_nobody_waits_when_every_live_client_waits_already():
    engine = await started(strategy=Dynamic(max_wait=60.0))
    began = now()
    for client in "ab":
        engine.join(client)
    await outcomes([submit(engine, client, client=client) for client in "ab"])
    assert now() - began == pytest.approx(1.0)
    assert engine.snapshot().reasons == {"clients": 1}


# Deadlines and cancellation


@virtual
async def test_a_deadline_expires_while_the_backend_is_busy_and_costs_nothing():
    backend = Scripted()
    engine = await started(backend)
    first = submit(engine, "first")
    await asyncio.sleep(0.1)
    began = now()
    with pytest.raises(Expired, match=r"after 0\.500 s in the queue"):
        await engine.submit("late", timeout=0.5)
    assert now() - began == pytest.approx(0.5)
    await first
    await engine.close()
    assert backend.batches == [["first"]]
    assert engine.snapshot().errors["expired"] == 1


@virtual
async def test_cancelling_a_request_being_served_tells_the_backend_and_drops_the_late_result():
    backend = Scripted()
    engine = await started(backend)
    tasks = [submit(engine, number) for number in range(2)]
    await asyncio.sleep(0.5)
    tasks[0].cancel()
    assert await outcomes(tasks) == [asyncio.CancelledError, 1]
    assert backend.cancelled == [0]


@virtual
async def test_a_backend_that_raises_in_cancel_harms_nobody(caplog):
    class Clumsy(Scripted):
        def cancel(self, request):
            raise LookupError("who?")

    engine = await started(Clumsy())
    tasks = [submit(engine, number) for number in range(3)]
    await asyncio.sleep(0.5)
    tasks[0].cancel()
    tasks[1].cancel()
    assert await outcomes(tasks) == [asyncio.CancelledError, asyncio.CancelledError, 2]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


# Results


@virtual
async def test_an_exception_in_the_place_of_a_result_fails_that_request_alone():
    engine = await started(Scripted(answer=lambda batch: [LookupError("no such row"), "fine"]))
    bad, good = submit(engine, "bad"), submit(engine, "good")
    with pytest.raises(BackendError, match="no such row"):
        await bad
    assert await good == "fine"


@pytest.mark.parametrize(
    ("result", "says"),
    [
        pytest.param(np.zeros((3, 5)), r"shape \[3, 5\] for a request of 2 rows", id="too many rows"),
        pytest.param(np.float32(1.0), r"shape \[\]", id="a scalar"),
        pytest.param((np.zeros((2, 5)), np.zeros(1)), r"result\[1\] has shape \[1\]", id="a part with too few rows"),
        pytest.param({"value": [np.zeros((1, 4))]}, r"result\['value'\]\[0\]", id="deep inside"),
        pytest.param(np.array([[1.0], [np.nan]]), "holds NaN", id="NaN"),
        pytest.param(np.array([[1.0], [np.inf]], np.float16), "float16", id="+inf"),
        pytest.param(torch.tensor([[math.nan], [1.0]]), "holds NaN", id="NaN in torch"),
        pytest.param(torch.tensor([[math.inf], [1.0]]), "holds NaN or .inf", id="+inf in torch"),
    ],
)
@virtual
async def test_a_bad_result_fails_its_request_alone(result, says):
    backend = Scripted(answer=lambda batch: [result, np.zeros((2, 3))])
    engine = await started(backend)
    bad, good = submit(engine, "bad", rows=2), submit(engine, "good", rows=2)
    with pytest.raises(BadResult, match=says):
        await bad
    assert (await good).shape == (2, 3)
    assert engine.snapshot().errors["failed"] == 1


@pytest.mark.parametrize(
    "result",
    [
        pytest.param(np.array([[-np.inf, 0.0], [1.0, 2.0]]), id="masked logits"),
        pytest.param(torch.tensor([[-math.inf], [1.0]], dtype=torch.bfloat16), id="masked logits in torch"),
        pytest.param(np.zeros((2, 0)), id="no columns"),
        pytest.param(np.array([[7], [2**40]]), id="integers"),
        pytest.param({"text": "two rows", "tokens": [1, 2, 3]}, id="no arrays at all"),
        pytest.param((np.zeros(2, np.uint8), np.array([True, False])), id="bytes and flags"),
    ],
)
@virtual
async def test_a_good_result_passes_as_it_is(result):
    engine = await started(Scripted(answer=lambda batch: [result]))
    assert await engine.submit("rows", rows=2) is result


# Failures


def fails_once(meets):
    """Answers every batch but the first, which meets this error or has these results."""
    first = [meets]

    def answer(batch):
        if not first:
            return [request.payload for request in batch]
        if isinstance(meets := first.pop(), BaseException):
            raise meets
        return meets

    return answer


@pytest.mark.parametrize(
    ("meets", "error", "message"),
    [
        pytest.param(ValueError("bad weights"), BackendError, "bad weights", id="any error"),
        pytest.param(BackendDied("gone"), BackendDied, "gone", id="a dead backend"),
        pytest.param(asyncio.CancelledError(), BackendError, "CancelledError", id="a cancellation of its own"),
        pytest.param(StopIteration(), BackendError, "StopIteration", id="an error that futures refuse"),
        pytest.param(["one"], BadResult, "1 results for 2 requests", id="too few results"),
        pytest.param(["one", "two", "three"], BadResult, "3 results for 2 requests", id="too many results"),
        pytest.param(None, BadResult, "a NoneType for 2 requests", id="no results at all"),
    ],
)
@virtual
async def test_a_backend_that_fails_fails_its_batch_alone(meets, error, message):
    engine = await started(Scripted(Limits(max_rows=2), fails_once(meets)))
    tasks = [submit(engine, number) for number in range(4)]
    assert await outcomes(tasks) == [error, error, 2, 3]
    assert message in str(tasks[0].exception())
    assert engine.snapshot().errors["failed"] == 2
    if isinstance(meets, ValueError):
        assert tasks[0].exception().__cause__ is meets


def test_an_interrupt_inside_the_backend_settles_its_batch_and_goes_on_to_the_top():
    settled = []

    async def main():
        engine = await started(Scripted(answer=fails_once(KeyboardInterrupt())))
        try:
            await engine.submit("x")
        except BaseException as error:
            settled.append(type(error))
            raise
        finally:
            ENGINES.clear()

    with pytest.raises(KeyboardInterrupt):
        run_virtual(main())
    assert len(settled) == 1


class Faulty(Dynamic):
    """Does what `fault` says with group "bad", and is dynamic otherwise."""

    fault = "raise"

    def cut_at(self, queue):
        if queue.waiting[0].group == "bad" and self.fault in ("raise", "nan", "word"):
            return {"nan": math.nan, "word": "soon"}[self.fault]
        return super().cut_at(queue)

    def select(self, queue):
        if queue.waiting[0].group != "bad":
            return super().select(queue)
        requests = list(queue.waiting)
        other = type(requests[0])("foreign")
        choices = {"nothing": [], "all": requests, "twice": requests[:1] * 2, "foreign": [other], "payload": [["x"]]}
        return choices[self.fault]


@pytest.mark.parametrize("fault", ["raise", "nan", "word", "nothing", "all", "twice", "foreign", "payload"])
@virtual
async def test_a_faulty_strategy_fails_only_what_it_was_shown(fault):
    strategy = Faulty()
    strategy.fault = fault
    backend = Scripted()
    engine = await started(backend, strategy)
    bad = [submit(engine, number, group="bad") for number in range(5)]
    good = [submit(engine, number, group="good") for number in range(5)]
    assert await outcomes(bad) == [StrategyError] * 5
    assert await outcomes(good) == list(range(5))
    assert await engine.submit("later", group="good") == "later"
    assert engine.snapshot().errors["failed"] == 5


@virtual
async def test_a_strategy_that_raises_in_observe_is_reported_once_and_harms_nobody(caplog):
    class Deaf(Dynamic):
        def observe(self, batch):
            raise ZeroDivisionError

    engine = await started(strategy=Deaf())
    assert await outcomes([submit(engine, number) for number in range(9)]) == list(range(9))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@virtual
async def test_the_strategy_learns_what_ran():
    class Noting(Dynamic):
        def observe(self, batch):
            records.append(batch)

    records = []
    engine = await started(strategy=Noting())
    tasks = [submit(engine, number, rows=2) for number in range(2)]
    await asyncio.sleep(0.25)
    tasks.append(submit(engine, "later"))
    await outcomes(tasks)
    assert [(r.rows, r.requests, r.seconds, r.reason) for r in records] == [
        (4, 2, pytest.approx(1.0), Reason.FULL),
        (1, 1, pytest.approx(1.0), Reason.FREE),
    ]
    assert [r.queue_wait_s for r in records] == [0.0, pytest.approx(0.75)]


# Streams


class Generating(Scripted):
    """A token a second for each row of the payload, then the answer; the shortest is done first."""

    async def infer(self, batch):
        raise NotImplementedError

    async def stream(self, batch):
        self.batches.append([request.payload for request in batch])
        began = 0
        for request in sorted(batch, key=lambda request: request.payload):
            await asyncio.sleep(request.payload - began)
            began = request.payload
            yield Event(request, "token", last=False)
            if request.payload == 13:
                return
            if request.payload == 7:
                yield Event(request, error=ValueError("unlucky"))
            else:
                yield Event(request, request.payload)


@virtual
async def test_a_stream_settles_each_request_as_it_comes():
    engine = await started(Generating())
    began = now()
    ended = {}

    async def ask(seconds):
        await engine.submit(seconds)
        ended[seconds] = now() - began

    await asyncio.gather(*(ask(seconds) for seconds in (5, 1, 3)))
    assert ended == {1: pytest.approx(1.0), 3: pytest.approx(3.0), 5: pytest.approx(5.0)}


@virtual
async def test_an_error_in_a_stream_fails_one_request_and_an_early_end_the_rest():
    engine = await started(Generating())
    tasks = [submit(engine, seconds) for seconds in (1, 7, 13, 14)]
    assert await outcomes(tasks) == [1, BackendError, BackendError, BackendError]
    assert "2 of 4 requests unanswered" in str(tasks[3].exception())


@virtual
async def test_a_finished_row_frees_its_slot_while_its_batch_runs_on():
    backend = Generating(Limits(max_rows=4, in_flight=4, slots=2))
    engine = await started(backend)
    began = now()
    tasks = [submit(engine, seconds) for seconds in (1, 4, 2)]
    await outcomes(tasks)
    assert backend.batches == [[1, 4], [2]]
    assert now() - began == pytest.approx(4.0)


# Closing


@pytest.mark.parametrize("drain", [True, False])
@virtual
async def test_closing_serves_what_waits_or_fails_it_and_survives_a_backend_that_cannot_close(drain, caplog):
    class Sticky(Scripted):
        async def close(self):
            raise OSError("busy")

    engine = await started(Sticky(), Dynamic(max_wait=3600.0))
    tasks = [submit(engine, number) for number in range(6)]
    await asyncio.sleep(0.5)
    began = now()
    await engine.close(drain)
    assert await outcomes(tasks) == [0, 1, 2, 3, *([4, 5] if drain else [Closed, Closed])]
    assert now() - began == pytest.approx(1.5 if drain else 0.5)
    assert "backend 'Sticky' (module test_engine): close raised OSError: busy" in caplog.text


@virtual
async def test_closing_waits_for_a_batch_only_so_long():
    class Stuck(Scripted):
        async def infer(self, batch):
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(1e5)
                    return [request.payload for request in batch]

    engine = await started(Stuck(), patience_s=5.0)
    tasks = [submit(engine, number, rows=4) for number in range(3)]
    await asyncio.sleep(0.5)
    began = now()
    await engine.close()
    assert await outcomes(tasks) == [Closed] * 3
    assert now() - began < 10.0


@virtual
async def test_close_settles_everything_even_when_it_is_cancelled_itself():
    backend = Scripted()
    engine = await started(backend)
    tasks = [submit(engine, number, rows=4) for number in range(3)]
    await asyncio.sleep(0.5)
    closing = asyncio.ensure_future(engine.close())
    await asyncio.sleep(0.1)
    closing.cancel()
    assert await outcomes([*tasks, closing]) == [Closed, Closed, Closed, asyncio.CancelledError]
    assert backend.closed == 1


@virtual
async def test_an_engine_takes_requests_only_between_start_and_close():
    engine = Engine(Scripted(), Dynamic())
    with pytest.raises(Closed, match="has not been started"):
        await engine.submit("early")
    await engine.start()
    await engine.close()
    await engine.close()
    with pytest.raises(Closed, match="is closed"):
        await engine.submit("late")


# Counters and the ledger


@virtual
async def test_the_ledger_shows_what_the_forward_lane_did():
    class Moving(Scripted):
        async def infer(self, batch):
            enter_station("transfer")
            await asyncio.sleep(0.25)
            enter_station("forward")
            return await super().infer(batch)

    engine = await started(Moving())
    await engine.submit("x")
    await asyncio.sleep(0.5)
    (lane,) = engine.snapshot().lanes
    assert lane["name"] == "forward 0"
    assert lane["stations"] == {
        "idle": pytest.approx(0.5),
        "transfer": pytest.approx(0.25),
        "forward": pytest.approx(1.0),
        "reply": pytest.approx(0.0),
    }


@virtual
async def test_the_strategy_sees_the_rate_at_which_rows_arrive():
    class Noting(Strategy):
        def cut_at(self, queue):
            rates.append(queue.arrival_rate)
            return queue.now

    rates = []
    engine = await started(Scripted(Limits(max_rows=100, in_flight=100)), Noting())
    tasks = []
    for number in range(400):
        tasks.append(submit(engine, number, rows=2))
        await asyncio.sleep(0.01)
    await outcomes(tasks)
    assert rates[-1] == pytest.approx(200.0, rel=0.05)
    await engine.close()
