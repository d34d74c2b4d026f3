"""Where a node's workload takes units and gives their records: what the coordinator has leased to this node."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuinfer.division import Interval, RangeFeed, WorkRange, intervals_of

WAITING_RANGES = 8  # of finished ranges that wait to be sent, before `room` waits


@dataclass(eq=False)
class LeasedRange:
    """A range that this node has. Units before `taken` are the workload's; released units lower `stop`."""

    work: WorkRange
    taken: int
    stop: int
    records: dict[int, Any] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.records) == self.stop - self.work.start


@dataclass(frozen=True, slots=True)
class FinishedRange:
    """Units that are done, and their records in order."""

    work: WorkRange
    records: Sequence[Any]


class NodeFeed(RangeFeed):
    """`low` is called when few units are left here and none has been promised."""

    def __init__(self, low: Callable[[], None] = lambda: None, asynchronous: bool = False) -> None:
        """`asynchronous`: units of a new version are taken while some of the version before are under way."""
        self.done_units = 0
        self.starved_s = 0.0  # the workload waited for units and none was left here, by the share of its places for
        # units that were empty meanwhile
        self.room_s = 0.0  # it waited since too many records were to be sent
        self.finished: deque[FinishedRange] = deque()  # to be sent
        self._low, self._asynchronous = low, asynchronous
        self._leases: list[LeasedRange] = []  # those that are not sent, as they came
        self._over = False
        self._waiters: list[asyncio.Future[None]] = []
        self._waiting_for = 0  # units, by all that wait in `take`
        self._idle_since: float | None = None
        self._empty_s = self._counted_at = 0.0  # of `starved_s`, the present wait's, as counted up to then
        self._sending = 0  # finished ranges that are on their way
        self._under_way = 0  # units that were taken and are not done
        self._most_under_way = 1
        self._version = ""
        self.use_version: Callable[[str], Awaitable[None]] | None = None
        """Called before the first unit of another version is taken, with none under way."""
        self._changing = False  # the version

    # The workload's side

    async def take(self, most: int) -> WorkRange | None:
        while (lease := self._next()) is None or lease.work.version != self._version:
            if lease is not None:
                await self._change_version(lease.work.version)
            elif self._over:
                return None
            else:
                await self._wait_for_units(most)
        start, stop = lease.taken, min(lease.stop, lease.taken + max(1, most))
        lease.taken = stop
        self._count_empty()
        self._under_way += stop - start
        self._most_under_way = max(self._most_under_way, self._under_way)
        if not self.on_hand:
            self._low()
        return lease.work.part(start, stop)

    async def _change_version(self, version: str) -> None:
        self._changing = True
        try:
            if self.use_version is not None:
                await self.use_version(version)
            self._version = version
        finally:
            self._changing = False
            self._wake()

    async def _wait_for_units(self, most: int) -> None:
        """Until something has changed; counts the time in which there are none here."""
        if not self.on_hand and not self._waiting_for:
            self._idle_since = self._counted_at = time.monotonic()
            self._empty_s = 0.0
            self._low()
        self._waiting_for += most
        try:
            await self.change()
        finally:
            self._waiting_for -= most
            if self._idle_since is not None and (self.on_hand or self._over):
                self.starved_s += self.empty_s
                self._idle_since = None

    @property
    def idle_s(self) -> float:
        """For how long the workload has waited for units, since it has had some; 0 where it does not wait."""
        return 0.0 if self._idle_since is None or not self.done_units else time.monotonic() - self._idle_since

    @property
    def empty_s(self) -> float:
        """Of `idle_s`, by the share of the places for units that were empty: some may be under way still."""
        self._count_empty()
        return self._empty_s if self.idle_s else 0.0

    def _count_empty(self) -> None:
        """Before the number of units under way changes."""
        if self._idle_since is not None:
            now = time.monotonic()
            self._empty_s += (now - self._counted_at) * (1 - self._under_way / self._most_under_way)
            self._counted_at = now

    def _next(self) -> LeasedRange | None:
        """The lease of which units may be taken now."""
        if self._changing:
            return None
        lease = next((one for one in self._leases if one.taken < one.stop), None)
        if lease is None or self._asynchronous or not self._under_way or lease.work.version == self._version:
            return lease
        return None

    def done(self, number: int, record: Any) -> None:
        lease = next((one for one in self._leases if one.work.start <= number < one.taken), None)
        if lease is None or number in lease.records:
            raise ValueError(f"unit {number} was not taken, or is done already")
        lease.records[number] = record
        self._count_empty()
        self.done_units += 1
        self._under_way -= 1
        if lease.complete:
            self._finish(lease)
        if not self._under_way and not self._asynchronous:
            self._wake()

    async def room(self) -> None:
        since = time.monotonic()
        while len(self.finished) > WAITING_RANGES:
            await self.change()
        self.room_s += time.monotonic() - since

    # The node's side

    @property
    def on_hand(self) -> int:
        """Units that are not taken."""
        return sum(one.stop - one.taken for one in self._leases)

    @property
    def parallel(self) -> int:
        """Units that the workload works on at once: the most that were under way, and those that it waits for."""
        return max(self._most_under_way, self._under_way + self._waiting_for)

    @property
    def unfinished(self) -> bool:
        """Whether there are units here that are not done."""
        return bool(self._leases)

    def add(self, ranges: Iterable[WorkRange]) -> None:
        """Units that the coordinator has leased to this node."""
        self._leases += [LeasedRange(work, work.start, work.stop) for work in ranges]
        self._wake()

    def release(self, units: int) -> list[Interval]:
        """Give up so many units that are not taken, the last ones first; which these are."""
        released = list[Interval]()
        for lease in reversed(list(self._leases)):
            if (count := min(units, lease.stop - lease.taken)) > 0:
                released.append((lease.stop - count, lease.stop))
                lease.stop -= count
                units -= count
                if lease.stop == lease.work.start:
                    self._leases.remove(lease)
                elif lease.complete:
                    self._finish(lease)
        return released

    def end(self) -> None:
        """No more units: `take` returns None once what is here is taken."""
        self._over = True
        self._wake()

    def give_up(self) -> None:
        """As `end`, and what is not taken is not taken any more."""
        for lease in self._leases:
            lease.stop = lease.taken
        self._leases = [one for one in self._leases if one.stop > one.work.start]
        for lease in [one for one in self._leases if one.complete]:
            self._finish(lease)
        self.end()

    def split_off_done(self) -> None:
        """Have what is done of unfinished ranges sent: the workload has ended and finishes none."""
        for lease in self._leases:
            for start, stop in intervals_of(lease.records):
                records = [lease.records[number] for number in range(start, stop)]
                self.finished.append(FinishedRange(lease.work.part(start, stop), records))
        self._leases.clear()
        self._wake()

    async def next_finished(self) -> FinishedRange:
        """The next range to be sent, once there is one. `sent` is to be called for each."""
        while not self.finished:
            await self.change()
        self._sending += 1
        return self.finished.popleft()

    def send_again(self, finished: FinishedRange, parts: Iterable[Interval]) -> None:
        """Of a range that did not count as a whole, these units alone."""
        work = finished.work
        for start, stop in parts:
            records = finished.records[start - work.start : stop - work.start]
            self.finished.append(FinishedRange(work.part(start, stop), records))

    def sent(self) -> None:
        """The records of a finished range have reached the coordinator."""
        self._sending -= 1
        self._wake()

    @property
    def all_sent(self) -> bool:
        """Whether nothing that is finished waits or is on its way."""
        return not self.finished and not self._sending

    def _finish(self, lease: LeasedRange) -> None:
        self._leases.remove(lease)
        work = lease.work.part(lease.work.start, lease.stop)
        self.finished.append(FinishedRange(work, [lease.records[number] for number in range(work.start, work.stop)]))
        self._wake()

    def _wake(self) -> None:
        self._waiters, waiting = [], self._waiters
        for one in waiting:
            if not one.done():
                one.set_result(None)

    async def change(self) -> None:
        """Wait until something has changed here."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiters.append(waiting)
        await waiting
