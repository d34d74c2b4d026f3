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

LOOPS = pytest.mark.parametrize("new_loop", [precise_loop.new_loop, uvloop.new_event_loop])


@pytest.fixture
def waits(monkeypatch):
    """What `select` was asked to wait, in seconds."""
    asked, wait = [], select.select
    monkeypatch.setattr(select, "select", lambda *given: asked.append(given[3]) or wait(*given))
    return asked


@pytest.mark.skipif(not hasattr(select, "epoll"), reason="no epoll, no rounding")
def test_a_wait_is_not_rounded_to_milliseconds_where_select_can_take_the_descriptor(waits, monkeypatch):
    for _ in range(1000):  # where other programs take the core the time may be over before it is waited for
        precise_loop.run(asyncio.sleep(0.0003))
        if waits:
            break
    assert 0 < max(waits) <= 0.0003
    waits.clear()
    monkeypatch.setattr(precise_loop, "SELECTABLE", 0)
    assert precise_loop.run(asyncio.sleep(0.002, "done")) == "done"
    assert waits == []


async def of_a_pipe(loop, ready):
    reading, writing = os.pipe()
    loop.add_reader(reading, lambda: ready.done() or ready.set_result(os.read(reading, 1)))
    threading.Timer(0.01, os.write, (writing, b"x")).start()
    try:
        return await ready == b"x"
    finally:
        loop.remove_reader(reading)
        os.close(reading)
        os.close(writing)


async def of_a_thread(loop, ready):
    threading.Timer(0.01, loop.call_soon_threadsafe, (ready.set_result, 7)).start()
    return await ready == 7


async def of_a_signal(loop, ready):
    loop.add_signal_handler(signal.SIGUSR1, ready.set_result, None)
    threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    return await ready is None


async def of_a_process(loop, ready):
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(1)", stdout=subprocess.PIPE)
    return (await process.communicate())[0].strip() == b"1"


async def of_a_timer(loop, ready):
    began = loop.time()
    await asyncio.sleep(0.0003)
    return loop.time() - began >= 0.0003


@pytest.mark.parametrize("event", [of_a_pipe, of_a_thread, of_a_signal, of_a_process, of_a_timer])
def test_it_is_woken_by_any_event_and_by_no_timer_too_early(event):
    async def main():
        loop = asyncio.get_running_loop()
        return await asyncio.wait_for(event(loop, loop.create_future()), 60)

    assert precise_loop.run(main())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="timer slack is Linux's")
def test_the_threads_timer_slack_is_as_it_was_afterwards():
    async def slack():
        return precise_loop._prctl(precise_loop.GET_SLACK, 0)

    before = precise_loop._prctl(precise_loop.GET_SLACK, 0)
    assert precise_loop.run(slack()) == precise_loop.SLACK_NS != before
    assert precise_loop._prctl(precise_loop.GET_SLACK, 0) == before


@LOOPS
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


@LOOPS
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
