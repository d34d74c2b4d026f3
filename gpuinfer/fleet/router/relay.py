"""Where requests go: the decisions of one router process, with its retry budget and one timer for all connections.

Retries are a share of all requests, so that they never flood the replicas. The timer looks at each connection once in a
while, which knows itself whether it is late.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from gpuinfer.fleet.router.connection_pool import ConnectionPool
from gpuinfer.fleet.router.event_stream import ByteBudget
from gpuinfer.fleet.router.http_message import affinity_of
from gpuinfer.fleet.router.protocol import RouterConfig
from gpuinfer.fleet.router.proxied_request import ProxiedRequest
from gpuinfer.fleet.router.replica_table import HALF_OPEN, ReplicaTable, RoutedReplica
from gpuinfer.fleet.router.shared_counters import MemberCell, ProcessCell, SharedCounters
from gpuinfer.fleet.routing_policies import RoutedRequest, make_policy
from gpuinfer.http.network import DisconnectWatcher

TICK_S = 0.125
SLOTS = 8  # each thing is looked at once in SLOTS ticks


class Tickable(Protocol):
    def look(self, now: float) -> None:
        """It is `now`: end what has taken too long."""


class TickTimer:
    """`now` is `time.monotonic()` at the last tick: near enough for limits of seconds, and free."""

    def __init__(self, loop: asyncio.AbstractEventLoop, every_tick: Callable[[float], None]) -> None:
        self._loop, self._every_tick = loop, every_tick
        self._slots: list[set[Tickable]] = [set() for _ in range(SLOTS)]
        self._at = self._next = 0
        self._timer: asyncio.TimerHandle | None = None
        self.now = time.monotonic()

    def start(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def add(self, thing: Tickable) -> int:
        """Returns what `remove` takes."""
        self._next = (self._next + 1) % SLOTS
        self._slots[self._next].add(thing)
        return self._next

    def remove(self, thing: Tickable, slot: int) -> None:
        self._slots[slot].discard(thing)

    def everything(self) -> list[Tickable]:
        return [thing for slot in self._slots for thing in slot]

    def _tick(self) -> None:
        self.start()
        self.now = time.monotonic()
        self._every_tick(self.now)
        self._at = (self._at + 1) % SLOTS
        for thing in list(self._slots[self._at]):
            thing.look(self.now)


AT_FIRST, AT_MOST = 5.0, 100.0


class RetryBudget:
    """Each request earns a share of a retry, and each retry costs one."""

    __slots__ = ("_left", "_share")

    def __init__(self, share: float) -> None:
        self._share = share
        self._left = AT_FIRST if share > 0 else 0.0

    def earn(self) -> None:
        if self._left < AT_MOST:
            self._left += self._share

    def spend(self) -> bool:
        """Whether there is one."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


LOSSES = 5  # replicas that one request may lose while it is under way: it could be what they die of
WAITING = 4096  # requests that wait for a replica at a time
AWAY_S = 2.0  # for the roster to say of a replica that it drains
TOLD_S = 0.1  # between two failures of one member that its owner is told
TIDY_S = 5.0  # between two looks for links that nobody needs
ANY = RoutedRequest()


