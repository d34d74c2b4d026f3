"""A session for a program that is no coroutine: its event loop runs in a thread of its own.

The main thread may wait for its user meanwhile, edit a line with readline, and be interrupted by Ctrl-C as ever.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Iterator, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from gpuinfer.api import Backend, Limits, Priority, Request, Result, Strategy
from gpuinfer.engine.engine import Engine
from gpuinfer.errors import WorkError
from gpuinfer.generation import Part
from gpuinfer.host import event_loop as precise_loop
from gpuinfer.host import signals
from gpuinfer.runtime.session import Session

CLOSE_S = 30.0  # for a session to close
FAILED = 1  # the exit code of a process that has to be ended

T = TypeVar("T")

log = logging.getLogger(__name__)


class PendingAnswer(concurrent.futures.Future[Any]):
    """The future of a request to a `BackgroundSession`: any thread may wait for it, or cancel it."""

    def __init__(self, session: BackgroundSession, request: Request, engine: Engine | None = None) -> None:
        """`engine`: of another session on the same loop."""
        super().__init__()
        self._session, self.request = session, request
        self.engine = engine or session.session.engine

    def cancel(self) -> bool:
        """Ask the session's thread to cancel the request. False where it is settled already."""
        if not self.done():
            self._session.post(self._withdraw)
        return not self.done() or self.cancelled()

    def enqueue(self) -> None:
        """On the session's loop: put the request into the queue."""
        try:
            self.engine.enqueue(self.request, self)
        except Exception as error:  # noqa: BLE001 (the caller's)
            self.set_exception(error)

    def cancelled_here(self) -> None:
        """Called on the session's loop when it is cancelled."""

    def _withdraw(self) -> None:
        if not self.done():
            self.cancelled_here()
            super().cancel()
            self.set_running_or_notify_cancel()
            self.engine.withdraw(self.request)


class BackgroundSession:
    """The session of one backend and one strategy, on an event loop in a thread of its own. Its methods block; any
    thread may call them once it is open. `options` are those of `Session`.
    """

    session: Session  # once it is open

    def __init__(self, backend: Backend, strategy: Strategy, **options: Any) -> None:
        self._backend, self._strategy = backend, strategy
        self._options = {"on_stuck": _stuck, **options}
        self._opened: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, Session]] = Future()
        self._thread = threading.Thread(target=self._work, name="gpuinfer session", daemon=True)
        self._posted: deque[Callable[[], None]] = deque()
        self._woken = False  # the loop will take what is posted
        self._ended = False  # no loop will

    def __enter__(self) -> Self:
        self._thread.start()
        self._loop, self._over, self.session = self._opened.result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close_soon()
        self._thread.join(CLOSE_S)

    def close_soon(self) -> None:
        """Have it close, and do not wait for that."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: its thread has ended
            self._loop.call_soon_threadsafe(self._over.set)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the session, once it is open."""
        return self._loop

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs in the session's thread, as callbacks of its futures do."""
        return threading.current_thread() is self._thread

    @property
    def alive(self) -> bool:
        """Whether its thread still runs."""
        return self._thread.is_alive()

    def call(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the session's loop, and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    def ready(self) -> Limits:
        """Start the backend, and count from then on. Raises what that raises."""
        limits = self.call(self.session.ready())
        self.call(self.session.mark())  # what loading the model took is no work
        return limits

    def submit(
        self,
        payload: Any,
        *,
        rows: int = 1,
        priority: Priority = Priority.NORMAL,
        timeout: float = math.inf,
        group: Hashable = None,
        client: Hashable = None,
    ) -> PendingAnswer:
        """Submit one request once `ready` has returned; the future raises what `Infer.__call__` raises."""
        now = time.monotonic()
        answer = PendingAnswer(self, Request(payload, rows, now, priority, now + timeout, group, client))
        self.send(answer)
        return answer

    def send(self, answer: PendingAnswer) -> None:
        """Queue the request of this future, from any thread."""
        self.post(answer.enqueue)

    def post(self, call: Callable[[], None]) -> None:
        """Have the loop's thread do this soon. Many calls wake it once."""
        self._posted.append(call)
        if self._ended:
            self._take_posted()
        elif not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._take_posted)
            except RuntimeError:  # the loop is closed
                self._take_posted()

    def _take_posted(self) -> None:
        self._woken = False  # before the last look: what is posted later wakes the loop again
        while self._posted:
            try:
                call = self._posted.popleft()
            except IndexError:  # another thread took it, after the end
                return
            call()

    def stream(self, payload: Any, *, rows: int = 1, **request: Any) -> BackgroundStream:
        """Submit one request, and read its answer as it grows. `request`: as of `Infer.stream`."""
        return BackgroundStream(self._loop, self.session, payload, rows, request)

    def _work(self) -> None:
        try:
            precise_loop.run(self._serve())
        except BaseException as error:  # noqa: BLE001 (what closing raises is told; the program goes its way)
            if self._opened.done():
                log.warning("%s", error)
            else:
                self._opened.set_exception(error)
        finally:
            self._ended = True
            self._take_posted()  # what came after the loop's last turn: it is told that the engine is closed

    async def _serve(self) -> None:
        over = asyncio.Event()
        async with Session(self._backend, self._strategy, **self._options) as session:
            self._opened.set_result((asyncio.get_running_loop(), over, session))
            await over.wait()


class BackgroundStream(Iterator[Part]):
    """The parts of an answer, each waited for. The reading raises the errors. `close` it when it is no longer read."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        session: Session,
        payload: Any,
        rows: int,
        request: Mapping[str, Any] | None = None,
    ) -> None:
        self._arrived: queue.SimpleQueue[Part | None] = queue.SimpleQueue()  # no more than the answer itself
        self._reading = asyncio.run_coroutine_threadsafe(self._read(session, payload, rows, request or {}), loop)
        self._reading.add_done_callback(lambda reading: self._arrived.put(None))

    async def _read(self, session: Session, payload: Any, rows: int, request: Mapping[str, Any]) -> Result:
        async with session.stream(payload, rows=rows, **request) as stream:
            async for part in stream:
                self._arrived.put(part)
            return stream.result

    def __next__(self) -> Part:
        if (part := self._arrived.get()) is not None:
            return part
        self._arrived.put(None)  # for the next call
        self._reading.result()
        raise StopIteration

    @property
    def result(self) -> Result:
        """The whole answer, once all parts have been read."""
        return self._reading.result()

    def close(self) -> None:
        """Cancels the request when it is not finished."""
        self._reading.cancel()
        concurrent.futures.wait({self._reading})


def _stuck(error: WorkError) -> None:
    """A plugin that is given up blocks the loop, and so would the end of the program."""
    if not signals.owned():
        log.error("%s", error)
        return
    print(f"gpuinfer: {error}", file=sys.stderr, flush=True)
    signals.now(FAILED)
