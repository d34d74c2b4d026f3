"""Proof of life: what counts as stuck, and what does not."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

import pytest
from helpers import AtOnce
from remotes import Far
from test_processes import collect, eventually, gone

from gpuinfer.runtime import worker_pool
from gpuinfer.runtime.session import Session
from gpuinfer.runtime.worker_pool import LATE_LOOKS, START_LOOKS, STARTING, WORKING, WorkerHeartbeat, WorkerPulse


@pytest.fixture
def beating():
    """A pulse, with a beat of the given phase at each call."""
    made = WorkerPulse()
    yield made, lambda phase: os.write(made.theirs.fileno(), phase)
    made.close()


def looks(made, pid=0):
    """How many looks without a beat until it is stuck."""
    return next(count for count in range(1, 1000) if made.is_stuck(pid))


def fill(made, phase):
    """Beats until no more fit."""
    with contextlib.suppress(BlockingIOError):
        while os.write(made.theirs.fileno(), 4096 * phase):
            pass


def test_a_worker_that_is_heard_at_every_look_is_never_stuck(beating):
    made, beat = beating
    for _ in range(3 * START_LOOKS):
        beat(WORKING)
        assert not made.is_stuck(0)


@pytest.mark.parametrize(
    ("phase", "patience"),
    [
        pytest.param(WORKING, LATE_LOOKS, id="at work: five seconds"),
        pytest.param(STARTING, START_LOOKS, id="while it starts: a minute"),
    ],
)
def test_a_worker_is_stuck_after_so_many_looks_in_a_row(beating, phase, patience):
    made, beat = beating
    beat(phase)
    assert not made.is_stuck(os.getpid())
    assert looks(made, os.getpid()) == patience + 1
    beat(phase)
    assert not made.is_stuck(os.getpid())
    assert looks(made, os.getpid()) == patience + 1


def test_a_worker_that_was_stopped_while_it_starts_is_stuck_sooner(beating):
    made, _ = beating
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert looks(made, child.pid) == LATE_LOOKS + 1
    finally:
        child.kill()
        child.communicate()


def test_however_long_nobody_looked_one_look_finds_the_beats_of_all_that_time(beating):
    made, _ = beating
    fill(made, WORKING)
    assert not made.is_stuck(0)
    assert looks(made) == LATE_LOOKS + 1


async def test_a_full_pipe_stops_no_heart(beating, monkeypatch):
    monkeypatch.setattr(worker_pool, "BEAT_S", 0.01)
    made, _ = beating
    fill(made, STARTING)
    WorkerHeartbeat(made.theirs).work()
    assert not made.is_stuck(0)  # takes the pipe's whole content
    assert await eventually(lambda: not made.is_stuck(0) and made._working)


@pytest.mark.parametrize("target", ["helpers:echo", pytest.param("helpers:busy_in_thread", marks=pytest.mark.thorough)])
async def test_a_worker_that_is_stopped_is_killed_and_ends_like_any_that_was(target, monkeypatch):
    monkeypatch.setattr(worker_pool, "LOOK_S", 0.6)
    async with Session(Far(), AtOnce()) as infer, infer.workers(target, [{}, {}]) as workers:
        heard = aiter(workers)
        pids = dict([await anext(heard), await anext(heard)])
        os.kill(pids[1]["pid"], signal.SIGSTOP)
        assert await asyncio.wait_for(anext(heard), 30) == (1, None)
        assert gone(pids[1]["pid"])
        assert not gone(pids[0]["pid"])


@pytest.mark.thorough
async def test_a_worker_that_computes_on_its_loop_is_left_alone(monkeypatch):
    monkeypatch.setattr(worker_pool, "LOOK_S", 0.6)
    async with Session(Far(), AtOnce()) as infer, infer.workers("remotes:busy", [{"steps": 10**8}]) as workers:
        told = [message for _, message in await collect(workers) if message]
    assert told == [{"total": (10**8 - 1) * 10**8 // 2}]
