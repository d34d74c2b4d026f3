"""One session: when the backend starts, who counts as a client, and what its snapshot adds up; one in a thread."""

import asyncio
import os
import threading

import pytest
from helpers import AtOnce, Doubler, Unreachable
from remotes import Far

from gpuinfer.api import Backend, Event, Limits, Roofline, Setup
from gpuinfer.errors import BackendError, BadPrompt, QueueFull, UsageError
from gpuinfer.generation import Completion, Generation, Part, Prompt
from gpuinfer.runtime.background_session import BackgroundSession
from gpuinfer.runtime.session import Session
from gpuinfer.strategies.dynamic import Dynamic

pytestmark = pytest.mark.usefixtures("children_forked")


def session(backend=Doubler, **options):
    return Session(backend(**options), AtOnce())


def lines(path):
    return path.read_text().split() if path.exists() else []


@pytest.fixture
def noted(tmp_path):
    """Files in which a backend notes the processes in which it starts and is closed."""
    return {"ready_file": str(tmp_path / "ready"), "closed_file": str(tmp_path / "closed")}


async def heard_from(infer, each):
    async with infer.workers("helpers:ask", [{"each": one} for one in each]) as workers:
        return {str(message["pid"]) async for _, message in workers if message}


async def test_no_more_rows_wait_than_the_setup_allows_and_of_a_remote_backend_its_server_decides():
    async with Session(Doubler(Setup(max_queue_rows=64)), AtOnce()) as infer:
        asked = await asyncio.gather(*(infer(number) for number in range(200)), return_exceptions=True)
    refused = [answer for answer in asked if isinstance(answer, QueueFull)]
    assert len(refused) == 136
    assert "raise max_queue_rows." in str(refused[0])
    async with Session(Far(Setup(max_queue_rows=1)), AtOnce()) as infer:
        assert await infer(21) == 42


async def test_the_backend_starts_once_with_the_first_requests_and_is_closed_once(tmp_path, noted):
    async with session(**noted) as infer:
        assert lines(tmp_path / "ready") == []
        asked = [asyncio.create_task(infer(number)) for number in range(6)]
        await asyncio.sleep(0)
        asked[0].cancel()  # which does not stop the start for the others
        assert await asyncio.gather(*asked[1:]) == [2, 4, 6, 8, 10]
        assert asked[0].cancelled()
        assert await infer.ready() == infer.limits
        assert infer.block(5) is None
    assert lines(tmp_path / "ready") == lines(tmp_path / "closed") == [str(os.getpid())]


async def test_a_backend_that_cannot_start_fails_every_request_and_is_closed_once(tmp_path, noted):
    async with session(Unreachable, **noted) as infer:
        for _ in range(2):
            with pytest.raises(UsageError, match="no such device"):
                await infer(1)
    assert len(lines(tmp_path / "closed")) == 1


async def test_the_snapshot_adds_up_this_process_and_every_worker_each_with_a_backend_of_its_own(tmp_path, noted):
    async with session(**noted) as infer:
        pids = await heard_from(infer, (3, 4))
        assert set(lines(tmp_path / "ready")) == pids, "none is started here"
        await infer(1)
        snapshot = infer.snapshot()
    assert set(lines(tmp_path / "closed")) == pids | {str(os.getpid())}
    assert snapshot.requests == snapshot.rows == sum(snapshot.latency["counts"].values()) == 8
    assert snapshot.batches == {1: 8}
    names = ["forward 0", "worker 0: forward 0", "worker 0: asker", "worker 1: forward 0", "worker 1: asker"]
    assert [lane["name"] for lane in snapshot.lanes] == names
    assert all("search" in lane["stations"] for lane in snapshot.lanes if lane["name"].endswith("asker"))
    assert snapshot.rss_peak_mb > 30


async def test_lanes_of_one_name_stay_apart_in_the_ledger():
    async with session() as infer:
        infer.lane("search").enter("search")
        infer.lane("search")
        infer.lane("search")
        assert [lane["name"] for lane in infer.snapshot().lanes] == ["search", "search 2", "search 3"]


@pytest.mark.thorough
async def test_a_mark_forgets_what_came_before_it_in_every_process():
    async with session() as infer:
        lane = infer.lane("mine")
        lane.enter("compile")
        await infer(1)
        async with infer.workers("helpers:count_after", [{}, {}]) as workers:
            heard = aiter(workers)
            assert [(await anext(heard))[1] for _ in range(2)] == [{"asked": 3}] * 2
            lane.enter("search")
            await infer.mark()
            assert infer.snapshot().requests == 0
            for worker in range(2):
                await workers.send(worker, {"go": "on"})
            assert [(await anext(heard))[1] for _ in range(2)] == [{"asked": 2}] * 2
            await infer(1)
            for worker in range(2):
                await workers.send(worker, {"go": "on"})
            assert [pair async for pair in heard if pair[1]] == []
        snapshot = infer.snapshot()
    assert snapshot.requests == sum(snapshot.latency["counts"].values()) == sum(snapshot.batches.values()) == 5
    (mine,) = [lane for lane in snapshot.lanes if lane["name"] == "mine"]
    assert set(mine["stations"]) == {"search"}


