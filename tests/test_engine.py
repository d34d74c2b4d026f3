"""The engine's promises, one by one, on a virtual clock: seconds pass, and no test sleeps."""

import asyncio
import contextlib
import functools
import math
from functools import partial

import numpy as np
import pytest
import torch

from gpuinfer.api import Backend, Event, Limits, Priority, Reason, enter_station
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
from gpuinfer.strategies.adaptive import Adaptive
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.strategies.priority import ByPriority
from gpuinfer.testing import run_virtual

HIGH, NORMAL, LOW = Priority


class Scripted(Backend):
    """Takes a second for each batch, and answers as `answer` says: by default with the payloads."""

    def __init__(self, limits=Limits(max_rows=4), answer=None):  # noqa: B008 (frozen)
        super().__init__()
        self.limits = limits
        self.batches, self.cancelled, self.closed = [], [], 0
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


@pytest.mark.parametrize(
    ("options", "error", "cure"),
    [
        ({"rows": 5}, RequestError, "a batch takes 1 to 4 rows"),
        ({"rows": 0}, RequestError, "a batch takes 1 to 4 rows"),
        ({"rows": 2}, QueueFull, "3 of 4 rows wait, and 2 more do not fit"),
        ({"timeout": 0.0}, Expired, "Give a positive one"),
        ({"timeout": math.nan}, Expired, "Give a positive one"),
        ({"group": []}, TypeError, "unhashable"),
        ({"client": []}, TypeError, "unhashable"),
        *(({"priority": one}, RequestError, r"Give one of Priority\.HIGH") for one in (3, -1, "high", None)),
    ],
)
@virtual
async def test_a_request_that_cannot_enter_the_queue_is_refused_at_once_and_leaves_nothing_behind(options, error, cure):
    engine = await started(max_queue_rows=4)
    waiting = submit(engine, "waiting", rows=3, priority=0)
    await asyncio.sleep(0)
    with pytest.raises(error, match=cure):
        await engine.submit("refused", **options)
    assert await waiting == "waiting"
    assert engine.snapshot().errors["rejected"] == (error in (RequestError, QueueFull) and "priority" not in options)
    assert engine.snapshot().classes["high"]["requests"] == 1


class CannotStart(Scripted):
    async def start(self, context):
        raise UsageError("no such device. Try --device cpu.")


@pytest.mark.parametrize(
    ("backend", "options", "cure"), [(Scripted, {"max_queue_rows": 3}, "at least 4"), (CannotStart, {}, "--device cpu")]
)
@virtual
async def test_a_backend_whose_engine_cannot_start_is_closed(backend, options, cure):
    backend = backend()
    with pytest.raises(UsageError, match=cure):
        await started(backend, **options)
    assert backend.closed == 1


class Remote(Scripted):
    remote = True


@pytest.mark.parametrize(
    ("backend", "clients", "wait_s", "later_s", "took_s", "reasons"),
    [
        pytest.param(Scripted, "", 0.0, 0.1, 2.0, {"free": 2}, id="a batch grows while another is served"),
        pytest.param(Scripted, "", 2.0, 0.1, 3.0, {"waited": 1}, id="a strategy is woken when its time has come"),
        pytest.param(Scripted, "abcde", 60.0, 0.0, 1.0, {"clients": 1}, id="all live clients wait already"),
        pytest.param(Remote, "", 60.0, 0.0, 2.0, {"free": 2}, id="a remote backend is not kept waiting"),
    ],
)
@virtual
async def test_requests_wait_for_company_as_long_as_is_said(backend, clients, wait_s, later_s, took_s, reasons):
    backend, began = backend(Limits(max_rows=8)), now()
    engine = await started(backend, Dynamic(max_wait=wait_s))
    for client in clients:
        engine.join(client)
    tasks = []
    for number in range(5):
        tasks.append(submit(engine, number, client=clients[number] if clients else None))
        await asyncio.sleep(later_s)
    await outcomes(tasks)
    assert [payload for batch in backend.batches for payload in batch] == list(range(5))
    assert engine.snapshot().reasons == reasons
    assert now() - began == pytest.approx(took_s)


# Cancellation


@pytest.mark.parametrize("clumsy", [False, True])
@virtual
async def test_cancelling_a_request_being_served_tells_the_backend_which_may_raise(clumsy, caplog):
    def cancel(request):
        backend.cancelled.append(request.payload)
        if clumsy:
            raise LookupError("who?")

    backend = Scripted()
    backend.cancel = cancel
    engine = await started(backend)
    tasks = [submit(engine, number) for number in range(3)]
    await asyncio.sleep(0.5)
    tasks[0].cancel()
    tasks[1].cancel()
    assert await outcomes(tasks) == [asyncio.CancelledError, asyncio.CancelledError, 2]
    assert backend.cancelled == [0, 1]
    assert caplog.text.count("cancel raised LookupError") == clumsy


