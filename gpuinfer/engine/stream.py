"""The client's side of the engine: a result that is read while it grows, and retries while the queue is full.

A reader may be slower than the model: the model does not wait, parts are joined until the reader takes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from gpuinfer.api import Result, Stream
from gpuinfer.engine.results import OnPart
from gpuinfer.errors import Closed, QueueFull
from gpuinfer.generation import Logprob, Part


class Unread:
    """Parts of one answer that wait for their reader: one for each sample at most, however many have come."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: dict[int, Part | _Joined] = {}  # by sample, the one that waits longest first

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, part: Part) -> None:
        waiting = self._waiting.get(part.sample)
        if waiting is None:
            self._waiting[part.sample] = part
        elif isinstance(waiting, Part):
            self._waiting[part.sample] = _Joined(waiting, part)
        else:
            waiting.add(part)

    def take(self) -> Part:
        """What waits longest. There must be something."""
        sample = next(iter(self._waiting))
        waiting = self._waiting.pop(sample)
        return waiting if isinstance(waiting, Part) else waiting.part()


class _Joined:
    """Parts of one sample, of which there will be one."""

    __slots__ = ("_last", "_logprobs", "_processed", "_texts", "_tokens", "_versions")

    def __init__(self, *parts: Part) -> None:
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[Logprob] = []
        self._processed: list[float] = []
        self._versions: list[tuple[int, str]] = []
        for part in parts:
            self.add(part)

    def add(self, part: Part) -> None:
        self._texts.append(part.text)
        self._tokens += part.tokens
        self._logprobs += part.logprobs or ()
        self._processed += part.processed or ()
        self._versions += part.versions
        self._last = part

    def part(self) -> Part:
        last = self._last
        return Part(
            sample=last.sample,
            text="".join(self._texts),
            tokens=tuple(self._tokens),
            logprobs=None if last.logprobs is None else tuple(self._logprobs),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            processed=None if last.processed is None else tuple(self._processed),
            versions=tuple(self._versions),
        )


class PartStream(Stream):
    """`ask(on_part)` is the request: it hands each part to `on_part` and returns the result. It starts at once."""

    def __init__(self, ask: Callable[[OnPart], Coroutine[Any, Any, Result]]) -> None:
        self._inbox = _Inbox()
        self._loop = asyncio.get_running_loop()
        # The task knows the inbox, not the stream: so a stream that its reader has dropped is noticed, in `__del__`.
        self._task = self._loop.create_task(self._inbox.fill(ask))
        self._task.add_done_callback(self._inbox.wake)
        self._closed = False

    async def __anext__(self) -> Part:
        inbox = self._inbox
        while not inbox.unread:
            if self._closed or inbox.done:
                raise StopAsyncIteration
            if self._task.done():
                raise inbox.error or Closed("this stream was closed before its answer was complete. Ask again.")
            if inbox.arrival is not None:
                raise RuntimeError("this stream is being read already. Let one task read it.")
            inbox.arrival = self._loop.create_future()
            try:
                await inbox.arrival
            except asyncio.CancelledError:
                self._task.cancel()
                raise
            finally:
                inbox.arrival = None
        return inbox.unread.take()

    @property
    def result(self) -> Result:
        if not self._inbox.done or self._inbox.unread:
            raise RuntimeError("the answer has not been read to its end. Read all parts, then take the result.")
        return self._inbox.result

    async def aclose(self) -> None:
        self._closed = True
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})
        if not self._inbox.done:
            self._inbox.unread = Unread()

    def __del__(self) -> None:
        if not self._task.done() and not self._loop.is_closed():  # in whichever thread it is collected
            self._loop.call_soon_threadsafe(self._task.cancel)


class _Inbox:
    """What the request has brought so far."""

    __slots__ = ("arrival", "done", "error", "result", "unread")

    def __init__(self) -> None:
        self.unread = Unread()
        self.done = False
        self.result: Result = None
        self.error: BaseException | None = None
        self.arrival: asyncio.Future[None] | None = None  # the reader waits for it

    async def fill(self, ask: Callable[[OnPart], Coroutine[Any, Any, Result]]) -> None:
        try:
            self.result = await ask(self.put)
            self.done = True
        except Exception as error:  # noqa: BLE001 (any error is raised where the parts are read)
            self.error = error

    def put(self, part: Part) -> None:
        self.unread.add(part)
        self.wake()

    def wake(self, *_: object) -> None:
        if self.arrival is not None and not self.arrival.done():
            self.arrival.set_result(None)


RETRY_AFTER_S = 0.05  # between two tries, where the queue does not say when there may be room

Answer = TypeVar("Answer")


async def retry_when_full(ask: Callable[[], Awaitable[Answer]], tries: int) -> Answer:
    """What `ask` answers. Raises the last `QueueFull` after so many, and at once whatever else `ask` raises."""
    full = QueueFull()
    for _ in range(tries):
        try:
            return await ask()
        except QueueFull as error:
            full = error
            await asyncio.sleep(error.retry_after_s or RETRY_AFTER_S)
    raise full
