"""Whose the cores are, told from what the system counts; and which share of its stations a lane had a core for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuinfer import stats
from gpuinfer.host.cpu_contention import CoreTime, core_time
from gpuinfer.stats import COUNTED, Lane, Snapshot, since

TICK = 1 / os.sysconf("SC_CLK_TCK")
RUN_S = 0.03

# Processes


def process(proc: Path, number: int, parent: int, *times: int, name: str = "python") -> None:
    """A process that has run so many ticks: in user and system mode, and its children that have ended, likewise."""
    (proc / str(number)).mkdir()
    unread = " ".join(["0"] * 9)
    (proc / str(number) / "stat").write_text(
        f"{number} ({name}) S {parent} {unread} {' '.join(map(str, times))} 20 0 1"
    )


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """Two cores; this process, a child, a grandchild, and a stranger with children of its own."""
    (tmp_path / "stat").write_text(
        "cpu  300 20 40 500 9 3 2 15 7 0\n"
        "cpu0 200 10 30 100 4 1 1 10 7 0\n"
        "cpu1 100 10 10 400 5 2 1 5 0 0\n"
        "intr 12345 0 0\n"
    )
    (tmp_path / "self").mkdir()
    process(tmp_path, os.getpid(), 1, 50, 10, 4, 2)
    process(tmp_path, 900_001, os.getpid(), 20, 0, 0, 0, name="a (child) of ours")
    process(tmp_path, 900_002, 900_001, 30, 1, 0, 0)
    process(tmp_path, 900_003, 1, 99, 0, 0, 0)
    process(tmp_path, 900_004, 900_003, 7, 0, 0, 0)
    return tmp_path


def test_what_this_program_ran_is_its_own_and_all_that_it_started(proc: Path) -> None:
    time = core_time(proc, cores=2)
    assert time is not None
    assert time.ours == pytest.approx((66 + 20 + 31) * TICK)
    assert time.busy == pytest.approx((300 + 20 + 40 + 3 + 2) * TICK)
    assert time.stolen == pytest.approx(15 * TICK)
    assert time.others == pytest.approx((365 - 117) * TICK)
    assert core_time(proc, cores=1) is None  # a quota of fewer cores than are counted
    for damage in ("cpu0 1 2\ncpu1 1 2\n", "cpu0 a b c\ncpu1 a b c\n", ""):
        (proc / "stat").write_text(damage)
        assert core_time(proc, cores=2) is None
    assert CoreTime(ours=9.0, busy=20.1).since(CoreTime(ours=4.0, busy=20.0)) is None  # less than we ran


def test_here_what_this_process_runs_is_counted_as_ours() -> None:
    before = core_time()
    if before is None:
        pytest.skip("this system does not tell")
    spent = sum(os.times()[:2])
    while sum(os.times()[:2]) < spent + 5 * TICK:
        pass
    after = core_time()
    assert after is not None
    assert after.ours >= before.ours + 4 * TICK


THREADS = """
import os, threading, zlib
from gpuinfer.host.machine import cpu_times

os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
data = os.urandom(1 << 20)
told = [cpu_times()[1]]
threads = [threading.Thread(target=lambda: [zlib.compress(data) for _ in range(8)]) for _ in range(3)]
for thread in threads:
    thread.start()
while any(thread.is_alive() for thread in threads):
    told.append(cpu_times()[1])
    threads[0].join(0.02)
for thread in threads:
    thread.join()
told.append(cpu_times()[1])
assert told == sorted(told), told
assert told[-1] - told[0] > 0.1, told  # three took turns on one core
if (child := os.fork()) == 0:
    os._exit(cpu_times()[1] >= told[-1])  # which are not its own
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="a system that does not tell")
def test_what_threads_waited_for_a_core_is_kept_once_they_have_ended() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# Lanes


