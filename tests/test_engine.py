"""The engine's promises, one by one, on a virtual clock: seconds pass, and no test sleeps."""

import asyncio
import contextlib
import functools
import logging
import math
from collections import Counter

import numpy as np
import pytest

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


def virtual(test):
    """Run a coroutine test on a loop that jumps from timer to timer."""

    @functools.wraps(test)
    def run(**arguments):
        run_virtual(test(**arguments))

    return run


async def started(backend=None, strategy=None, **options):
    engine = Engine(backend or Scripted(), strategy or Dynamic(), clock=asyncio.get_running_loop().time, **options)
    await engine.start()
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
async def test_each_request_gets_its_own_answer():
    engine = await started()
    assert await outcomes([submit(engine, number) for number in range(10)]) == list(range(10))
    await engine.close()


@virtual
async def test_what_is_submitted_together_shares_batches():
    backend = Scripted()
    engine = await started(backend)
    await outcomes([submit(engine, number) for number in range(6)])
    assert backend.batches == [[0, 1, 2, 3], [4, 5]]
    await engine.close()


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
    await engine.close()


@virtual
async def test_no_more_batches_are_in_flight_than_the_backend_allows():
    backend = Scripted(Limits(max_rows=1, in_flight=2))
    engine = await started(backend)
    began = now()
    tasks = [submit(engine, number) for number in range(5)]
    await asyncio.sleep(0.5)
    assert len(backend.batches) == 2
    await outcomes(tasks)
    assert now() - began == pytest.approx(3.0)
    await engine.close()


@virtual
async def test_blocks_count_as_rows_and_are_never_split():
    backend = Scripted()
    engine = await started(backend)
    await outcomes([submit(engine, rows, rows=rows) for rows in (3, 2, 2, 4)])
    assert backend.batches == [[3], [2, 2], [4]]
    assert engine.snapshot().batches == {3: 1, 4: 2}
    await engine.close()


@pytest.mark.parametrize("rows", [pytest.param(5, id="too wide"), pytest.param(0, id="empty")])
@virtual
async def test_a_block_that_no_batch_can_hold_is_refused_at_once(rows):
    engine = await started()
    with pytest.raises(RequestError, match="a batch takes 1 to 4 rows"):
        await engine.submit("block", rows=rows)
    assert engine.snapshot().errors["rejected"] == 1
    await engine.close()


@virtual
async def test_a_full_queue_refuses_at_once_with_the_numbers():
    engine = await started(max_queue_rows=4)
    tasks = [submit(engine, number, rows=2) for number in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="4 of 4 rows wait, and 1 more do not fit"):
        await engine.submit("one more")
    assert await outcomes(tasks) == [0, 1]
    await engine.close()


@virtual
async def test_a_queue_too_small_for_one_batch_is_a_usage_error():
    backend = Scripted()
    with pytest.raises(UsageError, match="at least 4"):
        await started(backend, max_queue_rows=3)
    assert backend.closed == 1


@virtual
async def test_groups_never_share_a_batch_and_the_oldest_goes_first():
    backend = Scripted()
    engine = await started(backend)
    tasks = []
    for payload in ("a1", "b1", "a2", "b2", "c1"):
        tasks.append(submit(engine, payload, group=payload[0]))
        await asyncio.sleep(0.01)
    await outcomes(tasks)
    assert backend.batches == [["a1"], ["b1", "b2"], ["a2"], ["c1"]]
    await engine.close()


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
    await engine.close()


@virtual
async def test_a_remote_backend_is_not_kept_waiting():
    class Remote(Scripted):
        remote = True

    engine = await started(Remote(), Dynamic(max_wait=60.0))
    began = now()
    await engine.submit("now")
    assert now() - began == pytest.approx(1.0)
    await engine.close()


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
    await engine.close()


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
    await engine.close()


