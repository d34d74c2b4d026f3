"""One session: when the backend starts, who counts as a client, and what its snapshot adds up."""

import asyncio
import os

import pytest
from helpers import AtOnce, Doubler, Unreachable
from remotes import Far

from gpuinfer.api import Roofline, Setup
from gpuinfer.errors import QueueFull, UsageError
from gpuinfer.runtime.session import Session

pytestmark = pytest.mark.usefixtures("children_forked")


def session(backend=Doubler, **options):
    return Session(backend(**options), AtOnce())


def lines(path):
    return path.read_text().split() if path.exists() else []


async def test_no_more_rows_wait_than_the_setup_allows():
    setup = Setup(max_queue_rows=64)
    async with Session(Doubler(setup), AtOnce()) as infer:
        asked = await asyncio.gather(*(infer(number) for number in range(200)), return_exceptions=True)
    refused = [answer for answer in asked if isinstance(answer, QueueFull)]
    assert len(refused) == 136
    assert "raise max_queue_rows." in str(refused[0])


async def test_rows_that_wait_on_the_far_side_are_bounded_there():
    async with Session(Far(Setup(max_queue_rows=1)), AtOnce()) as infer:
        assert await infer(21) == 42


async def test_the_backend_starts_once_with_the_first_requests_and_is_closed_once(tmp_path):
    ready, closed = tmp_path / "ready", tmp_path / "closed"
    async with session(ready_file=str(ready), closed_file=str(closed)) as infer:
        assert lines(ready) == []
        assert await asyncio.gather(*(infer(number) for number in range(5))) == [0, 2, 4, 6, 8]
        assert await infer.ready() == infer.limits
    assert lines(ready) == lines(closed) == [str(os.getpid())]


async def test_a_workload_that_asks_only_through_workers_starts_no_backend_here(tmp_path):
    ready, closed = tmp_path / "ready", tmp_path / "closed"
    async with session(ready_file=str(ready), closed_file=str(closed)) as infer:
        async with infer.workers("helpers:ask", [{"each": 1}] * 2) as workers:
            pids = {str(message["pid"]) async for _, message in workers if message}
        assert infer.snapshot().lanes[0]["name"].startswith("worker 0: ")
    assert set(lines(ready)) == set(lines(closed)) == pids
    assert len(pids) == 2


async def test_one_who_gives_up_during_the_start_does_not_stop_it_for_the_others():
    async with session() as infer:
        hasty, patient = asyncio.create_task(infer(1)), asyncio.create_task(infer(2))
        await asyncio.sleep(0)
        hasty.cancel()
        assert await patient == 4
        assert hasty.cancelled()


async def test_a_backend_that_cannot_start_fails_every_request_and_is_closed_once(tmp_path):
    closed = tmp_path / "closed"
    async with session(Unreachable, closed_file=str(closed)) as infer:
        for _ in range(2):
            with pytest.raises(UsageError, match="no such device"):
                await infer(1)
    assert len(lines(closed)) == 1


async def test_lanes_of_one_name_stay_apart_in_the_ledger():
    async with session() as infer:
        infer.lane("search").enter("search")
        infer.lane("search")
        infer.lane("search")
        assert [lane["name"] for lane in infer.snapshot().lanes] == ["search", "search 2", "search 3"]


async def test_the_snapshot_adds_up_this_process_and_every_worker_after_their_end():
    async with session() as infer:
        await infer(1)
        async with infer.workers("helpers:ask", [{"each": 3}, {"each": 4}]) as workers:
            async for _ in workers:
                pass
        snapshot = infer.snapshot()
    assert snapshot.requests == snapshot.rows == 8
    assert snapshot.batches == {1: 8}
    assert sum(snapshot.latency["counts"].values()) == 8
    names = ["forward 0", "worker 0: forward 0", "worker 0: asker", "worker 1: forward 0", "worker 1: asker"]
    assert [lane["name"] for lane in snapshot.lanes] == names
    assert all("search" in lane["stations"] for lane in snapshot.lanes if lane["name"].endswith("asker"))
    assert snapshot.rss_peak_mb > 30


