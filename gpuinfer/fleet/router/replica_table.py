"""The replicas as one router process sees them: who may get requests now, how much each has, and its circuit breaker.
The breaker opens for the replica's own failures alone: connections refused, lost or too slow to come about and
broken framing, each by itself, and the share of answers 500, 502 and 504. Refusals of what the client sent and of
load (429, 503) do not count, nor clients that disconnected.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from gpuinfer.api import ReplicaLoad
from gpuinfer.fleet.router.connection_pool import ConnectionPool
from gpuinfer.fleet.router.protocol import FleetMember, RouterConfig
from gpuinfer.fleet.router.shared_counters import NOWHERE, MemberCell, SharedCounters

CLOSED, HALF_OPEN, OPEN = 0, 1, 2


class CircuitBreaker:
    """Closed: requests go there. Open: none until a time has passed. Half-open: one, and what becomes of it decides.

    Times are on any one clock. Methods return whether the state has changed.
    """

    __slots__ = ("_config", "_failures", "_open_s", "_recent", "_wrong", "opens_at", "probing", "state")

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.state = CLOSED
        self.probing = False  # half-open: whether the one request is under way
        self.opens_at = 0.0  # open: when it becomes half-open
        self._failures = 0  # in a row
        self._open_s = config.breaker_open_s
        self._recent: deque[bool] = deque(maxlen=config.breaker_window)
        self._wrong = 0  # of the recent answers

    @property
    def healthy(self) -> bool:
        """Whether nothing has gone wrong lately, so that an ordinary answer changes nothing."""
        return not (self.state or self._failures or self._wrong)

    def answered(self, status: int, now: float) -> bool:
        """Record an answer's status."""
        self._failures = 0
        wrong = status >= 500 and status != 503
        if self.state == HALF_OPEN:
            if wrong:
                return self._open(now)
            self.state, self.probing, self._open_s = CLOSED, False, self._config.breaker_open_s
            return True
        if status in (429, 503) or not (wrong or self._wrong):
            return False
        recent = self._recent
        if len(recent) == recent.maxlen:
            self._wrong -= recent[0]
        recent.append(wrong)
        self._wrong += wrong
        full = len(recent) == recent.maxlen
        return full and self._wrong >= self._config.breaker_share * len(recent) and self._open(now)

    def failed(self, now: float) -> bool:
        """Record a failure of the replica's own: it has not answered."""
        self._failures += 1
        if self.state == OPEN:
            return False
        if self.state == HALF_OPEN or self._failures >= self._config.breaker_failures:
            return self._open(now)
        return False

    def ready(self, now: float) -> bool:
        """Let one request through once the breaker has been open for long enough. Whether it does."""
        if self.state != OPEN or now < self.opens_at:
            return False
        self.state, self.probing = HALF_OPEN, False
        return True

    def _open(self, now: float) -> bool:
        self.opens_at = now + self._open_s
        self._open_s = min(2 * self._open_s, self._config.breaker_longest_s)
        self.state, self.probing, self._failures, self._wrong = OPEN, False, 0, 0
        self._recent.clear()
        return True


_REQUESTS = int(MemberCell.REQUESTS)  # arithmetic with members of an enum is slow; IN_FLIGHT is the first
UNKNOWN_ROOM = 16  # requests under way at a replica that does not say how many rows it computes at once
SLOWEST = 0.1  # of its speed, at the beginning of a slow start


class RoutedReplica(ReplicaLoad):
    """One member: its load, its breaker, its connections, and its cells on the counters."""

    __slots__ = (
        "_cells",
        "_counters",
        "_nowhere",
        "_others",
        "breaker",
        "draining_until",
        "fleet_member",
        "lines",
        "own",
        "pool",
        "reported_at",
        "warm_at",
    )

    def __init__(
        self,
        member: FleetMember,
        pool: ConnectionPool,
        breaker: CircuitBreaker,
        counters: SharedCounters,
        row: int,
        slot: int,
    ) -> None:
        super().__init__(member.id, speed=member.speed)
        self.fleet_member, self.pool, self.breaker = member, pool, breaker
        self.own = 0  # requests under way there from this process
        self.reported_at = 0.0  # when its last failure was reported
        self.draining_until = 0.0  # on the loop's clock: it drains, and gets no request before; 0: it does not
        self.warm_at = 0.0  # wall clock: when its slow start is over
        self._counters, self._cells = counters.cells, counters.member_at(row, slot)
        self._nowhere = counters.member_at(row, NOWHERE)
        rows = (other for other in range(counters.processes) if other != row)
        self._others = [counters.member_at(other, slot) + MemberCell.IN_FLIGHT for other in rows]
        self._counters[self._cells + MemberCell.IN_FLIGHT] = 0
        host = f"[{member.host}]" if ":" in member.host else member.host
        self.lines = f"\r\nHost: {host}:{member.port}".encode()
        if member.key is not None:
            self.lines += f"\r\nAuthorization: Bearer {member.key}".encode()

    def enter(self) -> None:
        """Count a request that is sent here."""
        self.own += 1
        self.in_flight = self._counters[self._cells] = self.own
        self._counters[self._cells + _REQUESTS] += 1

    def enter_within_room(self) -> bool:
        """As `enter`, unless there is no room: other processes may have sent something meanwhile. Each counts itself in
        before it checks, so that of two that want the last place at most one gets it.
        """
        self.own += 1
        self._counters[self._cells] = self.own
        self.count_others()
        if self.in_flight > self.room:
            self.leave()
            return False
        self._counters[self._cells + _REQUESTS] += 1
        return True

    def leave(self) -> None:
        """A request is over."""
        self.own -= 1
        self.in_flight = self._counters[self._cells] = self.own

    def count_others(self) -> None:
        """Add what the other processes have under way here."""
        cells = self._counters
        self.in_flight = self.own + sum(cells[at] for at in self._others)

    def add(self, cell: MemberCell) -> None:
        self._counters[self._cells + cell] += 1

    def show_breaker(self) -> None:
        self._counters[self._cells + MemberCell.BREAKER] = self.breaker.state

    def retire(self) -> None:
        """Close the replica, which has left or was replaced: what it still has under way counts no more."""
        self._counters[self._cells + MemberCell.IN_FLIGHT] = 0
        self._cells, self._others = self._nowhere, []
        self.pool.close()

    @property
    def open_to_requests(self) -> bool:
        breaker = self.breaker
        if self.fleet_member.state != "up" or self.draining_until:
            return False
        return breaker.state == CLOSED or (breaker.state == HALF_OPEN and not breaker.probing)

    def warm(self, now: float, slow_start_s: float) -> None:
        """Set the speed, which rises evenly during a slow start; `now` is on the wall clock."""
        left = (self.warm_at - now) / slow_start_s if slow_start_s > 0 else 0.0
        self.speed = self.fleet_member.speed * min(1.0, max(SLOWEST, 1.0 - left))


