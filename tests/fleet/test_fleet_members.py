"""Replicas that die, hang, never come up, come and go, as real processes; and what a supervisor decides."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator

import fleet_programs
import psutil
import pytest
from fleet_programs import LIMIT_S, until
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.errors import UsageError
from gpuinfer.fleet.folder import FleetFolder
from gpuinfer.fleet.managed_replica import MOST_S, MOST_UP_S, WELL_S, Backoff, ManagedReplica
from gpuinfer.fleet.membership import Membership, NoRoom
from gpuinfer.fleet.plan import LOOK_S, UP_LOOKS, HealthChecks, Scaler, Scaling
from gpuinfer.fleet.router.protocol import Roster
from gpuinfer.fleet.worker import ProbeHeartbeat
from gpuinfer.http.client import HttpClient


class Place:
    """Members, and all that they have said."""

    def __init__(self, **more) -> None:
        self.rosters: list[Roster] = []
        self.news: list[str] = []
        self.under_way: dict[int, int] = {}
        plan = fleet_programs.plan(**more)
        self.launcher = fleet_programs.launcher()
        self.folder = FleetFolder(None, plan.logs)
        load = lambda id: self.under_way.get(id, 0)  # noqa: E731
        told = (self.rosters.append, load, self.news.append)
        self.members = Membership(plan, self.launcher, self.folder, *told)

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


async def started(there: Place) -> ManagedReplica:
    replica = there.members.start()
    await until(lambda: replica.state == "up", "a replica up")
    return replica


async def again(replica: ManagedReplica, before: int) -> None:
    await until(lambda: replica.state == "up" and replica.pid != before, "another process up")


async def test_a_replica_comes_up_with_its_key_and_one_that_is_killed_is_started_again_at_another_address():
    async with place() as there:
        replica = await started(there)
        member = there.rosters[-1].members[0]
        told = (member.id, member.state, member.port, member.ours, member.key)
        assert told == (0, "up", replica.port, True, there.folder.key)
        assert member.since > 0
        assert there.folder.path.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o077 for path in there.folder.path.iterdir()} == {0}
        pid, port = replica.pid, replica.port
        os.kill(pid, signal.SIGKILL)
        await again(replica, pid)
        assert there.states(0) == ["starting", "up", "starting", "up"]
        assert [roster.version for roster in there.rosters] == list(range(1, len(there.rosters) + 1))
        assert replica.port != port
        assert any("died" in news for news in there.news)
        assert replica.told()["restarts"] == 1

        async def nudge() -> None:
            while True:
                there.members.nudge(0)
                await asyncio.sleep(0)

        nudging = asyncio.create_task(nudge())  # news of failures in the moment of a death do not hide it
        pid = replica.pid
        os.kill(pid, signal.SIGKILL)
        await again(replica, pid)
        nudging.cancel()


@pytest.mark.thorough
@pytest.mark.parametrize(("standin", "why"), [({}, "no sign of life"), ({"stuck": True}, "did none of it")])
async def test_one_that_is_suspended_or_whose_work_stands_still_is_killed_and_replaced(standin, why):
    """The second one's port answers."""
    async with place(standin=standin) as there:
        replica = await started(there)
        pid = replica.pid
        if standin:
            client = HttpClient(replica.url, headers=[("Authorization", f"Bearer {there.folder.key}")])
            await client.request("POST", "/v1/completions", b'{"prompt": "a"}')
            await client.close()
        else:
            os.kill(pid, signal.SIGSTOP)
        await again(replica, pid)
        assert not psutil.pid_exists(pid)
        assert any(why in news for news in there.news)


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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"standin": {"dies": "no memory, as ever"}},
            ["ended before it served", "no memory, as ever", "replica-0.log"],
        ),
        ({"standin": {"mute": True}, "start_s": 2.0}, ["within 2 s"]),
    ],
)
async def test_one_that_never_comes_up_is_an_error_with_its_last_words(given, words):
    async with place(**given) as there:
        error = await asyncio.wait_for(there.members.start().first, LIMIT_S)
        for word in words:
            assert word in str(error)


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
        await until(lambda: not there.members.all, "its leaving")
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
        await until(lambda: 0 not in there.members.all, "the leaving of the first")
        assert there.members.start().plan.devices == found[0]


@pytest.mark.thorough
async def test_a_visitor_is_probed_and_never_killed():
    async with place() as there:
        replica = await started(there)
        visitor = there.members.visit("http://localhost:" + str(replica.port))
        await until(lambda: visitor.state == "up", "the visitor up")
        member = there.rosters[-1].members[-1]
        assert (member.ours, member.key) == (False, None)
        there.members.remove(replica.id, 5.0)
        await until(lambda: visitor.state == "down", "the visitor's going down")
        assert visitor.id in there.members.all


