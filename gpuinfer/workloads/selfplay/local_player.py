"""The player in the process that started the run, with the interface of worker processes: for games and models that are
defined in a notebook or inside of a function, and for a debugger.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Self

from gpuinfer.api import Infer
from gpuinfer.host.event_loop import cancel_until_done
from gpuinfer.workloads.selfplay import player


class LocalPlayer:
    """One player as a task of this event loop (`api.Workers` and its `api.Channel`), as an asynchronous context."""

    def __init__(self, infer: Infer, arguments: Mapping[str, Any]) -> None:
        self._infer, self._arguments = infer, arguments
        self._inbox: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self._outbox: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._play())
        return self

    async def _play(self) -> None:
        try:
            if self._arguments["network"]:
                await self._infer.ready()
            await player.play(self._infer, _Channel(self._inbox, self._outbox), self._arguments)
        finally:
            self._outbox.put_nowait(None)

    async def send(self, worker: int, message: Mapping[str, Any]) -> None:
        self._inbox.put_nowait(message)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Mapping[str, Any] | None]]:
        """The messages of worker 0, and None once it has ended. Raises its error."""
        while (message := await self._outbox.get()) is not None:
            yield 0, message
        if self._task is not None:
            await self._task
        yield 0, None

    async def __aexit__(self, *raised: object) -> None:
        await cancel_until_done(self._task)


class _Channel:
    def __init__(
        self, inbox: asyncio.Queue[Mapping[str, Any]], outbox: asyncio.Queue[Mapping[str, Any] | None]
    ) -> None:
        self._inbox, self._outbox = inbox, outbox

    async def send(self, message: Mapping[str, Any]) -> None:
        self._outbox.put_nowait(message)

    async def receive(self) -> Mapping[str, Any]:
        return await self._inbox.get()
