"""One member of the fleet as its supervisor sees it: its address, the probe of its health on a connection of its own,
and the heartbeat that judges the answers. Checks are counted, not seconds, so that no member is killed because the
supervisor was suspended.
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
from gpuinfer.fleet.plan import HealthChecks
from gpuinfer.fleet.router.protocol import FleetMember, State
from gpuinfer.host import event_loop
from gpuinfer.http.client import HttpClient

STUCK_LOOKS = 2  # answers in a row that say "stuck", each after 3 s without progress; one alone may be the effect of a
# machine that was suspended as a whole


HeartbeatState = Literal["well", "late", "stuck"]


class ProbeHeartbeat:
    """The heartbeat of one replica since it came up."""

    __slots__ = ("_answered", "_late_checks", "_stuck", "missed")

    def __init__(self, late_checks: int = HealthChecks().late_checks) -> None:
        self._answered, self._late_checks = True, late_checks
        self.missed = self._stuck = 0  # checks in a row without an answer; answers in a row that say stuck

    def answer(self, *, stuck: bool) -> None:
        """A probe was answered; `stuck`: the replica says that it makes no progress."""
        self._answered = True
        self._stuck = self._stuck + 1 if stuck else 0

    def look(self) -> HeartbeatState:
        """Check once, an interval after the last time."""
        self.missed = 0 if self._answered else self.missed + 1
        self._answered = False
        if self._stuck >= STUCK_LOOKS:
            return "stuck"
        return "late" if self.missed >= self._late_checks else "well"


ANSWER_S = 10.0  # timeout of a probe, far beyond the heartbeat's; where that is longer, twice it
MOST_BYTES = 64 << 10


class ProbedHealth(msgspec.Struct, frozen=True):
    """The answer of `/health`. Of a server that is not ours only `ready` is known, from the status."""

    server: str = ""
    status: str = ""
    ready: bool = False
    busy: bool = False
    stuck: bool = False
    heartbeat_age_s: float = 0.0
    in_flight: int = 0
    waiting_rows: int = 0
    room: int | None = None  # rows that it computes at once
    model: str = ""
    kind: str = ""

    @property
    def draining(self) -> bool:
        return self.status == "draining"


def bracketed(host: str) -> str:
    """A host as part of a URL."""
    return f"[{host}]" if ":" in host else host


NOWHERE = "127.0.0.1"  # port 0
GONE_S = 0.1  # after which it is noticed at the latest that a process has ended


class Worker(ABC):
    """A member of the fleet. `changed` is called when its roster entry has changed; `tell` with news for people."""

    ours: bool

    def __init__(
        self,
        id: int,
        key: str | None,
        changed: Callable[[], None],
        tell: Callable[[str], None],
        checks: HealthChecks,
    ) -> None:
        self.id, self.key, self.checks = id, key, checks
        self.host, self.port = "", 0
        self.state: State = "starting"
        self.since = 0.0  # `time.time()` when it came up
        self.health: ProbedHealth | None = None
        self.attempts = 0
        self.failure = ""  # why it last went down
        self.leaving = False  # it drains, and is not started again
        self._changed, self._tell = changed, tell
        self._heartbeat = ProbeHeartbeat(checks.late_checks)
        self._nudged = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @abstractmethod
    async def run(self) -> None:
        """Supervise the member, until cancelled."""

    @abstractmethod
    async def end(self, within_s: float) -> None:
        """Stop supervising; a replica of ours is ended. Call `drain` before."""

    def begin(self) -> None:
        self._task = asyncio.create_task(self.run(), name=f"gpuinfer worker {self.id}")

    def nudge(self) -> None:
        """A request has failed there: probe now."""
        self._nudged.set()

    def drain(self) -> None:
        """Send no new requests there."""
        self.leaving = True
        if self.state == "up":
            self._become("draining")

    @property
    def url(self) -> str:
        return f"http://{bracketed(self.host)}:{self.port}" if self.port else ""

    @property
    def healthy(self) -> bool:
        """Whether the member takes requests and has answered the last probes."""
        return self.state == "up" and self._heartbeat.missed < self.checks.doubtful_checks

    @property
    def condition(self) -> str:
        """The state in one word, for people."""
        if self.state == "up":
            return "late" if not self.healthy else "busy" if self.health and self.health.busy else "ready"
        return self.state

    def member(self) -> FleetMember:
        """The entry in the roster. While a member has no address yet, requests may wait for it."""
        host = self.host or NOWHERE
        room = self.health.room if self.health else None
        return FleetMember(self.id, host, self.port, self.state, self.ours, since=self.since, key=self.key, room=room)

    def told(self) -> dict[str, Any]:
        """The entry in `/workers`, without the router's counters."""
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
        """Probe the member meanwhile: at each interval, and when `nudge` is called."""
        self.host, self.port = host, port
        self._heartbeat, self.health = ProbeHeartbeat(self.checks.late_checks), None
        answer_s = max(ANSWER_S, 2 * self.checks.timeout_s)
        client = HttpClient(f"http://{bracketed(host)}:{port}", connections=1, timeout_s=answer_s)
        probing = asyncio.create_task(self._probe(client))
        try:
            yield
        finally:
            await event_loop.cancel_until_done(probing)
            await client.close()

    async def _probe(self, client: HttpClient) -> None:
        while True:
            with contextlib.suppress(GpuinferError):  # without an answer of HTTP the heartbeat is late
                response = await client.request("GET", "/health")
                try:
                    health = msgspec.json.decode(response.body[:MOST_BYTES], type=ProbedHealth)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    health = ProbedHealth()  # as that of a foreign server
                if health.server != "gpuinfer":
                    health = ProbedHealth(ready=response.status == 200)
                elif response.status != 200:
                    health = msgspec.structs.replace(health, ready=False)
                before, self.health = self.health, health
                self._heartbeat.answer(stuck=health.stuck)
                self._answered(health)
                if before is not None and before.room != health.room:
                    self._changed()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.checks.interval_s):
                    await self._nudged.wait()
            self._nudged.clear()

    def _answered(self, health: ProbedHealth) -> None:
        """A probe was answered: the member is up, or drains."""
        if health.ready:
            self._become("up")
        elif health.draining and self.state == "up":
            self._become("draining")

    async def _look(self, gone: Callable[[], bool] = lambda: False) -> HeartbeatState | None:
        """The next check of the heartbeat; None: `gone` says that the member is gone."""
        interval_s = self.checks.interval_s
        until = time.monotonic() + interval_s
        while (left := until - time.monotonic()) > 0:
            if gone():
                return None
            await asyncio.sleep(min(left, interval_s / 5, GONE_S))
        return None if gone() else self._heartbeat.look()

    async def _stop(self) -> None:
        """Cancel `run`."""
        await event_loop.cancel_until_done(self._task)
