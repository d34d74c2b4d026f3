"""The event loop: `asyncio.run` with timers that go off when they are due, and the cancelling and following of tasks.
Linux is asked for waits of whole milliseconds by `epoll_wait`, so that asyncio's timers are up to 1 ms late, and by
the kernel's timer slack of 50 µs on top: a strategy that waits 0.3 ms for company would wait four times as long.
uvloop rounds likewise, so a timer of the kernel's wakes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import functools
import math
import os
import select
import selectors
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

MONOTONIC, FLAGS, ABSOLUTE = 1, os.O_NONBLOCK | os.O_CLOEXEC, 1  # of <sys/timerfd.h>
LEAST_S = 1e-6  # a time of 0 would disarm the timer


class _Spec(ctypes.Structure):
    _fields_ = (("every_s", ctypes.c_long), ("every_ns", ctypes.c_long), ("s", ctypes.c_long), ("ns", ctypes.c_long))


class KernelTimer:
    """Calls `ring` on the loop at the time that was set last. Close it before the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        """Raises `OSError` where there is no such timer."""
        try:
            self._library = ctypes.CDLL(None, use_errno=True)
            descriptor = self._library.timerfd_create(MONOTONIC, FLAGS) if sys.platform == "linux" else -1
        except AttributeError:
            descriptor = -1
        if descriptor < 0:
            raise OSError("no timers of the kernel here")
        self._descriptor, self._loop, self._ring = descriptor, loop, ring
        loop.add_reader(descriptor, self._rung)

    def set(self, at: float) -> None:
        """`at` is a time of `time.monotonic`; one that is past means now."""
        seconds = int(at := max(at, LEAST_S))
        spec = _Spec(0, 0, seconds, int((at - seconds) * 1e9))
        self._library.timerfd_settime(self._descriptor, ABSOLUTE, ctypes.byref(spec), None)

    def close(self) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _rung(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it was set anew meanwhile
            os.read(self._descriptor, 8)
            self._ring()


T = TypeVar("T")

WIND_UP_S = 1.0
SELECTABLE = 1024  # FD_SETSIZE: `select` takes only descriptors below it
SLACK_NS = 1_000  # how much later than asked a wait may end, for the kernel to save energy
SET_SLACK, GET_SLACK = 29, 30  # PR_SET_TIMERSLACK and PR_GET_TIMERSLACK of <linux/prctl.h>

if hasattr(selectors, "EpollSelector"):

    class PreciseSelector(selectors.EpollSelector):
        """Waits for the epoll descriptor itself with `select`, which takes microseconds, and then asks without waiting.

        A descriptor is readable when something that it watches is ready. One too large for `select` waits as ever.
        """

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is not None and timeout > 0 and self.fileno() < SELECTABLE:
                select.select((self.fileno(),), (), (), timeout)
                timeout = 0
            return super().select(timeout)


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop with precise timers: kqueue takes nanoseconds."""
    if hasattr(selectors, "EpollSelector"):
        return asyncio.SelectorEventLoop(PreciseSelector())
    return asyncio.new_event_loop()


def run(main: Coroutine[Any, Any, T], loops: Callable[[], asyncio.AbstractEventLoop] = new_loop) -> T:
    """Like `asyncio.run`, with precise timers, and bounded at its end: after `WIND_UP_S` it leaves tasks behind that
    ignore their cancellation, and threads that are not done. `loops` makes the loop.
    """
    with contextlib.ExitStack() as slack_back:
        if (slack := _prctl(GET_SLACK, 0)) > 0:  # of this thread, and of threads that it starts meanwhile; Linux alone
            _prctl(SET_SLACK, SLACK_NS)
            slack_back.callback(_prctl, SET_SLACK, slack)
        runner, threads = asyncio.Runner(loop_factory=loops), ThreadPoolExecutor(thread_name_prefix="asyncio")
        loop = runner.get_loop()
        loop.set_default_executor(threads)
        try:
            return runner.run(main)
        finally:
            ending = threading.Thread(target=threads.shutdown, kwargs={"cancel_futures": True}, daemon=True)
            if over := runner.run(_wound_up()):
                ending.start()
                ending.join(WIND_UP_S)
            if over and not ending.is_alive():
                runner.close()
            else:  # which would wait for them
                asyncio.set_event_loop(None)
                loop.close()


async def _wound_up() -> bool:
    """Cancel all tasks; whether they have ended."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    _, left = await asyncio.wait(left, timeout=WIND_UP_S) if left else (None, set())
    for task in left:
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # errors have named it
    return not left


def _prctl(what: int, value: int) -> int:
    try:
        return int(ctypes.CDLL(None).prctl(what, ctypes.c_ulong(value), 0, 0, 0))
    except (AttributeError, OSError):  # no Linux
        return -1


class Alarm:
    """Calls `ring` once for each setting, in the context in which the alarm was made.

    It may ring too early, for a time that was set before: `ring` looks at the clock itself.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._context = contextvars.copy_context()
        self._due = math.inf  # when it rings
        self._rounds = not isinstance(loop, asyncio.SelectorEventLoop)  # times to milliseconds
        self._clock = time.monotonic if self._rounds else loop.time
        self._timer: asyncio.TimerHandle | None = None
        self._kernel: KernelTimer | None = None

    def ring_within(self, seconds: float) -> None:
        """Ring after this time, unless it rings earlier anyway."""
        due = self._clock() + seconds
        if due >= self._due:
            return
        self._due = due
        if self._kernel is None and self._rounds:
            with contextlib.suppress(OSError):  # else by the loop's own timers
                self._kernel = KernelTimer(self._loop, functools.partial(self._context.run, self._go_off))
        if self._kernel is not None:
            self._kernel.set(due)
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._go_off, context=self._context)

    def ring_soon(self) -> None:
        """Ring after the present turn of the loop, once for each call, in addition to `ring_within`."""
        self._loop.call_soon(self._ring, context=self._context)

    def clear(self) -> None:
        """Cancel what `ring_within` set."""
        self._due = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None

    def _go_off(self) -> None:
        self._due, self._timer = math.inf, None
        self._ring()


CANCEL_AGAIN_S = 0.5


async def cancel_until_done(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task until it has ended. A cancellation can get lost in `asyncio.wait_for` when the awaited future ends
    in the same moment (Python 3.11; bpo-37658). The task's error is not raised here.
    """
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_AGAIN_S)
    if task is not None and not task.cancelled():
        task.exception()  # seen


FOLLOW_INTERVAL_S = 0.1  # between two iterations


async def follow_task(task: asyncio.Task[Any], stopping: asyncio.Event) -> AsyncIterator[None]:
    """Iterates until the task has ended, which `stopping` cancels. Raises the task's error."""
    stop = asyncio.create_task(stopping.wait())
    try:
        while not task.done():
            await asyncio.wait({task, stop}, timeout=FOLLOW_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
            if stop.done() and not task.done():
                task.cancel()
                await asyncio.wait({task})
            yield
        with contextlib.suppress(asyncio.CancelledError):
            task.result()
    finally:
        stop.cancel()
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # seen, though something else is being raised
