"""The requests that are not settled, and the ways in which each of them is settled exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gpuinfer.api import Request, Result
from gpuinfer.engine.core import outcome_of
from gpuinfer.errors import GpuinferError
from gpuinfer.generation import Part

OnPart = Callable[[Part], None]

Settled = Callable[[Request, str, float, object], None]
"""Called with each request as it leaves: how it ended ("ok", or one of `stats.ERRORS`), when, its result or error."""


class Unsettled:
    """Requests and their futures, from `submit` to the answer. Settling a request that has left does nothing."""

    __slots__ = ("_clock", "_futures", "_on_part", "parts", "settled")

    def __init__(self, settled: Settled, clock: Callable[[], float]) -> None:
        self.parts = 0  # handed over so far
        self._futures: dict[Request, asyncio.Future[Any]] = {}
        self._on_part: dict[Request, OnPart] = {}  # of the requests that are read as they grow
        self.settled, self._clock = settled, clock

    def __len__(self) -> int:
        return len(self._futures)

    def __contains__(self, request: Request) -> bool:
        return request in self._futures

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._futures))

    def add(self, request: Request, future: asyncio.Future[Result], on_part: OnPart | None = None) -> None:
        """`on_part` is handed the parts of the answer as they come; it must neither wait nor raise."""
        self._futures[request] = future
        if on_part is not None:
            self._on_part[request] = on_part

    def cancelled(self, request: Request) -> bool:
        """Whether its client has given up, though it may not have said so yet."""
        return self._futures[request].done()

    def hand_over(self, request: Request, part: Part) -> None:
        """Give a part to the one who reads along, if there is one."""
        if (on_part := self._on_part.get(request)) is not None and not self._futures[request].done():
            self.parts += 1
            on_part(part)

    def answer(self, request: Request, result: Result, now: float) -> None:
        if future := self._release(request, "ok", now, result):
            future.set_result(result)

    def fail(self, request: Request, error: GpuinferError) -> None:
        if future := self._release(request, outcome_of(error), self._clock(), error):
            future.set_exception(error)

    def fail_all(self, requests: Iterable[Request], error: GpuinferError) -> None:
        for request in requests:
            self.fail(request, error)

    def drop(self, request: Request) -> None:
        """Forget a request whose client wants no answer any more."""
        self._futures[request].cancel()
        self._release(request, "cancelled", self._clock())

    def _release(self, request: Request, outcome: str, now: float, told: object = "") -> asyncio.Future[Result] | None:
        """Take a request off the books. Its future is for the caller to settle; None when it has been cancelled."""
        future = self._futures.pop(request, None)
        if future is None:
            return None
        if request.parts:
            self._on_part.pop(request, None)
        gone = future.done()
        self.settled(request, "cancelled" if gone else outcome, now, told)
        return None if gone else future
