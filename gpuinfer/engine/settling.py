"""The requests that are not settled, and the ways in which each of them is settled exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gpuinfer.api import Request, Result
from gpuinfer.engine.tally import Tally
from gpuinfer.errors import Expired, GpuinferError, QueueFull
from gpuinfer.generation import Part

OnPart = Callable[[Part], None]


class Unsettled:
    """Requests and their futures, from `submit` to the answer. Settling a request that has left does nothing.

    `left` is called with each request as it leaves, and with how it ended: "ok", or one of `stats.ERRORS`.
    """

    __slots__ = ("_futures", "_left", "_on_part", "_tally", "parts", "rows")

    def __init__(self, tally: Tally, left: Callable[[Request, str], None]) -> None:
        self.rows = 0
        self.parts = 0  # handed over so far
        self._futures: dict[Request, asyncio.Future[Any]] = {}
        self._on_part: dict[Request, OnPart] = {}  # of the requests that are read as they grow
        self._tally = tally
        self._left = left

    def __len__(self) -> int:
        return len(self._futures)

    def __contains__(self, request: Request) -> bool:
        return request in self._futures

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._futures))

    def add(self, request: Request, future: asyncio.Future[Result], on_part: OnPart | None = None) -> None:
        """`on_part` is handed the parts of the answer as they come; it must neither wait nor raise."""
        self._futures[request] = future
        self.rows += request.rows
        if on_part is not None:
            self._on_part[request] = on_part

    def cancelled(self, request: Request) -> bool:
        """Whether its asker has given up, though it may not have said so yet."""
        return self._futures[request].done()

    def hand_over(self, request: Request, part: Part) -> None:
        """Give a part to the one who reads along, if there is one."""
        if (on_part := self._on_part.get(request)) is not None and not self._futures[request].done():
            self.parts += 1
            on_part(part)

    def answer(self, request: Request, result: Result, now: float) -> None:
        if future := self._release(request, "ok"):
            self._tally.answered(request, now)
            future.set_result(result)

    def fail(self, request: Request, error: GpuinferError) -> None:
        if future := self._release(request, kind := kind_of(error)):
            self._tally.error(kind, request.priority, error)
            future.set_exception(error)

    def fail_all(self, requests: Iterable[Request], error: GpuinferError) -> None:
        for request in requests:
            self.fail(request, error)

    def drop(self, request: Request) -> None:
        """Forget a request whose asker wants no answer any more."""
        self._futures[request].cancel()
        self._release(request, "cancelled")

    def _release(self, request: Request, outcome: str) -> asyncio.Future[Result] | None:
        """Take a request off the books. Its future is for the caller to settle; None when nobody waits for it."""
        future = self._futures.pop(request, None)
        if future is None:
            return None
        self.rows -= request.rows
        if request.parts:
            self._on_part.pop(request, None)
        self._left(request, "cancelled" if future.done() else outcome)
        if future.done():
            self._tally.error("cancelled", request.priority)
            return None
        return future


def kind_of(error: BaseException) -> str:
    """As which of `stats.ERRORS` a request counts that ends with this error."""
    if isinstance(error, QueueFull):
        return "rejected"
    return "expired" if isinstance(error, Expired) else "failed"
