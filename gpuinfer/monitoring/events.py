"""Server-sent events of the live page: one look a second for all who watch, and none for nobody.

The format is that of https://html.spec.whatwg.org/multipage/server-sent-events.html.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from gpuinfer.errors import GpuinferError
from gpuinfer.monitoring.look import look
from gpuinfer.stats import Snapshot

if TYPE_CHECKING:
    from gpuinfer.http.exchange import Exchange

EVERY_S = 1.0
WINDOW_S = 5.0  # rates and percentiles are those of the last seconds
PATIENCE_S = 5.0  # for what is seen: then the watchers are told that it cannot be
MOST_WATCHERS = 64
HEADERS = (("Cache-Control", "no-store"), ("X-Accel-Buffering", "no"), ("X-Content-Type-Options", "nosniff"))


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look is made of; the arguments of `look.look`."""

    snapshot: Snapshot
    workers: Sequence[Mapping[str, Any]] = ()
    about: Mapping[str, Any] = field(default_factory=dict)


class Watching:
    """The handler of `/events`. One task takes the looks as long as somebody watches; all are sent the same bytes.

    A watcher who reads slowly misses looks, and gets the newest one next; the server lets go of one who reads nothing.
    """

    def __init__(
        self, see: Callable[[], Awaitable[Seen]], *, every_s: float = EVERY_S, most: int = MOST_WATCHERS
    ) -> None:
        self._see, self._every_s, self._most = see, every_s, most
        self._taker: asyncio.Task[None] | None = None
        self._news = asyncio.Event()  # set, and replaced, when there is another look
        self._number, self._latest = 0, b""
        self._closed = False
        self.watchers = 0

    async def __call__(self, exchange: Exchange) -> None:
        """Send looks until the client goes away or the server closes. Raises what `see` raises that is not foreseen."""
        if self._closed or self.watchers >= self._most:
            why = "The server is closing." if self._closed else f"{self._most} watch already, which is the most."
            return exchange.refuse(503, why, [("Retry-After", "5")])
        self.watchers += 1
        taker = self._looking()
        try:
            exchange.begin(200, "text/event-stream", HEADERS)
            await self._tell(exchange, taker)
            exchange.end()
        finally:
            self.watchers -= 1
            if not self.watchers:
                taker.cancel()
                self._taker = None

    def _looking(self) -> asyncio.Task[None]:
        """The task that takes the looks; a new one for the first who watches."""
        if self._taker is None or self._taker.done():
            self._number, self._latest = 0, b""
            self._taker = asyncio.create_task(self._take(), name="looks of the page")
        return self._taker

    async def _tell(self, exchange: Exchange, taker: asyncio.Task[None]) -> None:
        told = 0
        while not self._closed and not taker.done():
            if self._number == told:
                await self._news.wait()
                continue
            told = self._number
            await exchange.write(self._latest)
        if taker.done():
            taker.result()  # raises what it died of

    async def _take(self) -> None:
        past: deque[tuple[float, Snapshot]] = deque()
        try:
            while True:
                self._publish(await self._event(past))
                await asyncio.sleep(self._every_s)
        finally:
            self._wake()

    async def _event(self, past: deque[tuple[float, Snapshot]]) -> bytes:
        try:
            async with asyncio.timeout(PATIENCE_S):
                seen = await self._see()
        except TimeoutError:
            return event("trouble", {"message": f"The server did not say how it is within {PATIENCE_S:.0f} s."})
        except (GpuinferError, OSError) as error:
            return event("trouble", {"message": str(error)[:300]})
        now = time.monotonic()
        while len(past) > 1 and past[1][0] <= now - WINDOW_S:
            past.popleft()
        then, before = past[0] if past else (now, seen.snapshot)
        past.append((now, seen.snapshot))
        return event("look", look(seen.snapshot, before, now - then, seen.workers, seen.about))

    def _publish(self, latest: bytes) -> None:
        self._number, self._latest = self._number + 1, latest
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def close(self) -> None:
        """End all streams after the look that is on its way: a server that drains would wait for them in vain."""
        self._closed = True
        self._wake()


def event(name: str, value: Mapping[str, Any]) -> bytes:
    """One event; JSON has no bare newline that could end it."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(value))