# A backend that is far


async def test_a_remote_run_counts_requests_where_they_are_asked_and_batches_where_they_form(tmp_path, noted):
    asked, roofline = tmp_path / "asked", Roofline(1000.0, 64, "1 forward × 1 thread")
    backend, strategy = Far(asked_file=str(asked), **noted), AtOnce()
    async with Session(backend, strategy, roofline=roofline) as infer:
        pids = await heard_from(infer, (3, 4))
        assert (backend.context.strategy, backend.context.roofline) == (strategy, roofline)
        assert len(infer.block(5)) == 5
        await infer(1)
        await infer.refresh()
        snapshot = infer.snapshot()
    first, *others = lines(tmp_path / "ready")
    assert (first, set(others)) == (str(os.getpid()), pids), "it starts here before its workers"
    assert snapshot.requests == snapshot.rows == sum(snapshot.latency["counts"].values()) == 8
    assert (snapshot.batches, snapshot.reasons) == ({7: 1}, {"clients": 1})
    assert sum(snapshot.queue_wait["counts"].values()) == 1
    assert snapshot.first_token["counts"] == snapshot.between_tokens["counts"] == {}  # as those who asked saw them
    assert (snapshot.errors.get("failed", 0), snapshot.errors["retried"]) == (0, 1)
    assert [lane["name"] for lane in snapshot.lanes] == ["worker 0: asker", "worker 1: asker", "forward 0"]
    assert snapshot.rss_peak_mb > 100_000
    assert snapshot.device == {"name": "far away"}
    assert set(lines(asked)) == {str(os.getpid())}  # the workers ask nothing


async def test_a_mark_forgets_what_the_far_side_did_before_it_and_one_that_is_silent_holds_nothing_up(monkeypatch):
    async with Session(Far(silent_after=3), AtOnce()) as infer:
        await infer.ready()
        await infer.mark()
        await infer.refresh()
        await infer.refresh()
        monkeypatch.setattr("gpuinfer.runtime.session_counters.FAR_S", 0.01)
        for _ in range(3):
            await infer.refresh()
        snapshot = infer.snapshot()
    assert snapshot.batches == {7: 2}
    assert [lane["stations"] for lane in snapshot.lanes if lane["name"] == "forward 0"] == [{"forward": 2.0}]


# In a thread


class Slow(Backend):
    """Says "a", and the rest once it is let go on."""

    serves = ("text",)
    limits = Limits(max_rows=1, slots=1)

    def __init__(self) -> None:
        super().__init__()
        self.goes_on, self.cancelled = threading.Event(), threading.Event()

    async def infer(self, batch):
        raise NotImplementedError

    async def stream(self, batch):
        for request in batch:
            if request.payload.text == "bad":
                yield Event(request, error=BadPrompt("no. Mend it."))
                continue
            yield Event(request, Part(sample=0, text="a", tokens=(1,)), last=False)
            await asyncio.to_thread(self.goes_on.wait, 60)
            yield Event(request, Part(sample=0, text="b", tokens=(2,), finish_reason="stop"), last=False)
            one = Completion(text="ab", tokens=(1, 2), finish_reason="stop")
            yield Event(request, Generation(completions=(one,), prompt_tokens=1))

    def cancel(self, request):
        self.cancelled.set()
        self.goes_on.set()


def test_in_a_thread_answers_are_read_as_they_grow_and_errors_and_the_end_come_from_the_reading():
    backend = Slow()
    with BackgroundSession(backend, Dynamic()) as session:
        assert session.ready().slots == 1
        answer = session.stream(Prompt(text="p"))
        assert next(answer).text == "a"
        backend.goes_on.set()
        assert [part.text for part in answer] == ["b"]
        assert next(answer, None) is None
        assert answer.result.completions[0].text == "ab"
        with pytest.raises(BadPrompt):
            list(session.stream(Prompt(text="bad")))
        backend.goes_on.clear()
        answer = session.stream(Prompt(text="p"))
        next(answer)
        answer.close()
        assert backend.cancelled.wait(60)


def test_in_a_thread_what_the_start_raises_is_raised_here():
    async def start(context):
        raise BackendError("no. Mend it.")

    backend = Slow()
    backend.start = start
    with BackgroundSession(backend, Dynamic()) as session, pytest.raises(BackendError):
        session.ready()
