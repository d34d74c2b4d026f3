"""One member of the fleet as its supervisor sees it, whoever started it: its address, the probe of its health on a
connection of its own, and the heartbeat that judges the answers. Looks are counted, not seconds, so that a
supervisor that was suspended accuses nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from gpuinfer.errors import GpuinferError
from gpuinfer.fleet.router.protocol import FleetMember, State
from gpuinfer.host import event_loop
from gpuinfer.http.client import HttpClient

LOOK_S = 0.5  # from one look to the next
LATE_LOOKS = 6  # looks in a row without an answer: 3 s
STUCK_LOOKS = 2  # answers in a row that say "stuck", each of a heartbeat that is 3 s late by itself. One may come of a
# machine that was suspended as a whole

HeartbeatState = Literal["well", "late", "stuck"]


class Heartbeat:
    """What is known of one replica since it came up."""

    __slots__ = ("_answered", "_missed", "_stuck")

    def __init__(self) -> None:
        self._answered = True
        self._missed = self._stuck = 0

    @property
    def missed(self) -> int:
        """Looks in a row without an answer."""
        return self._missed

    def answer(self, *, stuck: bool) -> None:
        """A probe was answered; `stuck`: it says that its work does not go on."""
        self._answered = True
        self._stuck = self._stuck + 1 if stuck else 0

    def look(self) -> HeartbeatState:
        """Look once, `LOOK_S` after the last time: how it stands."""
        self._missed = 0 if self._answered else self._missed + 1
        self._answered = False
        if self._stuck >= STUCK_LOOKS:
            return "stuck"
        return "late" if self._missed >= LATE_LOOKS else "well"


ANSWER_S = 10.0  # far beyond what is late: whether an answer is late is counted in looks, not here
MOST_BYTES = 64 << 10


class ProbedHealth(msgspec.Struct, frozen=True):
    """What `/health` says. Of a server that is not ours only `ready` is known, from the status of its answer."""

    server: str = ""
    status: str = ""
    ready: bool = False
    busy: bool = False
    stuck: bool = False
    heartbeat_age_s: float = 0.0
    in_flight: int = 0
    waiting_rows: int = 0
    model: str = ""
    kind: str = ""

    @property
    def draining(self) -> bool:
        return self.status == "draining"


class HealthProbe:
    """Of one replica, at one address."""

    def __init__(self, host: str, port: int) -> None:
        self._client = HttpClient(f"http://{bracketed(host)}:{port}", connections=1, timeout_s=ANSWER_S)

    async def ask(self) -> ProbedHealth | None:
        """None: it gave no answer that is one of HTTP."""
        try:
            response = await self._client.request("GET", "/health")
        except GpuinferError:
            return None
        return read_health(response.status, response.body)

    async def close(self) -> None:
        await self._client.close()


def read_health(status: int, body: bytes) -> ProbedHealth:
    """From an answer. A body that is none of ours says nothing, and does no harm."""
    try:
        health = msgspec.json.decode(body[:MOST_BYTES], type=ProbedHealth)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        health = ProbedHealth()
    if health.server != "gpuinfer":
        return ProbedHealth(ready=status == 200)
    return msgspec.structs.replace(health, ready=health.ready and status == 200)


def bracketed(host: str) -> str:
    """As it stands in a URL."""
    return f"[{host}]" if ":" in host else host


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
        self.health: ProbedHealth | None = None
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

    def member(self) -> FleetMember:
        """For the roster. One that has no address yet lets requests wait for it."""
        host = self.host or NOWHERE
        return FleetMember(self.id, host, self.port, self.state, ours=self.ours, since=self.since, key=self.key)

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
        probe = HealthProbe(host, port)
        asking = asyncio.create_task(self._ask(probe))
        try:
            yield
        finally:
            await event_loop.cancel_until_done(asking)
            await probe.close()

    async def _ask(self, probe: HealthProbe) -> None:
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

    def _answered(self, health: ProbedHealth) -> None:
        """It is up, or it says that it is not."""
        if health.ready:
            self._become("up")
        elif health.draining and self.state == "up":
            self._become("draining")

    async def _look(self, gone: Callable[[], bool] = lambda: False) -> HeartbeatState | None:
        """The next look; None: it is gone."""
        until = time.monotonic() + LOOK_S
        while (left := until - time.monotonic()) > 0:
            if gone():
                return None
            await asyncio.sleep(min(left, LOOK_S / 5))
        return None if gone() else self._heartbeat.look()

    async def _over(self) -> None:
        """Its task has ended."""
        await event_loop.cancel_until_done(self._task)