@virtual
async def test_a_client_that_leaves_is_waited_for_no_longer():
    engine = await started(strategy=Dynamic(max_wait=60.0))
    for client in "ab":
        engine.join(client)
    task = submit(engine, "a", client="a")
    await asyncio.sleep(1.0)
    assert not task.done()
    engine.leave("b")
    began = now()
    await task
    assert now() - began == pytest.approx(1.0)
    await engine.close()


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
async def test_the_earliest_of_several_deadlines_expires_first():
    engine = await started()
    first = submit(engine, "first")
    await asyncio.sleep(0.1)
    began = now()
    late, later = submit(engine, "late", timeout=0.7), submit(engine, "later", timeout=0.3)
    await asyncio.wait([late, later], return_when=asyncio.FIRST_COMPLETED)
    assert (now() - began, later.done(), late.done()) == (pytest.approx(0.3), True, False)
    assert await outcomes([first, late, later]) == ["first", Expired, Expired]
    await engine.close()


@virtual
async def test_a_request_being_served_no_longer_expires():
    engine = await started()
    assert await engine.submit("in time", timeout=0.5) == "in time"
    await engine.close()


@pytest.mark.parametrize("timeout", [0.0, -1.0, math.nan])
@virtual
async def test_a_timeout_that_is_over_is_refused(timeout):
    engine = await started()
    with pytest.raises(Expired):
        await engine.submit("never", timeout=timeout)
    await engine.close()


@virtual
async def test_a_cancelled_request_leaves_the_queue():
    backend = Scripted()
    engine = await started(backend)
    tasks = [submit(engine, number, rows=4) for number in range(3)]
    await asyncio.sleep(0.5)
    tasks[1].cancel()
    assert await outcomes(tasks) == [0, asyncio.CancelledError, 2]
    assert (backend.batches, backend.cancelled) == ([[0], [2]], [])
    assert engine.snapshot().errors["cancelled"] == 1
    await engine.close()


@virtual
async def test_the_strategy_is_asked_again_after_a_departure():
    class Stubborn(Dynamic):
        def cut_at(self, queue):
            return math.inf if queue.waiting[0].payload == "stuck" else queue.now

    engine = await started(strategy=Stubborn())
    stuck, behind = submit(engine, "stuck"), submit(engine, "behind")
    await asyncio.sleep(0.5)
    stuck.cancel()
    assert await asyncio.wait_for(behind, 10.0) == "behind"
    await engine.close()


@virtual
async def test_cancelling_a_request_being_served_tells_the_backend_and_drops_the_late_result():
    backend = Scripted()
    engine = await started(backend)
    tasks = [submit(engine, number) for number in range(2)]
    await asyncio.sleep(0.5)
    tasks[0].cancel()
    assert await outcomes(tasks) == [asyncio.CancelledError, 1]
    assert backend.cancelled == [0]
    await engine.close()


@virtual
async def test_a_request_cancelled_in_the_turn_of_its_cut_is_not_sent():
    backend = Scripted()
    engine = await started(backend)
    tasks = [submit(engine, number) for number in range(3)]
    asyncio.get_running_loop().call_soon(tasks[1].cancel)  # runs after the submits, before the dispatch
    assert await outcomes(tasks) == [0, asyncio.CancelledError, 2]
    assert backend.batches == [[0, 2]]
    assert engine.snapshot().errors["cancelled"] == 1
    await engine.close()


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
    await engine.close()


# Results


@virtual
async def test_an_exception_in_the_place_of_a_result_fails_that_request_alone():
    engine = await started(Scripted(answer=lambda batch: [LookupError("no such row"), "fine"]))
    bad, good = submit(engine, "bad"), submit(engine, "good")
    with pytest.raises(BackendError, match="no such row"):
        await bad
    assert await good == "fine"
    await engine.close()


