"""A node of a divided run on a virtual clock: a pipeline of so many units a second, each of which takes as long as
`parallel` of them. No event for a unit: what is begun and done at a time follows from when each range began.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuinfer.division import Interval, WorkRange

ROUNDING = 1e-6  # of a unit


@dataclass(slots=True)
class SimulatedLease:
    """A range, and when its first unit begins, on the node's own clock."""

    start: int
    stop: int
    begins: float


class SimulatedNode:
    """Times are the simulation's; while the node is `stopped`, its own clock stands still."""

    def __init__(self, number: int, rate: float, parallel: int, now: float) -> None:
        self.number, self.rate, self.parallel = number, rate, parallel
        self.joined = now
        self.leases: list[SimulatedLease] = []
        self.finished_units = 0  # of leases that are through
        self.alive = True
        self.stopped = False  # its workload makes no progress
        self._stopped_at = 0.0
        self._offset = 0.0  # of its clock
        self._next_begin = 0.0

    def clock(self, now: float) -> float:
        return (self._stopped_at if self.stopped else now) - self._offset

    def stop(self, now: float) -> None:
        if not self.stopped:
            self.stopped, self._stopped_at = True, now

    def go_on(self, now: float) -> None:
        if self.stopped:
            self._offset += now - self._stopped_at
            self.stopped = False

    def add(self, work: WorkRange, now: float) -> None:
        begins = max(self.clock(now), self._next_begin)
        self.leases.append(SimulatedLease(work.start, work.stop, begins))
        self._next_begin = begins + len(work) / self.rate

    def begun(self, lease: SimulatedLease, now: float) -> int:
        return self._through(lease, self.clock(now) - lease.begins)

    def done(self, now: float) -> int:
        """Units finished since it joined."""
        at = self.clock(now) - self.parallel / self.rate
        return self.finished_units + sum(self._through(one, at - one.begins) for one in self.leases)

    def _through(self, lease: SimulatedLease, seconds: float) -> int:
        if seconds < 0:
            return 0
        return min(lease.stop - lease.start, int(seconds * self.rate + ROUNDING) + 1)

    def on_hand(self, now: float) -> int:
        return sum(one.stop - one.start - self.begun(one, now) for one in self.leases)

    def dry_in(self, now: float) -> float:
        """Seconds until it has begun all that it holds."""
        return max(0.0, self._next_begin - self.clock(now))

    @property
    def busy_until(self) -> float:
        """When it finishes all that is leased to it, if nothing stops it."""
        return self._next_begin + self.parallel / self.rate + self._offset

    def release(self, units: int, now: float) -> list[Interval]:
        """Give up so many units that are not begun, the last ones first; which these are."""
        released = list[Interval]()
        while units > 0 and self.leases:
            lease = self.leases[-1]
            count = min(units, lease.stop - lease.start - self.begun(lease, now))
            if count <= 0:
                break
            released.append((lease.stop - count, lease.stop))
            lease.stop -= count
            units -= count
            if lease.stop > lease.start:
                break
            self.leases.pop()
        if released:
            last = self.leases[-1] if self.leases else None
            self._next_begin = 0.0 if last is None else last.begins + (last.stop - last.start) / self.rate
        return released

    def next_finish(self, now: float) -> float | None:
        """When its first range is done, if nothing stops it. None: it has none, or is stopped."""
        if not self.leases or self.stopped:
            return None
        lease = self.leases[0]
        last_begins = lease.begins + (lease.stop - lease.start - 1) / self.rate
        return max(now, last_begins + self.parallel / self.rate + self._offset)

    def finish(self, now: float) -> list[Interval]:
        """The ranges that are done by now. Others compute what is released: the node forgets them."""
        found = list[Interval]()
        while (at := self.next_finish(now)) is not None and at <= now + ROUNDING / self.rate:
            lease = self.leases.pop(0)
            self.finished_units += lease.stop - lease.start
            found.append((lease.start, lease.stop))
        return found