async def test_a_url_that_is_more_than_a_host_and_a_port_and_a_key_that_would_leave_its_header_are_refused():
    async with place() as there:
        for key in ("", "a b", "a\r\nX-Other: b", "ü", "k" * 2000):
            with pytest.raises(UsageError, match="key is refused"):
                there.members.visit("http://127.0.0.1:1", key)
        for url in (
            "https://127.0.0.1:8000", "http://user@127.0.0.1:8000", "http://127.0.0.1:8000/v1",
            "http://127.0.0.1:8000?x=1", "http://127.0.0.1:8000?", "http://127.0.0.1:8000#x", "http://127.0.0.1:99999",
            "http://:8000", "http://a b:8000", "file:///etc/passwd", "127.0.0.1:8000", "",
        ):  # fmt: skip
            with pytest.raises(UsageError, match="http://HOST:PORT"):
                there.members.visit(url)


@pytest.mark.parametrize(
    ("steps", "states"),
    [
        pytest.param(
            "." + "." * HealthChecks().late_checks,
            ["well"] * HealthChecks().late_checks + ["late"],
            id="late after 3 s without an answer",
        ),
        pytest.param("...a" * 5 + ".", ["well"] * 16, id="an answer between two checks is enough"),
        pytest.param("s.s.", ["well", "stuck"], id="stuck is believed when it is said twice"),
        pytest.param("sasasa.", ["well"], id="one that was stuck and goes on is well"),
    ],
)
def test_a_heartbeat(steps, states):
    """Steps: a check (.), an answer (a), an answer that says stuck (s)."""
    heartbeat, found = ProbeHeartbeat(), []
    for step in steps:
        if step == ".":
            found.append(heartbeat.look())
        else:
            heartbeat.answer(stuck=step == "s")
    assert found == states


def test_backoff_grows_to_seconds_and_is_forgotten_after_a_good_life():
    backoff = Backoff()
    assert [backoff.after(1.0) for _ in range(6)] == [0.0, 0.5, 1.0, 2.0, MOST_UP_S, MOST_UP_S]
    assert [backoff.after(WELL_S), backoff.after(1.0)] == [0.0, 0.0]
    backoff = Backoff()
    waits = [backoff.after(0.0) for _ in range(100)]  # one that never comes up
    assert waits == sorted(waits)
    assert (waits[0] > 0, waits[-1]) == (True, MOST_S)


scalings = st.builds(
    lambda least, more, target, delay: Scaling(least, least + more, target, delay),
    st.integers(1, 8),
    st.integers(0, 8),
    st.floats(0.5, 64),
    st.floats(0, 30),
)
loads = st.lists(st.integers(0, 600), max_size=80)


def follow(scaling: Scaling, replicas: int, series: list[int]) -> list[tuple[float, int]]:
    """Time and replicas after each look at a load."""
    scaler, found = Scaler(scaling), []
    for look, load in enumerate(series):
        if (decision := scaler.look(look * LOOK_S, load, replicas)) is not None:
            assert decision.before == replicas
            assert decision.reason
            replicas = decision.after
        found.append((look * LOOK_S, replicas))
    return found


@given(scalings, loads, st.integers(1, 16))
def test_scaling_keeps_within_its_limits_and_goes_down_by_one_and_never_before_its_delay(scaling, series, replicas):
    assert all(scaling.least <= now <= scaling.most for _, now in follow(scaling, replicas, series))
    changed_at = 0.0
    for (_, before), (now, after) in itertools.pairwise(
        [(0.0, scaling.least), *follow(scaling, scaling.least, series)]
    ):
        if after < before:
            assert after == before - 1
            assert now - changed_at >= scaling.down_delay_s - 1e-9
        if after != before:
            changed_at = now


@given(scalings, st.integers(0, 600), st.integers(0, 600))
def test_a_steady_load_comes_to_rest_within_its_target_and_more_load_never_wants_fewer_replicas(scaling, load, other):
    looks_enough = int((scaling.down_delay_s + UP_LOOKS + 2) * (scaling.most + 1)) + UP_LOOKS
    found = follow(scaling, scaling.least, [load] * looks_enough)
    end = found[-1][1]
    assert load <= scaling.target * end or end == scaling.most
    assert {replicas for _, replicas in found[-UP_LOOKS:]} == {end}
    few, many = (follow(scaling, scaling.least, [one] * UP_LOOKS)[-1][1] for one in sorted((load, other)))
    assert few <= many


def test_a_burst_of_one_look_starts_nothing_and_a_load_near_the_border_does_not_go_to_and_fro():
    assert follow(Scaling(1, 8, target=4), 1, [100, 0, 100, 0, 100, 0])[-1][1] == 1
    series = [9, 7] * 50  # of 8 for two replicas of 4 each
    assert {now for _, now in follow(Scaling(1, 8, target=4, down_delay_s=5), 2, series)} == {2}
