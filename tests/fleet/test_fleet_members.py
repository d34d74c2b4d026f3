"""Replicas that die, hang, are suspended, never come up, come and go: real processes, and no router."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator

import psutil
import pytest
import standins

from gpuinfer.errors import UsageError
from gpuinfer.fleet.folder import FleetFolder
from gpuinfer.fleet.managed_replica import ManagedReplica
from gpuinfer.fleet.membership import Membership, NoRoom
from gpuinfer.fleet.router.protocol import Roster
from gpuinfer.fleet.worker import Worker
from gpuinfer.http.client import HttpClient


class Place:
    """Members, and all that they have said."""

    def __init__(self, **more) -> None:
        self.rosters: list[Roster] = []
        self.news: list[str] = []
        self.under_way: dict[int, int] = {}
        plan = standins.plan(**more)
        self.launcher = standins.launcher()
        self.folder = FleetFolder(None, plan.logs)
        self.members = Membership(
            plan,
            self.launcher,
            self.folder,
            self.rosters.append,
            lambda id: self.under_way.get(id, 0),
            self.news.append,
        )

    def states(self, id: int) -> list[str]:
        """Of one member, in the order in which the router heard of them."""
        found = [member.state for roster in self.rosters for member in roster.members if member.id == id]
        return [state for state, before in zip(found, ["", *found], strict=False) if state != before]


@contextlib.asynccontextmanager
async def place(**more) -> AsyncIterator[Place]:
    made = Place(**more)
    try:
        yield made
    finally:
        await made.members.end(0.0)
        made.folder.remove(keep_logs=False)


async def up(worker: Worker) -> Worker:
    await standins.until(lambda: worker.state == "up", f"worker {worker.id} up")
    return worker


async def started(there: Place) -> ManagedReplica:
    replica = there.members.start()
    await up(replica)
    return replica


async def again(replica: ManagedReplica, before: int) -> None:
    await standins.until(lambda: replica.state == "up" and replica.pid != before, "another process up")


async def test_a_replica_comes_up_and_is_in_the_roster_with_its_key():
    async with place() as there:
        replica = await started(there)
        member = there.rosters[-1].members[0]
        assert (member.id, member.state, member.port) == (0, "up", replica.port)
        assert member.ours
        assert member.key == there.folder.key
        assert member.since > 0
        assert [roster.version for roster in there.rosters] == list(range(1, len(there.rosters) + 1))


async def test_one_that_is_killed_is_started_again_at_another_address():
    async with place() as there:
        replica = await started(there)
        pid, port = replica.pid, replica.port
        os.kill(pid, signal.SIGKILL)
        await again(replica, pid)
        assert there.states(0) == ["starting", "up", "starting", "up"]
        assert replica.port != port
        assert any("died" in news for news in there.news)
        assert replica.told()["restarts"] == 1


async def test_news_of_failures_in_the_moment_of_a_death_do_not_hide_it():
    async with place() as there:
        replica = await started(there)

        async def nudge() -> None:
            while True:
                there.members.nudge(0)
                await asyncio.sleep(0)

        nudging = asyncio.create_task(nudge())
        for _ in range(3):
            pid = replica.pid
            os.kill(pid, signal.SIGKILL)
            await again(replica, pid)
        nudging.cancel()


async def test_one_that_is_suspended_is_killed_and_replaced():
    async with place() as there:
        replica = await started(there)
        pid = replica.pid
        os.kill(pid, signal.SIGSTOP)
        await again(replica, pid)
        assert not psutil.pid_exists(pid)
        assert any("no sign of life" in news for news in there.news)


async def test_one_whose_work_stands_still_is_killed_and_replaced_though_its_port_answers():
    async with place(standin={"stuck": True}) as there:
        replica = await started(there)
        pid = replica.pid
        client = HttpClient(replica.url, headers=[("Authorization", f"Bearer {there.folder.key}")])
        await client.request("POST", "/v1/completions", b'{"prompt": "a"}')
        await client.close()
        await again(replica, pid)
        assert any("did none of it" in news for news in there.news)


@pytest.mark.thorough
async def test_a_suspended_supervisor_accuses_nobody():
    async with place() as there:
        replica = await started(there)
        pid = replica.pid
        time.sleep(4.5)  # noqa: ASYNC251 (longer than a heartbeat may be late)
        for _ in range(3):
            await asyncio.sleep(0.5)
            assert replica.state == "up"
        assert replica.pid == pid


async def test_one_that_never_comes_up_is_an_error_with_its_last_words():
    async with place(standin={"dies": "CUDA out of memory, as ever"}) as there:
        error = await asyncio.wait_for(there.members.start().first, standins.LIMIT_S)
        assert "ended before it served" in str(error)
        assert "CUDA out of memory, as ever" in str(error)
        assert "replica-0.log" in str(error)


@pytest.mark.thorough
async def test_one_that_takes_too_long_to_come_up_is_given_up():
    async with place(standin={"mute": True}, start_s=2.0) as there:
        replica = there.members.start()
        error = await asyncio.wait_for(replica.first, standins.LIMIT_S)
        assert "within 2 s" in str(error)


async def test_one_that_leaves_gets_no_requests_and_finishes_what_it_has():
    async with place() as there:
        replica = await started(there)
        pid = replica.pid
        there.under_way[0] = 1
        there.members.remove(0, 30.0)
        assert there.rosters[-1].members[0].state == "draining"
        await asyncio.sleep(1.0)
        assert psutil.pid_exists(pid)
        there.under_way[0] = 0
        await standins.until(lambda: not there.members.all, "its leaving")
        assert not psutil.pid_exists(pid)
        assert there.rosters[-1].members == ()


async def test_each_replica_has_its_own_device_and_share_of_the_cores():
    async with place(replicas=2, devices=("4", "6"), devices_named=True) as there:
        found = {}
        for _ in range(2):
            replica = await started(there)
            environment = psutil.Process(replica.pid).environ()
            found[replica.id] = environment["CUDA_VISIBLE_DEVICES"]
            assert "OMP_NUM_THREADS" in environment
            assert not [name for name in environment if name.startswith("GPUINFER_")]
        assert sorted(found.values()) == ["4", "6"]
        with pytest.raises(NoRoom, match="no more may"):
            there.members.start()
        there.members.remove(0, 5.0)
        await standins.until(lambda: 0 not in there.members.all, "the leaving of the first")
        assert there.members.start().plan.devices == found[0]


async def test_what_is_in_the_folder_is_for_its_owner_alone():
    async with place() as there:
        await started(there)
        assert there.folder.path.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o077 for path in there.folder.path.iterdir()} == {0}


@pytest.mark.thorough
async def test_a_visitor_is_probed_and_never_killed():
    async with place() as there:
        replica = await started(there)
        visitor = there.members.visit("http://localhost:" + str(replica.port))
        await up(visitor)
        member = there.rosters[-1].members[-1]
        assert (member.ours, member.key) == (False, None)
        there.members.remove(replica.id, 5.0)
        await standins.until(lambda: visitor.state == "down", "the visitor's going down")
        assert visitor.id in there.members.all


@pytest.mark.parametrize("key", ["", "a b", "a\r\nX-Other: b", "ü", "k" * 2000])
async def test_a_key_that_would_not_stay_in_its_header_is_refused(key):
    async with place() as there:
        with pytest.raises(UsageError, match="key is refused"):
            there.members.visit("http://127.0.0.1:1", key)


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1:8000",
        "http://user@127.0.0.1:8000",
        "http://127.0.0.1:8000/v1",
        "http://127.0.0.1:8000?x=1",
        "http://127.0.0.1:8000?",
        "http://127.0.0.1:8000#x",
        "http://127.0.0.1:99999",
        "http://:8000",
        "http://a b:8000",
        "file:///etc/passwd",
        "127.0.0.1:8000",
        "",
    ],
)
async def test_a_url_that_is_more_than_a_host_and_a_port_is_refused(url):
    async with place() as there:
        with pytest.raises(UsageError, match="http://HOST:PORT"):
            there.members.visit(url)