# Results

ZEROS = np.zeros((2, 3))


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (np.zeros((3, 5)), r"shape \[3, 5\] for a request of 2 rows"),
        (np.float32(1.0), r"shape \[\]"),
        ((np.zeros((2, 5)), np.zeros(1)), r"result\[1\] has shape \[1\]"),
        ({"value": [np.zeros((1, 4))]}, r"result\['value'\]\[0\]"),
        (np.array([[1.0], [np.nan]]), "holds NaN"),
        (np.array([[1.0], [np.inf]], np.float16), "float16"),
        (torch.tensor([[math.nan], [1.0]]), "holds NaN"),
        (torch.tensor([[math.inf], [1.0]]), "holds NaN or .inf"),
        (LookupError("no such row"), "no such row"),
        (np.array([[-np.inf, 0.0], [1.0, 2.0]]), None),
        (torch.tensor([[-math.inf], [1.0]], dtype=torch.bfloat16), None),
        (np.zeros((2, 0)), None),
        (np.array([[7], [2**40]]), None),
        ({"text": "two rows", "tokens": [1, 2, 3]}, None),
        ((np.zeros(2, np.uint8), np.array([True, False])), None),
    ],
)
@virtual
async def test_a_good_result_passes_as_it_is_and_a_bad_one_fails_its_request_alone(result, says):
    engine = await started(Scripted(answer=lambda batch: [result, ZEROS]))
    first, other = submit(engine, "first", rows=2), submit(engine, "other", rows=2)
    if says is None:
        assert await first is result
    else:
        with pytest.raises(BackendError if isinstance(result, LookupError) else BadResult, match=says):
            await first
    assert await other is ZEROS
    assert engine.snapshot().errors["failed"] == (says is not None)


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
        (ValueError("bad weights"), BackendError, "bad weights"),
        (BackendDied("gone"), BackendDied, "gone"),
        (asyncio.CancelledError(), BackendError, "CancelledError"),
        (StopIteration(), BackendError, "StopIteration"),
        (["one"], BadResult, "1 results for 2 requests"),
        (["one", "two", "three"], BadResult, "3 results for 2 requests"),
        (None, BadResult, "a NoneType for 2 requests"),
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

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

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
        return choices.get(self.fault, requests[:1])

    def account(self, batch, now):
        if self.fault == "account" and batch[0].group == "bad":
            raise ZeroDivisionError

    def observe(self, batch):
        if self.fault == "observe":
            raise ZeroDivisionError

    def shed(self, queue, arriving):
        return 1 / (self.fault != "shed") and super().shed(queue, arriving)

    def retry_after(self, queue, request):
        return 1 / (self.fault != "retry_after") and super().retry_after(queue, request)

    @property
    def notices(self):
        return 1 / (self.fault != "notices") and ()

    @notices.setter
    def notices(self, value):
        pass


SHOWN = ["raise", "nan", "word", "nothing", "all", "twice", "foreign", "payload", "account"]


@pytest.mark.parametrize("fault", [*SHOWN, "observe", "shed", "retry_after", "notices"])
@virtual
async def test_a_faulty_strategy_fails_only_what_it_was_shown(fault, caplog):
    engine = await started(Scripted(), Faulty(fault), max_queue_rows=10)
    bad = [submit(engine, number, group="bad") for number in range(5)]
    good = [submit(engine, number, group="good") for number in range(5)]
    crowded = submit(engine, "one too many", group="good")
    assert await outcomes(bad) == ([StrategyError] * 5 if fault in SHOWN else list(range(5)))
    assert await outcomes(good) == list(range(5))
    assert await outcomes([crowded]) == [StrategyError if fault in ("shed", "retry_after") else QueueFull]
    assert await engine.submit("later", group="good") == "later"
    snapshot = engine.snapshot()
    assert snapshot.errors["failed"] == 5 * (fault in SHOWN)
    assert (snapshot.waiting, snapshot.requests + sum(snapshot.errors.values())) == (0, 12)
    assert caplog.text.count("observe raised ZeroDivisionError") == (fault == "observe"), "once"


@virtual
async def test_the_strategy_learns_what_ran_and_at_which_rate_rows_arrive():
    class Noting(Dynamic):
        def observe(self, batch):
            records.append(batch)

        def cut_at(self, queue):
            rates.append(queue.arrival_rate)
            return super().cut_at(queue)

    records, rates = [], []
    engine = await started(strategy=Noting())
    tasks = [submit(engine, number, rows=2) for number in range(2)]
    await asyncio.sleep(0.25)
    await outcomes([*tasks, submit(engine, "later")])
    assert [(r.rows, r.requests, r.seconds, r.queue_wait_s, r.reason) for r in records] == [
        (4, 2, pytest.approx(1.0), 0.0, Reason.FULL),
        (1, 1, pytest.approx(1.0), pytest.approx(0.75), Reason.FREE),
    ]
    engine = await started(Scripted(Limits(max_rows=100, in_flight=100)), Noting())
    for number in range(400):
        tasks.append(submit(engine, number, rows=2))
        await asyncio.sleep(0.01)
    await outcomes(tasks)
    assert rates[-1] == pytest.approx(200.0, rel=0.05)


