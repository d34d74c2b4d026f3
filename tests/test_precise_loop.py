"""The event loop with precise timers is an event loop like any other, but for the rounding."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
import time

import pytest
import uvloop

from gpuinfer.host import event_loop as precise_loop


@pytest.fixture
def waits(monkeypatch):
    """What `select` was asked to wait, in seconds."""
    asked = []
    wait = select.select

    def watched(reading, writing, failing, timeout):
        asked.append(timeout)
        return wait(reading, writing, failing, timeout)

    monkeypatch.setattr(select, "select", watched)
    return asked


@pytest.mark.skipif(not hasattr(select, "epoll"), reason="no epoll, no rounding")
def test_a_wait_is_not_rounded_to_milliseconds(waits):
    for _ in range(1000):  # where other programs take the core the time may be over before it is waited for
        precise_loop.run(asyncio.sleep(0.0003))
        if waits:
            break
    assert 0 < max(waits) <= 0.0003


def test_a_timer_never_goes_off_early():
    async def early():
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.sleep(0.0003)
        return loop.time() - began

    assert precise_loop.run(early()) >= 0.0003


def test_what_becomes_ready_ends_a_wait():
    async def pinged():
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        reading, writing = os.pipe()
        loop.add_reader(reading, lambda: ready.done() or ready.set_result(os.read(reading, 1)))
        threading.Timer(0.01, os.write, (writing, b"x")).start()
        try:
            return await asyncio.wait_for(ready, 60)
        finally:
            loop.remove_reader(reading)
            os.close(reading)
            os.close(writing)

    assert precise_loop.run(pinged()) == b"x"


def test_another_thread_wakes_it():
    async def woken():
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        threading.Timer(0.01, loop.call_soon_threadsafe, (future.set_result, 7)).start()
        return await asyncio.wait_for(future, 60)

    assert precise_loop.run(woken()) == 7


def test_signals_are_handled_while_it_waits():
    async def signalled():
        loop = asyncio.get_running_loop()
        came = asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, came.set)
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        await asyncio.wait_for(came.wait(), 60)
        return came.is_set()

    assert precise_loop.run(signalled())


def test_subprocesses_work():
    async def said():
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "print('hello')", stdout=subprocess.PIPE)
        out, _ = await asyncio.wait_for(process.communicate(), 60)
        return out

    assert precise_loop.run(said()).strip() == b"hello"


WAITS = """
import asyncio
from gpuinfer.host import event_loop
async def main():
    print("waiting", flush=True)
    await asyncio.sleep(600)
event_loop.run(main())
"""


def test_ctrl_c_ends_it():
    with subprocess.Popen(
        [sys.executable, "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "waiting\n"
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    assert "KeyboardInterrupt" in err


@pytest.mark.skipif(not hasattr(select, "epoll"), reason="no epoll")
def test_a_descriptor_that_select_cannot_take_is_waited_for_as_ever(waits, monkeypatch):
    monkeypatch.setattr(precise_loop, "SELECTABLE", 0)
    assert precise_loop.run(asyncio.sleep(0.002, "done")) == "done"
    assert waits == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="timer slack is Linux's")
def test_the_threads_timer_slack_is_as_it_was_afterwards():
    async def slack():
        return precise_loop._prctl(precise_loop.GET_SLACK, 0)

    before = precise_loop._prctl(precise_loop.GET_SLACK, 0)
    assert precise_loop.run(slack()) == precise_loop.SLACK_NS != before
    assert precise_loop._prctl(precise_loop.GET_SLACK, 0) == before


@pytest.mark.parametrize("new_loop", [precise_loop.new_loop, uvloop.new_event_loop])
def test_an_alarm_rings_for_its_earliest_time_and_not_before_it(new_loop):
    """Also where the loop's own timers are of whole milliseconds, and one of less than half has no time at all."""

    async def rung(*within_s):
        loop, times = asyncio.get_running_loop(), []
        done = loop.create_future()

        def ring():
            times.append(time.monotonic())
            done.done() or done.set_result(None)

        alarm = precise_loop.Alarm(loop, ring)
        began = time.monotonic()
        for seconds in within_s:
            alarm.ring_within(seconds)
        await asyncio.wait_for(done, 60)
        alarm.clear()
        return len(times), times[0] - began

    for within_s in ((0.0003,), (60.0, 0.0002), (0.0004, 0.0004, 30.0), (0.0,), (0.02, 0.0013)):
        times, took = precise_loop.run(rung(*within_s), new_loop)
        assert (times, took >= min(within_s)) == (1, True)


@pytest.mark.parametrize("new_loop", [precise_loop.new_loop, uvloop.new_event_loop])
def test_an_alarm_that_is_cleared_is_silent_and_leaves_no_descriptor(new_loop):
    async def cleared():
        rings, rung = [], asyncio.Event()
        before = len(os.listdir("/proc/self/fd"))
        alarm = precise_loop.Alarm(asyncio.get_running_loop(), lambda: rings.append(rung.set()))
        alarm.ring_within(0.001)
        alarm.clear()
        await asyncio.sleep(0.02)
        alarm.ring_within(0.0)  # and may be set again
        await asyncio.wait_for(rung.wait(), 60)
        alarm.clear()
        return len(rings), len(os.listdir("/proc/self/fd")) > before  # fewer, where another thread lets go of some

    assert precise_loop.run(cleared(), new_loop) == (1, False)
