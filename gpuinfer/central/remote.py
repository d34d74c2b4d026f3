"""A backend of text whose model is in a process that somebody else has started; how worker processes get there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gpuinfer.api import Backend, BackendContext, Event, Limits, ModelKind, Request, Result, Setup
from gpuinfer.central.address import Address
from gpuinfer.central.text_client import TextConnection, TextLink
from gpuinfer.errors import BackendDied, UsageError


class TextRemote(Backend):
    """A way to that process. `called`: the backend that starts it, by the name that users give."""

    serves: ClassVar[Sequence[ModelKind]] = ("text",)
    remote = True
    called = "central"

    def __init__(
        self,
        setup: Setup | None = None,
        /,
        address: Address | None = None,
        restarts_within_s: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(setup, **options)
        self.limits = Limits(1)
        self._address, self._restarts_within_s = address, restarts_within_s
        self._link: TextLink | None = None

    async def start(self, context: BackendContext) -> None:
        soon = asyncio.get_running_loop().call_soon
        self._link = TextLink(TextConnection(self._there(), self._restarts_within_s, soon))
        await self._link.open()
        self.limits = self._link.limits

    def _there(self) -> Address:
        """Raises `UsageError` where nobody has said where."""
        if self._address is None:
            raise UsageError(f"there is nothing to connect to. Start it with the backend '{self.called}'.")
        return self._address

    async def infer(self, batch: Sequence[Request]) -> Sequence[Result]:
        answers = {event.request: event.error or event.value async for event in self.stream(batch)}
        return [answers[request] for request in batch]

    async def stream(self, batch: Sequence[Request]) -> AsyncIterator[Event]:
        """Each answer as it comes, in parts where they are wanted. What is unanswered is cancelled with the stream."""
        if self._link is None:
            raise self._closed()
        async for event in self._link.stream(batch):
            yield event

    def _closed(self) -> BackendDied:
        return BackendDied(f"the backend '{self.called}' is not running. Await start() first, and not after close().")

    @property
    def lost(self) -> BackendDied | None:
        return None if self._link is None else self._link.lost

    def cancel(self, request: Request) -> None:
        if self._link is not None:
            self._link.cancel(request)

    async def close(self) -> None:
        if self._link is not None:
            await self._link.close()
            self._link = None


@dataclass(frozen=True)
class Way:
    """How a worker process gets there."""

    kind: type[TextRemote]
    setup: Setup
    address: Address
    restarts_within_s: float

    def open(self) -> Backend:
        return self.kind(self.setup, address=self.address, restarts_within_s=self.restarts_within_s)
