"""Proof of life: what counts as stuck, and what does not."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from helpers import AtOnce
from remotes import Far
from test_processes import collect, eventually, gone

from gpuinfer.host import child, shared_memory
from gpuinfer.host.child import AWAY_S, BEATS, HEARTBEAT_SIZE, LATE_S, START_LATE_S, Heartbeat, HeartbeatWatch
from gpuinfer.runtime import worker_pool
from gpuinfer.runtime.session import Session


class Watched:
    """A watch on a clock of its own, and what beats."""

    def __init__(self):
        self.now = 100.0
        descriptor, self.memory = shared_memory.create(HEARTBEAT_SIZE)
        self.memory_there = shared_memory.Descriptor(descriptor)
        self.watch = HeartbeatWatch(self.memory)
        self.watch.late_s()

    def monotonic(self):
        return self.now

    def beat(self, started):
        BEATS.pack_into(self.memory, 0, BEATS.unpack_from(self.memory)[0] + 1, started)

    def looks(self, pid, every_s=1.0):
        """How many looks without a beat until the process is stuck."""
        for count in range(1, 1000):
            self.now += every_s
            if self.watch.is_stuck(pid):
                return count
        raise AssertionError("never")


@pytest.fixture
def watched(monkeypatch):
    made = Watched()
    monkeypatch.setattr(child.time, "monotonic", made.monotonic)
    made.watch = HeartbeatWatch(made.memory)
    return made


@pytest.mark.parametrize(
    ("started", "patience_s"),
    [pytest.param(True, LATE_S, id="at work"), pytest.param(False, START_LATE_S, id="while it starts")],
)
def test_a_process_is_stuck_after_so_long_without_a_beat(watched, started, patience_s):
    for _ in range(2):
        for _ in range(100):
            watched.beat(started)
            watched.now += 1.0
            assert not watched.watch.is_stuck(os.getpid())
        assert watched.looks(os.getpid()) == patience_s + 1


def test_a_look_counts_little_however_long_the_watcher_was_away(watched):
    watched.beat(True)
    assert not watched.watch.is_stuck(os.getpid())
    assert watched.looks(os.getpid(), every_s=3600.0) == LATE_S // AWAY_S + 1


def test_a_process_that_was_stopped_while_it_starts_is_stuck_sooner(watched):
    stopped = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        stopped.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
        watched.watch.late_s()
        assert watched.looks(stopped.pid) == LATE_S + 1
    finally:
        stopped.kill()
        stopped.communicate()


async def test_a_heartbeat_beats_by_itself_and_says_when_the_start_is_over(monkeypatch):
    monkeypatch.setattr(child, "BEAT_S", 0.01)
    made = Watched()
    Heartbeat(made.memory_there).started()
    assert await eventually(lambda: BEATS.unpack_from(made.memory) > (3, True))


@pytest.mark.parametrize("target", ["helpers:echo", pytest.param("helpers:busy_in_thread", marks=pytest.mark.thorough)])
async def test_a_worker_that_is_stopped_is_killed_and_ends_like_any_that_was(target, monkeypatch):
    monkeypatch.setattr(child, "LATE_S", 3.0)
    async with Session(Far(), AtOnce()) as infer, infer.workers(target, [{}, {}]) as workers:
        heard = aiter(workers)
        pids = dict([await anext(heard), await anext(heard)])
        os.kill(pids[1]["pid"], signal.SIGSTOP)
        assert await asyncio.wait_for(anext(heard), 30) == (1, None)
        assert gone(pids[1]["pid"])
        assert not gone(pids[0]["pid"])


@pytest.mark.thorough
async def test_a_worker_that_computes_on_its_loop_is_left_alone(monkeypatch):
    monkeypatch.setattr(worker_pool, "LOOK_S", 0.5)
    async with Session(Far(), AtOnce()) as infer, infer.workers("remotes:busy", [{"steps": 10**8}]) as workers:
        told = [message for _, message in await collect(workers) if message]
    assert told == [{"total": (10**8 - 1) * 10**8 // 2}]