class ReplicaTable:
    """The replicas of the latest roster."""

    def __init__(
        self,
        config: RouterConfig,
        counters: SharedCounters,
        row: int,
        loop: asyncio.AbstractEventLoop,
        on_more: Callable[[], None],
    ) -> None:
        """`on_more` is called when there may be room for a request that found none."""
        self._config, self._counters, self._row, self._loop, self._on_more = config, counters, row, loop, on_more
        self._all: dict[int, RoutedReplica] = {}
        self._changing: dict[int, RoutedReplica] = {}  # breaker not closed, draining, or in slow start
        self._ever_named = False  # whether any replica has ever been named
        self.usable: tuple[RoutedReplica, ...] = ()  # no list: policies see it, and may not change it

    def update(self, members: Iterable[tuple[FleetMember, int]]) -> None:
        """Each with its slot on the counters."""
        before, self._all = self._all, {}
        for member, slot in members:
            replica = before.pop(member.id, None)
            if replica is not None:
                old = replica.fleet_member
                if (old.host, old.port, old.key, old.since) != (member.host, member.port, member.key, member.since):
                    replica.retire()
                    replica = None
            if replica is None:
                connect = partial(self._loop.create_connection, host=member.host, port=member.port)
                pool = ConnectionPool(connect, self._config.connect_s, self._loop)
                replica = RoutedReplica(member, pool, CircuitBreaker(self._config), self._counters, self._row, slot)
                replica.show_breaker()
                if member.since:
                    replica.warm_at = member.since + self._config.slow_start_s
            replica.fleet_member, replica.speed = member, member.speed
            replica.room = self._room_of(member)
            self._all[member.id] = replica
        for replica in before.values():
            replica.retire()
        self._ever_named = self._ever_named or bool(self._all)
        self.refresh()

    def _room_of(self, member: FleetMember) -> float:
        """Requests that it may have under way in total."""
        if self._config.max_inputs is not None:
            return self._config.max_inputs
        return (member.room or UNKNOWN_ROOM) if self._config.queue == "global" else math.inf

    def refresh(self) -> None:
        """Find anew which replicas take requests."""
        self.usable = tuple(replica for replica in self._all.values() if replica.open_to_requests)
        now = time.time()
        self._changing = {
            replica.member: replica
            for replica in self._all.values()
            if replica.breaker.state != CLOSED or replica.warm_at > now or replica.draining_until
        }
        for replica in self._changing.values():
            replica.warm(now, self._config.slow_start_s)
            replica.show_breaker()
        if self.usable:
            self._on_more()

    def changed(self, replica: RoutedReplica) -> None:
        """The state of its breaker has changed, or the breaker lets another request through."""
        if replica.breaker.state == CLOSED:
            replica.warm_at = time.time() + self._config.slow_start_s
        replica.show_breaker()
        self.refresh()

    def tick(self, now: float) -> None:
        """Called at each tick; `now` is on the loop's clock."""
        wall = time.time()
        ready = False
        for replica in self._all.values():
            replica.pool.tick()
        for replica in list(self._changing.values()):
            replica.warm(wall, self._config.slow_start_s)
            ready |= replica.breaker.ready(now)
            if replica.draining_until and replica.draining_until <= now:
                replica.draining_until, ready = 0.0, True
            if replica.breaker.state == CLOSED and not replica.draining_until and replica.warm_at <= wall:
                del self._changing[replica.member]
        if ready:
            self.refresh()

    def tidy(self, now: float) -> None:
        """Close connections that have been idle for long."""
        for replica in self._all.values():
            replica.pool.tidy(now)

    def any_expected(self) -> bool:
        """Whether some replica may take requests soon: also before the first roster, as routers start first."""
        return not self._ever_named or any(
            replica.fleet_member.state in ("starting", "up") for replica in self._all.values()
        )

    def close(self) -> None:
        for replica in self._all.values():
            replica.pool.close()