@pytest.mark.parametrize(
    ("result", "says"),
    [
        pytest.param(np.zeros((3, 5)), r"shape \[3, 5\] for a request of 2 rows", id="too many rows"),
        pytest.param(np.float32(1.0), r"shape \[\]", id="a scalar"),
        pytest.param((np.zeros((2, 5)), np.zeros(1)), r"result\[1\] has shape \[1\]", id="a part with too few rows"),
        pytest.param({"value": [np.zeros((1, 4))]}, r"result\['value'\]\[0\]", id="deep inside"),
        pytest.param(np.array([[1.0], [np.nan]]), "holds NaN", id="NaN"),
        pytest.param(np.array([[1.0], [np.inf]], np.float16), "float16", id="+inf"),
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
    await engine.close()


@pytest.mark.parametrize(
    "result",
    [
        pytest.param(np.array([[-np.inf, 0.0], [1.0, 2.0]]), id="masked logits"),
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
    await engine.close()


def test_torch_results_are_checked_too():
    torch = pytest.importorskip("torch")

    async def ask(result):
        engine = await started(Scripted(answer=lambda batch: [result]))
        try:
            return await engine.submit("rows", rows=2)
        finally:
            await engine.close()

    masked = torch.tensor([[-math.inf], [1.0]], dtype=torch.bfloat16)
    assert run_virtual(ask(masked)) is masked
    for bad in (torch.tensor([[math.nan], [1.0]]), torch.tensor([[math.inf], [1.0]]), torch.zeros(3)):
        with pytest.raises(BadResult):
            run_virtual(ask(bad))


@pytest.mark.parametrize(
    ("results", "says"),
    [
        pytest.param(["one"], "1 results for 2 requests", id="too few"),
        pytest.param(["one", "two", "three"], "3 results for 2 requests", id="too many"),
        pytest.param(None, "a NoneType for 2 requests", id="none at all"),
    ],
)
@virtual
async def test_a_wrong_number_of_results_fails_the_batch(results, says):
    engine = await started(Scripted(answer=lambda batch: results))
    tasks = [submit(engine, number) for number in range(2)]
    assert await outcomes(tasks) == [BadResult, BadResult]
    assert says in str(tasks[0].exception())
    await engine.close()


# Failures


def fails_once(error):
    """Answers every batch but the first, which meets this error."""
    errors = [error]

    def answer(batch):
        if errors:
            raise errors.pop()
        return [request.payload for request in batch]

    return answer


@pytest.mark.parametrize(
    ("error", "told"),
    [
        pytest.param(ValueError("bad weights"), BackendError, id="any error"),
        pytest.param(BackendDied("gone"), BackendDied, id="a dead backend"),
        pytest.param(asyncio.CancelledError(), BackendError, id="a cancellation of its own"),
        pytest.param(StopIteration(), BackendError, id="an error that futures refuse"),
    ],
)
@virtual
async def test_a_backend_that_raises_fails_its_batch_alone(error, told):
    engine = await started(Scripted(Limits(max_rows=2), fails_once(error)))
    tasks = [submit(engine, number) for number in range(4)]
    assert await outcomes(tasks) == [told, told, 2, 3]
    assert engine.snapshot().errors["failed"] == 2
    await engine.close()


@virtual
async def test_the_cause_of_a_failure_is_kept():
    cause = ValueError("bad weights")
    engine = await started(Scripted(answer=fails_once(cause)))
    with pytest.raises(BackendError, match="bad weights") as caught:
        await engine.submit("x")
    assert caught.value.__cause__ is cause
    await engine.close()


def test_an_interrupt_inside_the_backend_settles_its_batch_and_goes_on_to_the_top():
    settled = []

    async def main():
        engine = await started(Scripted(answer=fails_once(KeyboardInterrupt())))
        try:
            await engine.submit("x")
        except BaseException as error:
            settled.append(type(error))
            raise

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
    await engine.close()


@virtual
async def test_a_strategy_that_raises_in_observe_is_reported_once_and_harms_nobody(caplog):
    class Deaf(Dynamic):
        def observe(self, batch):
            raise ZeroDivisionError

    engine = await started(strategy=Deaf())
    assert await outcomes([submit(engine, number) for number in range(9)]) == list(range(9))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    await engine.close()


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
    await engine.close()


@virtual
async def test_a_client_or_group_that_cannot_be_hashed_is_refused_and_leaves_nothing_behind():
    engine = await started()
    for odd in ({"group": []}, {"client": []}):
        with pytest.raises(TypeError):
            await engine.submit("odd", **odd)
    assert await engine.submit("fine") == "fine"
    await asyncio.wait_for(engine.close(), 10.0)
    assert engine.snapshot().waiting == 0


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
    await engine.close()


@virtual
async def test_an_error_in_a_stream_fails_one_request_and_an_early_end_the_rest():
    engine = await started(Generating())
    tasks = [submit(engine, seconds) for seconds in (1, 7, 13, 14)]
    assert await outcomes(tasks) == [1, BackendError, BackendError, BackendError]
    assert "2 of 4 requests unanswered" in str(tasks[3].exception())
    await engine.close()


@virtual
async def test_a_finished_row_frees_its_slot_while_its_batch_runs_on():
    backend = Generating(Limits(max_rows=4, in_flight=4, slots=2))
    engine = await started(backend)
    began = now()
    tasks = [submit(engine, seconds) for seconds in (1, 4, 2)]
    await outcomes(tasks)
    assert backend.batches == [[1, 4], [2]]
    assert now() - began == pytest.approx(4.0)
    await engine.close()


# Closing


@virtual
async def test_draining_serves_what_waits_whatever_the_strategy_would():
    backend = Scripted()
    engine = await started(backend, Dynamic(max_wait=3600.0))
    tasks = [submit(engine, number) for number in range(6)]
    await asyncio.sleep(0)
    began = now()
    await engine.close()
    assert await outcomes(tasks) == list(range(6))
    assert now() - began == pytest.approx(2.0)
    assert engine.snapshot().reasons["drain"] >= 1
    assert backend.closed == 1


@virtual
async def test_closing_without_draining_fails_what_waits_and_lets_a_batch_end():
    engine = await started()
    tasks = [submit(engine, number, rows=4) for number in range(3)]
    await asyncio.sleep(0.5)
    await engine.close(drain=False)
    assert await outcomes(tasks) == [0, Closed, Closed]


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
async def test_closing_survives_a_backend_that_cannot_close(caplog):
    class Sticky(Scripted):
        async def close(self):
            raise OSError("busy")

    engine = await started(Sticky())
    await engine.close()
    assert "backend 'Sticky' (module test_engine): close raised OSError: busy" in caplog.text


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


@virtual
async def test_an_engine_that_was_never_started_closes_and_leaves_its_backend_alone():
    backend = Scripted()
    engine = Engine(backend, Dynamic())
    await engine.close()
    assert (backend.closed, engine.snapshot().requests) == (0, 0)


@virtual
async def test_a_backend_that_cannot_start_is_closed_again():
    class Dead(Scripted):
        async def start(self, context):
            raise UsageError("no such device. Try --device cpu.")

    backend = Dead()
    with pytest.raises(UsageError):
        await started(backend)
    assert backend.closed == 1


# Counters and the ledger


@virtual
async def test_the_snapshot_counts_each_request_once():
    engine = await started(max_queue_rows=6)
    tasks = [submit(engine, number, rows=2) for number in range(3)]
    tasks.append(submit(engine, "full", rows=1))
    await asyncio.sleep(0.5)
    tasks.append(submit(engine, "late", timeout=0.1))
    tasks.append(submit(engine, "cancelled"))
    await asyncio.sleep(0)
    tasks[-1].cancel()
    kinds = Counter(map(str, await outcomes(tasks)))
    snapshot = engine.snapshot()
    assert sum(kinds.values()) == snapshot.requests + sum(snapshot.errors.values())
    assert snapshot.errors == {"failed": 0, "retried": 0, "rejected": 1, "expired": 1, "cancelled": 1}
    assert (snapshot.requests, snapshot.rows, snapshot.waiting) == (3, 6, 0)
    assert sum(snapshot.latency["counts"].values()) == 3
    await engine.close()


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
    await engine.close()


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
