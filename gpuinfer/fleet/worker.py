"""One member of the fleet as its supervisor sees it, whoever started it: where it is, and how it is."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from gpuinfer.fleet.heartbeat import LOOK_S, Heartbeat
from gpuinfer.fleet.heartbeat import State as Beat
from gpuinfer.fleet.probe import Health, Probe, bracketed
from gpuinfer.fleet.roster import Member, State
from gpuinfer.host import tasks

NOWHERE = "127.0.0.1"  # port 0
DOUBTFUL_LOOKS = 3  # in a row without an answer


class Worker(ABC):
    """`changed` is called whenever what the router should know of it has changed; `tell` with news for people."""

    ours: bool

    def __init__(self, id: int, key: str | None, changed: Callable[[], None], tell: Callable[[str], None]) -> None:
        self.id, self.key = id, key
        self.host, self.port = "", 0
        self.state: State = "starting"
        self.since = 0.0  # `time.time()` when it came up
        self.health: Health | None = None
        self.attempts = 0
        self.failure = ""  # why it last went down
        self.leaving = False  # it was asked to drain, and comes up no more
        self._changed, self._tell = changed, tell
        self._heartbeat = Heartbeat()
        self._nudged = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @abstractmethod
    async def run(self) -> None:
        """Look after it, until cancelled."""

    @abstractmethod
    async def end(self, within_s: float) -> None:
        """Look after it no more; what was started by us is ended. Whoever calls has let it drain."""

    def begin(self) -> None:
        self._task = asyncio.create_task(self.run(), name=f"gpuinfer worker {self.id}")

    def nudge(self) -> None:
        """Something has failed there: look now."""
        self._nudged.set()

    def drain(self) -> None:
        """It gets no new requests from now on."""
        self.leaving = True
        if self.state == "up":
            self._become("draining")

    @property
    def url(self) -> str:
        return f"http://{bracketed(self.host)}:{self.port}" if self.port else ""

    @property
    def healthy(self) -> bool:
        """Whether it takes requests, and has answered the last probes."""
        return self.state == "up" and self._heartbeat.missed < DOUBTFUL_LOOKS

    @property
    def condition(self) -> str:
        """In one word, for people."""
        if self.state == "up":
            return "late" if not self.healthy else "busy" if self.health and self.health.busy else "ready"
        return self.state

    def member(self) -> Member:
        """For the roster. One that has no address yet lets requests wait for it."""
        host = self.host or NOWHERE
        return Member(self.id, host, self.port, self.state, ours=self.ours, since=self.since, key=self.key)

    def told(self) -> dict[str, Any]:
        """What `/workers` says of it, without what the router has counted."""
        health = self.health
        return {
            "id": self.id,
            "index": self.id,
            "url": self.url,
            "healthy": self.healthy,
            "state": self.condition,
            "ours": self.ours,
            "since": self.since or None,
            "restarts": max(0, self.attempts - 1),
            "last_event": self.failure or None,
            "waiting_rows": health.waiting_rows if health else 0,
        }

    def _become(self, state: State) -> None:
        if state == "up" and self.leaving:
            state = "draining"
        if state != self.state:
            if state == "up":
                self.since = time.time()
            self.state = state
            self._changed()

    @contextlib.asynccontextmanager
    async def _probed(self, host: str, port: int) -> Any:
        """Probe it meanwhile: twice a second, and whenever it is nudged."""
        self.host, self.port = host, port
        self._heartbeat, self.health = Heartbeat(), None
        probe = Probe(host, port)
        asking = asyncio.create_task(self._ask(probe))
        try:
            yield
        finally:
            await tasks.ended(asking)
            await probe.close()

    async def _ask(self, probe: Probe) -> None:
        while True:
            if (health := await probe.ask()) is not None:
                self._heartbeat.answer(stuck=health.stuck)
                self.health = health
                self._answered(health)
            await self._rest()

    async def _rest(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._nudged.wait()
        self._nudged.clear()

    def _answered(self, health: Health) -> None:
        """It is up, or it says that it is not."""
        if health.ready:
            self._become("up")
        elif health.draining and self.state == "up":
            self._become("draining")

    async def _look(self, gone: Callable[[], bool] = lambda: False) -> Beat | None:
        """The next look; None: it is gone."""
        until = time.monotonic() + LOOK_S
        while (left := until - time.monotonic()) > 0:
            if gone():
                return None
            await asyncio.sleep(min(left, LOOK_S / 5))
        return None if gone() else self._heartbeat.look()

    async def _over(self) -> None:
        """Its task has ended."""
        await tasks.ended(self._task)