# Streams


class Generating(Scripted):
    """A token a second for each row of the payload, then the answer; the shortest is done first."""

    rows = most = 0

    async def infer(self, batch):
        raise NotImplementedError

    async def stream(self, batch):
        self.batches.append([request.payload for request in batch])
        self.rows += sum(request.rows for request in batch)
        self.most = max(self.most, self.rows)
        began = 0
        for request in sorted(batch, key=lambda request: request.payload):
            await asyncio.sleep(request.payload - began)
            began = request.payload
            yield Event(request, "token", last=False)
            if request.payload == 13:
                return
            self.rows -= request.rows
            if request.payload == 7:
                yield Event(request, error=ValueError("unlucky"))
            else:
                yield Event(request, request.payload)


@virtual
async def test_a_stream_settles_each_request_as_it_comes_and_an_early_end_fails_the_rest():
    engine, ended = await started(Generating()), {}
    began = now()
    tasks = [submit(engine, seconds) for seconds in (1, 7, 13, 14)]
    for task in tasks:
        task.add_done_callback(lambda task: ended.update({tasks.index(task): now() - began}))
    assert await outcomes(tasks) == [1, BackendError, BackendError, BackendError]
    assert "2 of 4 requests unanswered" in str(tasks[3].exception())
    await asyncio.sleep(0)
    assert ended == {number: pytest.approx(seconds) for number, seconds in enumerate((1.0, 7.0, 13.0, 13.0))}


@pytest.mark.parametrize(
    "build", [Dynamic, Adaptive, partial(Adaptive, latency_target=0.1), ByPriority, partial(ByPriority, mode="strict")]
)
@virtual
async def test_slots_that_come_free_are_filled_though_their_batch_runs_on_and_no_more_than_there_are(build):
    backend = Generating(Limits(max_rows=4, in_flight=32, slots=8))
    engine = await started(backend, build())
    asks = [(1.0 + number % 3, 1 + number % 2, Priority(number % 3)) for number in range(60)]
    tasks = [submit(engine, seconds, rows=rows, priority=priority) for seconds, rows, priority in asks]
    assert await outcomes(tasks) == [seconds for seconds, *_ in asks]
    assert (backend.most, backend.rows) == (8, 0)
    assert engine.snapshot().notices == ()  # a target says nothing of how long a whole generation takes


@virtual
async def test_slots_that_become_fewer_and_more_are_what_is_filled_and_a_wide_request_goes_when_none_is_taken():
    class Resizing(Generating):
        async def start(self, context):
            self.context = context

    backend = Resizing(Limits(max_rows=8, in_flight=32, slots=8))
    engine = await started(backend)
    backend.context.resized(2)
    tasks = [submit(engine, 1.0, rows=rows) for rows in (1, 1, 1, 4, 1)]
    assert await outcomes(tasks) == [1.0] * 5
    assert (backend.most, engine.snapshot().slots) == (4, 2)
    backend.context.resized(8)
    tasks = [submit(engine, 1.0) for _ in range(20)]
    assert await outcomes(tasks) == [1.0] * 20
    assert (backend.most, engine.snapshot().slots) == (8, 8)


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
    await engine.close()
    with pytest.raises(Closed, match="is closed"):
        await engine.submit("late")
    with pytest.raises(Closed, match="has not been started"):
        await Engine(Scripted(), Dynamic()).submit("early")


@pytest.mark.parametrize("impatient", [False, True])
@virtual
async def test_closing_waits_for_a_batch_only_so_long_and_settles_all_when_it_is_cancelled_itself(impatient):
    class Stuck(Scripted):
        async def infer(self, batch):
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(1e5)
                    return [request.payload for request in batch]

    backend = Stuck()
    engine = await started(backend, patience_s=5.0)
    tasks = [submit(engine, number, rows=4) for number in range(3)]
    await asyncio.sleep(0.5)
    began, closing = now(), asyncio.ensure_future(engine.close())
    await asyncio.sleep(0.1)
    if impatient:
        closing.cancel()
    assert await outcomes([*tasks, closing]) == [Closed] * 3 + [asyncio.CancelledError if impatient else None]
    assert now() - began < (2.0 if impatient else 10.0)
    assert backend.closed == 1


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
    stations = {"idle": 0.5, "transfer": 0.25, "forward": 1.0, "reply": 0.0}
    assert (lane["name"], lane["stations"]) == ("forward 0", pytest.approx(stations))