class Clocks:
    """Time that passes when a test says so: for all, and for a thread that computes."""

    def __init__(self) -> None:
        self._now, self._own = 100.0, threading.local()
        self.monotonic = lambda: self._now

    def thread_time(self) -> float:
        return getattr(self._own, "ran", 0.0)

    def spend(self, computed: float, waited: float = 0.0) -> None:
        self._now += computed + waited
        self._own.ran = self.thread_time() + computed

    def flush(self, lane: Lane) -> None:
        """End the last station, and take the clock past the next reading."""
        lane.enter("idle")
        self.spend(0.0, 0.001)
        lane.enter("idle")


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(stats, "time", clocks)
    return clocks


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_on_the_real_clocks_a_station_counts_what_ran_and_not_what_slept() -> None:
    lane, ran = Lane("search"), []

    def work() -> None:
        lane.enter("search")
        ends = time.thread_time() + RUN_S
        while time.thread_time() < ends:
            pass
        lane.enter("asleep")
        time.sleep(RUN_S)
        lane.enter("idle")
        time.sleep(0.001)
        lane.enter("idle")
        ran.append(time.thread_time())

    in_thread(work)
    assert 0.99 * RUN_S <= lane.ran["search"] <= sum(lane.ran.values()) <= ran[0]
    assert lane.stations()["asleep"] >= RUN_S


SHORT = [("even", 1e-5, 0.0), ("odd", 2e-5, 1e-5)] * 2000  # station, seconds computed, seconds waited then


@pytest.mark.parametrize(
    ("visits", "ran"),
    [
        pytest.param([("search", RUN_S, 0), ("asleep", 0, RUN_S)], {"search": RUN_S, "asleep": 0}, id="waiting"),
        pytest.param([("idle", RUN_S, 0)], {}, id="an idle lane"),
        pytest.param(SHORT, {"even": 0.02 * 3 / 4, "odd": 0.06 * 3 / 4}, id="short stations share by their length"),
    ],
)
def test_a_station_counts_what_ran(clocks: Clocks, visits: list, ran: dict[str, float]) -> None:
    lane = Lane("search", clock=clocks.monotonic)

    def work() -> None:
        for station, computed_s, waited_s in visits:
            lane.enter(station)
            clocks.spend(computed_s, waited_s)
        clocks.flush(lane)

    in_thread(work)
    assert lane.ran == pytest.approx(ran, rel=0.02, abs=1e-6)


def test_lanes_share_a_threads_time_and_count_nothing_that_another_thread_ran(clocks: Clocks) -> None:
    first, second, third = (Lane(name, clock=clocks.monotonic) for name in ("first", "second", "third"))

    def work() -> None:
        first.enter("search")
        clocks.spend(RUN_S)
        second.enter("search")  # both are in it now, and the thread can do one thing at a time
        clocks.spend(RUN_S)
        first.enter("idle")
        clocks.flush(second)

    def serve() -> None:
        third.enter("transfer")
        clocks.spend(RUN_S)
        clocks.flush(third)

    def loop() -> None:
        third.enter("forward")  # which another thread ends
        in_thread(serve)
        clocks.spend(RUN_S)  # for somebody else
        clocks.flush(third)

    in_thread(work)
    assert first.ran["search"] + second.ran.get("search", 0.0) == pytest.approx(2 * RUN_S, abs=2e-6)
    in_thread(loop)
    assert third.ran == pytest.approx({"transfer": RUN_S}, abs=1e-6)


def test_what_ran_before_a_mark_is_not_counted_after_it() -> None:
    wire = {"name": "search", "stations": {"search": 5.0}, "visits": {"search": 2}, "ran": {"search": 3.0}}
    now = {**wire, "ran": {"search": 4.5, "encode": 1.0}}
    counted = since(Snapshot(lanes=(now,)), Snapshot(lanes=(wire,)))
    assert counted.lanes[0]["ran"] == {"search": 1.5, "encode": 1.0}
    assert set(COUNTED) <= set(Lane("x").to_wire())
