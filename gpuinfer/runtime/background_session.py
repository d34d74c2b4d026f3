"""A session for a program that is no coroutine: its event loop runs in a thread of its own.

The main thread may wait for its user meanwhile, edit a line with readline, and be interrupted by Ctrl-C as ever.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from gpuinfer.api import Backend, Limits, Result, Strategy
from gpuinfer.errors import WorkError
from gpuinfer.generation import Part
from gpuinfer.host import event_loop as precise_loop
from gpuinfer.host import signals
from gpuinfer.runtime.session import Session

CLOSE_S = 30.0  # for a session to close
FAILED = 1  # the exit code of a process that has to be ended

log = logging.getLogger(__name__)


class BackgroundSession:
    """The session of one backend and one strategy. Its methods block, and belong to the thread that opened it."""

    def __init__(self, backend: Backend, strategy: Strategy) -> None:
        self._backend, self._strategy = backend, strategy
        self._opened: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, Session]] = Future()
        self._thread = threading.Thread(target=self._work, name="gpuinfer session", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._loop, self._over, self._session = self._opened.result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(CLOSE_S)

    def ready(self) -> Limits:
        """Start the backend. Raises what that raises."""
        return asyncio.run_coroutine_threadsafe(self._session.ready(), self._loop).result()

    def stream(self, payload: Any, *, rows: int = 1) -> BackgroundStream:
        """Submit one request, and read its answer as it grows."""
        return BackgroundStream(self._loop, self._session, payload, rows)

    def _work(self) -> None:
        try:
            precise_loop.run(self._serve())
        except BaseException as error:  # noqa: BLE001 (what closing raises is told; the program goes its way)
            if self._opened.done():
                log.warning("%s", error)
            else:
                self._opened.set_exception(error)

    async def _serve(self) -> None:
        over = asyncio.Event()
        async with Session(self._backend, self._strategy, on_stuck=_stuck) as session:
            self._opened.set_result((asyncio.get_running_loop(), over, session))
            await over.wait()


class BackgroundStream(Iterator[Part]):
    """The parts of an answer, each waited for. The reading raises the errors. `close` it when it is no longer read."""

    def __init__(self, loop: asyncio.AbstractEventLoop, session: Session, payload: Any, rows: int) -> None:
        self._arrived: queue.SimpleQueue[Part | None] = queue.SimpleQueue()  # no more than the answer itself
        self._reading = asyncio.run_coroutine_threadsafe(self._read(session, payload, rows), loop)
        self._reading.add_done_callback(lambda reading: self._arrived.put(None))

    async def _read(self, session: Session, payload: Any, rows: int) -> Result:
        async with session.stream(payload, rows=rows) as stream:
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
