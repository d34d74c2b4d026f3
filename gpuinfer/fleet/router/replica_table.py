"""The replicas as one router process sees them: who may get requests now, how much each has, and its circuit breaker.
The breaker opens for the replica's own failures alone: connections refused, lost or too slow to come about and
broken framing, each by itself, and the share of answers 500, 502 and 504. Refusals of what the client sent and of
load (429, 503) do not count, nor clients that disconnected.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from gpuinfer.fleet.router.connection_pool import ConnectionPool
from gpuinfer.fleet.router.protocol import FleetMember, RouterConfig
from gpuinfer.fleet.router.shared_counters import NOWHERE, MemberCell, SharedCounters
from gpuinfer.fleet.routing_policies import ReplicaLoad

CLOSED, HALF_OPEN, OPEN = 0, 1, 2


class CircuitBreaker:
    """Closed: requests go there. Open: none until a time has passed. Half-open: one, and what becomes of it decides.

    Times are on any one clock. Methods return whether the state has changed.
    """

    __slots__ = ("_config", "_failures", "_open_s", "_recent", "_wrong", "opens_at", "state", "trying")

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.state = CLOSED
        self.trying = False  # half-open: whether the one request is under way
        self.opens_at = 0.0  # open: when it becomes half-open
        self._failures = 0  # in a row
        self._open_s = config.breaker_open_s
        self._recent: deque[bool] = deque(maxlen=config.breaker_window)
        self._wrong = 0  # of the recent answers

    @property
    def sound(self) -> bool:
        """Nothing has gone wrong lately: an ordinary answer changes nothing."""
        return not (self.state or self._failures or self._wrong)

    def answered(self, status: int, now: float) -> bool:
        """It has answered, with whatever status."""
        self._failures = 0
        wrong = status >= 500 and status != 503
        if self.state == HALF_OPEN:
            return self._close() if not wrong else self._open(now)
        if status not in (429, 503) and (wrong or self._wrong):
            return self._weigh(wrong, now)
        return False

    def failed(self, now: float) -> bool:
        """It has not answered, by a fault of its own."""
        self._failures += 1
        if self.state == OPEN:
            return False
        if self.state == HALF_OPEN or self._failures >= self._config.breaker_failures:
            return self._open(now)
        return False

    def tried(self) -> bool:
        """The one request of a half-open breaker has ended without saying anything about the replica."""
        was, self.trying = self.trying, False
        return was

    def ready(self, now: float) -> bool:
        """Let one request through if it is time."""
        if self.state != OPEN or now < self.opens_at:
            return False
        self.state, self.trying = HALF_OPEN, False
        return True

    def _weigh(self, wrong: bool, now: float) -> bool:
        recent = self._recent
        if len(recent) == recent.maxlen:
            self._wrong -= recent[0]
        recent.append(wrong)
        self._wrong += wrong
        full = len(recent) == recent.maxlen
        return full and self._wrong >= self._config.breaker_share * len(recent) and self._open(now)

    def _open(self, now: float) -> bool:
        self.opens_at = now + self._open_s
        self._open_s = min(2 * self._open_s, self._config.breaker_longest_s)
        self.state, self.trying, self._failures, self._wrong = OPEN, False, 0, 0
        self._recent.clear()
        return True

    def _close(self) -> bool:
        self.state, self.trying = CLOSED, False
        self._open_s = self._config.breaker_open_s
        return True


_REQUESTS = int(MemberCell.REQUESTS)  # arithmetic with members of an enum is slow; IN_FLIGHT is the first
SLOWEST = 0.1  # of its speed, at the beginning of a slow start


class RoutedReplica(ReplicaLoad):
    """One member: its load, its breaker, its connections, and its cells on the board."""

    __slots__ = (
        "_board",
        "_cells",
        "_nowhere",
        "_others",
        "about",
        "away_until",
        "breaker",
        "lines",
        "own",
        "pool",
        "told",
        "warm_at",
    )

    def __init__(
        self,
        about: FleetMember,
        pool: ConnectionPool,
        breaker: CircuitBreaker,
        board: SharedCounters,
        row: int,
        slot: int,
    ) -> None:
        super().__init__(about.id, speed=about.speed)
        self.about, self.pool, self.breaker = about, pool, breaker
        self.own = 0  # requests under way there from this process
        self.told = 0.0  # when its last failure was told
        self.away_until = 0.0  # on the loop's clock: until then it takes nothing new, by its own word; 0: it does
        self.warm_at = 0.0  # wall clock: when its slow start is over
        self._board, self._cells = board.cells, board.member_at(row, slot)
        self._nowhere = board.member_at(row, NOWHERE)
        rows = (other for other in range(board.processes) if other != row)
        self._others = [board.member_at(other, slot) + MemberCell.IN_FLIGHT for other in rows]
        self._cells_set(MemberCell.IN_FLIGHT, 0)
        host = f"[{about.host}]" if ":" in about.host else about.host
        self.lines = f"\r\nHost: {host}:{about.port}".encode()
        if about.key is not None:
            self.lines += f"\r\nAuthorization: Bearer {about.key}".encode()

    def enter(self) -> None:
        """A request has been sent here: it counts from this moment on."""
        self.own += 1
        self.in_flight = self._board[self._cells] = self.own
        self._board[self._cells + _REQUESTS] += 1

    def leave(self) -> None:
        self.own -= 1
        self.in_flight = self._board[self._cells] = self.own

    def look_around(self) -> None:
        """Count what the other processes have under way here."""
        cells = self._board
        self.in_flight = self.own + sum(cells[at] for at in self._others)

    def add(self, cell: MemberCell) -> None:
        self._board[self._cells + cell] += 1

    def show_breaker(self) -> None:
        self._cells_set(MemberCell.BREAKER, self.breaker.state)

    def retire(self) -> None:
        """It is gone, or another has taken its place: what it still has under way counts no more."""
        self._cells_set(MemberCell.IN_FLIGHT, 0)
        self._cells, self._others = self._nowhere, []
        self.pool.close()

    def _cells_set(self, cell: MemberCell, value: int) -> None:
        self._board[self._cells + cell] = value

    @property
    def open_to_requests(self) -> bool:
        breaker = self.breaker
        if self.about.state != "up" or self.away_until:
            return False
        return breaker.state == CLOSED or (breaker.state == HALF_OPEN and not breaker.trying)

    def warm(self, now: float, slow_start_s: float) -> None:
        """`now` is on the wall clock. Its speed rises evenly to what it is said to be."""
        left = (self.warm_at - now) / slow_start_s if slow_start_s > 0 else 0.0
        self.speed = self.about.speed * min(1.0, max(SLOWEST, 1.0 - left))


class ReplicaTable:
    """All of them, kept up to date with the rosters that come."""

    def __init__(
        self,
        config: RouterConfig,
        board: SharedCounters,
        row: int,
        loop: asyncio.AbstractEventLoop,
        on_more: Callable[[], None],
    ) -> None:
        """`on_more` is called when there may be room for a request that found none."""
        self._config, self._board, self._row, self._loop, self._on_more = config, board, row, loop, on_more
        self._all: dict[int, RoutedReplica] = {}
        self._dull: dict[int, RoutedReplica] = {}  # whose breaker is not closed, or whose slow start is not over
        self._named = False  # whether any replica has ever been named
        self.usable: list[RoutedReplica] = []

    def update(self, members: Iterable[tuple[FleetMember, int]]) -> None:
        """Each with its slot on the board."""
        before, self._all = self._all, {}
        for about, slot in members:
            self._all[about.id] = self._kept(before.pop(about.id, None), about, slot)
        for replica in before.values():
            replica.retire()
        self._named = self._named or bool(self._all)
        self.refresh()

    def _kept(self, replica: RoutedReplica | None, about: FleetMember, slot: int) -> RoutedReplica:
        if replica is not None and _same_place(replica.about, about):
            replica.about = about
            replica.speed = about.speed
            return replica
        if replica is not None:
            replica.retire()
        connect = partial(_connect, self._loop, about.host, about.port)
        pool = ConnectionPool(connect, self._config.connect_s, self._loop)
        fresh = RoutedReplica(about, pool, CircuitBreaker(self._config), self._board, self._row, slot)
        fresh.show_breaker()
        if about.since:
            fresh.warm_at = about.since + self._config.slow_start_s
        return fresh

    def refresh(self) -> None:
        """Something about a replica has changed."""
        self.usable = [replica for replica in self._all.values() if replica.open_to_requests]
        now = time.time()
        self._dull = {
            replica.member: replica
            for replica in self._all.values()
            if replica.breaker.state != CLOSED or replica.warm_at > now or replica.away_until
        }
        for replica in self._dull.values():
            replica.warm(now, self._config.slow_start_s)
            replica.show_breaker()
        if self.usable:
            self._on_more()

    def changed(self, replica: RoutedReplica) -> None:
        """Its breaker has another state, or lets another request through."""
        if replica.breaker.state == CLOSED:
            replica.warm_at = time.time() + self._config.slow_start_s
        replica.show_breaker()
        self.refresh()

    def tick(self, now: float) -> None:
        """`now` is on the loop's clock."""
        wall = time.time()
        ready = False
        for replica in self._all.values():
            replica.pool.tick()
        for replica in list(self._dull.values()):
            replica.warm(wall, self._config.slow_start_s)
            ready |= replica.breaker.ready(now)
            if replica.away_until and replica.away_until <= now:
                replica.away_until, ready = 0.0, True
            if replica.breaker.state == CLOSED and not replica.away_until and replica.warm_at <= wall:
                del self._dull[replica.member]
        if ready:
            self.refresh()

    def tidy(self, now: float) -> None:
        for replica in self._all.values():
            replica.pool.tidy(now)

    def hopeful(self) -> bool:
        """Whether some replica may take requests soon: also as long as none has been named, as routers come first."""
        return not self._named or any(replica.about.state in ("starting", "up") for replica in self._all.values())

    def close(self) -> None:
        for replica in self._all.values():
            replica.pool.close()


def _same_place(one: FleetMember, other: FleetMember) -> bool:
    return (one.host, one.port, one.key, one.since) == (other.host, other.port, other.key, other.since)


async def _connect(
    loop: asyncio.AbstractEventLoop, host: str, port: int, protocol: Callable[[], asyncio.Protocol]
) -> object:
    return await loop.create_connection(protocol, host, port)