@pytest.mark.thorough
async def test_a_mark_forgets_what_came_before_it_in_every_process():
    async with session() as infer:
        lane = infer.lane("mine")
        lane.enter("compile")
        await infer(1)
        async with infer.workers("helpers:count_after", [{}, {}]) as workers:
            heard = aiter(workers)
            for _ in range(2):
                assert (await anext(heard))[1] == {"asked": 3}
            lane.enter("search")
            await infer.mark()
            assert infer.snapshot().requests == 0
            for worker in range(2):
                await workers.send(worker, {"go": "on"})
            for _ in range(2):
                assert (await anext(heard))[1] == {"asked": 2}
            await infer(1)
            for worker in range(2):
                await workers.send(worker, {"go": "on"})
            assert [pair async for pair in heard if pair[1]] == []
        snapshot = infer.snapshot()
    assert snapshot.requests == 5
    assert sum(snapshot.latency["counts"].values()) == sum(snapshot.batches.values()) == 5
    (mine,) = [lane for lane in snapshot.lanes if lane["name"] == "mine"]
    assert set(mine["stations"]) == {"search"}


async def test_a_remote_backend_starts_here_before_its_workers_and_is_told_strategy_and_roofline(tmp_path):
    ready, roofline = tmp_path / "ready", Roofline(1000.0, 64, "1 forward × 1 thread")
    backend, strategy = Far(ready_file=str(ready)), AtOnce()
    async with Session(backend, strategy, roofline=roofline) as infer:
        async with infer.workers("helpers:ask", [{"each": 1}] * 2) as workers:
            pids = {str(message["pid"]) async for _, message in workers if message}
        assert (backend.context.strategy, backend.context.roofline) == (strategy, roofline)
    first, *others = lines(ready)
    assert first == str(os.getpid())
    assert set(others) == pids


async def test_a_block_comes_from_the_backend():
    async with Session(Far(), AtOnce()) as infer:
        await infer.ready()
        assert len(infer.block(5)) == 5
    async with session() as infer:
        assert infer.block(5) is None


async def test_a_remote_run_counts_requests_where_they_are_asked_and_batches_where_they_form(tmp_path):
    asked = tmp_path / "asked"
    async with Session(Far(asked_file=str(asked)), AtOnce()) as infer:
        async with infer.workers("helpers:ask", [{"each": 3}, {"each": 4}]) as workers:
            async for _ in workers:
                pass
        await infer(1)
        await infer.refresh()
        snapshot = infer.snapshot()
    assert snapshot.requests == snapshot.rows == sum(snapshot.latency["counts"].values()) == 8
    assert (snapshot.batches, snapshot.reasons) == ({7: 1}, {"clients": 1})
    assert sum(snapshot.queue_wait["counts"].values()) == 1
    assert snapshot.first_token["counts"] == snapshot.between_tokens["counts"] == {}  # as those who asked saw them
    assert snapshot.errors.get("failed", 0) == 0
    assert snapshot.errors["retried"] == 1
    assert [lane["name"] for lane in snapshot.lanes] == ["worker 0: asker", "worker 1: asker", "forward 0"]
    assert snapshot.rss_peak_mb > 100_000
    assert snapshot.device == {"name": "far away"}
    assert set(lines(asked)) == {str(os.getpid())}  # the workers ask nothing


async def test_a_mark_forgets_what_the_far_side_did_before_it():
    async with Session(Far(), AtOnce()) as infer:
        async with infer.workers("helpers:ask", [{"each": 1}]) as workers:
            await infer.mark()
            await infer.refresh()
            await infer.refresh()
            async for _ in workers:
                pass
        snapshot = infer.snapshot()
    assert snapshot.batches == {7: 2}
    assert [lane["stations"] for lane in snapshot.lanes if lane["name"] == "forward 0"] == [{"forward": 2.0}]


async def test_a_far_side_that_says_nothing_holds_nobody_up_and_what_was_known_stays(monkeypatch):
    monkeypatch.setattr("gpuinfer.runtime.session_counters.FAR_S", 0.01)
    async with Session(Far(silent_after=2), AtOnce()) as infer:
        await infer.ready()
        for _ in range(4):
            await infer.refresh()
        assert infer.snapshot().batches == {7: 2}