class Relay:
    """Chooses replicas for trips, sends them on when one fails, lets them wait when there is none for now."""

    def __init__(
        self,
        config: RouterConfig,
        board: SharedCounters,
        row: int,
        loop: asyncio.AbstractEventLoop,
        tell: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.config = config
        self.closing = False
        self.whole_bytes = config.whole_bytes
        self.clock = time.monotonic
        self.now, self.wall = time.monotonic(), time.time()  # at the last tick
        self.kept_bytes = config.kept_bytes
        self.room = ByteBudget(config.bodies_bytes)
        self.wheel = TickTimer(loop, self._tick)
        self.departures = DisconnectWatcher(loop)
        self.members = ReplicaTable(config, board, row, loop, self._wake)
        self.control = ConnectionPool(partial(_connect_unix, loop, config.control), config.connect_s, loop)
        self.trips = 0  # under way
        self._loop, self._tell = loop, tell
        self._shared = board.processes > 1
        self._policy = make_policy(config.policy, random.Random(), **config.policy_options)
        self._budget = RetryBudget(config.retry_budget)
        self._waiting: deque[ProxiedRequest] = deque()
        self._cells, self._totals = board.cells, board.total_at(row, ProcessCell.CONNECTIONS)
        self._requests = self._totals + int(ProcessCell.REQUESTS)
        self._woken = False
        self._tidy_at = self.now + TIDY_S

    def count(self, total: ProcessCell, by: int = 1) -> None:
        self._cells[self._totals + total] += by

    # Trips that come and go

    def send(self, trip: ProxiedRequest) -> None:
        """Take a new trip for a replica."""
        self.trips += 1
        self._cells[self._requests] += 1
        self._budget.earn()
        self._choose(trip)

    def send_to_control(self, trip: ProxiedRequest) -> None:
        """Take a new trip for the control application."""
        self.trips += 1
        trip.go(self.control)

    def over(self, trip: ProxiedRequest) -> None:
        self.trips -= 1
        self._leave(trip)

    def broken_off(self) -> None:
        self.count(ProcessCell.BROKEN_OFF)

    def _leave(self, trip: ProxiedRequest) -> None:
        replica, trip.replica = trip.replica, None
        if replica is None:
            return
        replica.leave()
        if replica.breaker.state == HALF_OPEN and trip.tries and replica.breaker.tried():
            self.members.changed(replica)

    # Where to

    def place(self, trip: ProxiedRequest) -> None:
        """Send a trip to a replica, or let it wait for one, or give it up."""
        self._leave(trip)
        self._choose(trip)

    def _choose(self, trip: ProxiedRequest) -> None:
        usable = self.members.usable
        loads = [one for one in usable if one.member not in trip.tried] if trip.tried else usable
        if not loads or trip.attempt >= self.config.attempts or trip.losses >= LOSSES:
            self._wait_or_give_up(trip)
            return
        if self._shared:
            for one in loads:
                one.look_around()
        asking = RoutedRequest(1.0, affinity_of(trip.asked, trip.body)) if self._policy.needs_affinity else ANY
        load, trip.why = self._policy.choose(loads, asking)
        if isinstance(load, RoutedReplica):
            self._enter(trip, load)

    def _enter(self, trip: ProxiedRequest, replica: RoutedReplica) -> None:
        trip.replica = replica
        trip.attempt += 1
        replica.enter()
        trip.tries = replica.breaker.state == HALF_OPEN
        if trip.tries:
            replica.breaker.trying = True
            self.members.refresh()
        trip.go(replica.pool)

    def _wait_or_give_up(self, trip: ProxiedRequest) -> None:
        if trip.losses >= LOSSES or trip.attempt >= self.config.attempts:
            trip.give_up(502, f"{trip.attempt} replicas failed while they had this request. Try it by itself.")
        elif self.closing or len(self._waiting) >= WAITING or not self._hopeful(trip):
            self.count(ProcessCell.UNROUTED)
            trip.give_up(503, "no replica is up. Try again.", retry_s=2)
        else:
            self._waiting.append(trip)
            trip.waits = True

    def _hopeful(self, trip: ProxiedRequest) -> bool:
        return self.members.hopeful() and self.clock() - trip.started < self.config.wait_s

    def _wake(self) -> None:
        """Some replica may take requests now."""
        if self._waiting and not self._woken:
            self._woken = True
            self._loop.call_soon(self._place_waiting)

    def _place_waiting(self) -> None:
        self._woken = False
        waiting, self._waiting = self._waiting, deque()
        for trip in waiting:
            if trip.waits:
                trip.waits = False
                trip.tried = ()
                self.place(trip)

    # What replicas do

    def answered(self, trip: ProxiedRequest, status: int) -> None:
        replica = trip.replica
        if replica is None:
            return
        breaker = replica.breaker
        if status < 500 and breaker.sound:
            return
        if status >= 500 and status != 503:
            replica.add(MemberCell.ERRORS)
        if breaker.state == HALF_OPEN:
            trip.tries = False
        if breaker.answered(status, self.clock()):
            self.members.changed(replica)

    def may_try_again(self, trip: ProxiedRequest, status: int) -> bool:
        """Whether an answer that says to try again is not its client's answer yet, but sends the trip elsewhere."""
        replica = trip.replica
        if replica is None or self.closing or trip.attempt >= self.config.attempts or (status == 429 and trip.retried):
            return False
        tried = (*trip.tried, replica.member)
        others = [one for one in self.members.usable if one.member not in tried]
        if status == 429:
            others = [one for one in others if one.in_flight / one.speed < replica.in_flight / replica.speed]
        if not others or not self._budget.spend():
            return False
        trip.tried = tried
        trip.retried += f"; retried={status}"
        replica.add(MemberCell.RETRIED)
        return True

    def sent_away(self, trip: ProxiedRequest) -> None:
        """By a replica that takes nothing new. It is no failure, costs nothing of the budget, and nobody else is sent
        there: one that refuses at once would look like the least loaded of all.
        """
        replica = trip.replica
        if replica is None:
            return
        replica.add(MemberCell.RETRIED)
        trip.tried = (*trip.tried, replica.member)
        trip.tries = False
        if not replica.away_until:
            replica.away_until = self.clock() + AWAY_S
            self._tell({"event": "failed", "member": replica.member, "kind": "draining"})
            self.members.refresh()

    def failed(self, trip: ProxiedRequest, kind: str) -> None:
        replica = trip.replica
        if replica is None:
            return
        replica.add(MemberCell.ERRORS)
        replica.add(MemberCell.RESUMED if trip.resumes else MemberCell.RETRIED)
        trip.tried = (*trip.tried, replica.member)
        if kind in ("reset", "broken"):
            trip.losses += 1
        now = self.clock()
        if now - replica.told > TOLD_S:
            replica.told = now
            self._tell({"event": "failed", "member": replica.member, "kind": kind})
        trip.tries = False
        if replica.breaker.failed(now):
            self.members.changed(replica)

    # Time

    def _tick(self, now: float) -> None:
        self.now, self.wall = now, time.time()
        self.members.tick(now)
        if now > self._tidy_at:
            self._tidy_at = now + TIDY_S
            self.members.tidy(now)
            self.control.tidy(now)
        if self._waiting:
            self._place_waiting()

    def close(self) -> None:
        self.wheel.stop()
        self.departures.close()
        self.members.close()
        self.control.close()


async def _connect_unix(loop: asyncio.AbstractEventLoop, path: str, protocol: Callable[[], asyncio.Protocol]) -> object:
    return await loop.create_unix_connection(protocol, path)
