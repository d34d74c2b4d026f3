"""What the coordinator knows of a node: what it holds, how fast it works, when it last made progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp
from typing import Literal

from gpuinfer.cluster.ledger import RangeSet
from gpuinfer.division import WorkRange

MEMORY_S = 30.0  # a rate forgets what is so much older
EVIDENCE_UNITS = 10.0  # but keeps as much as so many units say
GAP_MEMORY = 0.95  # of the longest time between two units, with each time that is shorter

Presence = Literal["here", "left", "lost", "hung"]


class Rate:
    """Units a second, of which older ones weigh less: an exponentially weighted mean over time (by units over seconds,
    so that unequal intervals count as long as they are), which remembers ten units at least.
    """

    __slots__ = ("_seconds", "_units")

    def __init__(self) -> None:
        self._units = self._seconds = 0.0

    def observe(self, units: int, seconds: float) -> None:
        keep = exp(-seconds / MEMORY_S)
        if self._units * keep + units < EVIDENCE_UNITS:
            keep = min(1.0, max(keep, (EVIDENCE_UNITS - units) / self._units)) if self._units else 1.0
        self._units = self._units * keep + units
        self._seconds = self._seconds * keep + seconds

    @property
    def per_s(self) -> float:
        """0 as long as there has been no unit."""
        return self._units / self._seconds if self._seconds else 0.0


@dataclass(slots=True)
class Lease:
    """A range as it was leased, until all of it is kept or released: for the mean seconds a range."""

    start: int
    stop: int
    at: float
    left: int


@dataclass(slots=True)
class NodeState:
    number: int
    name: str
    parallel: int  # units that it works on at once
    joined: float
    heard_at: float
    progress_at: float  # when it last finished a unit, sent records, or got work after it had none
    presence: Presence = "here"
    rate: Rate = field(default_factory=Rate)
    longest_gap_s: float = 0.0  # between two units that were finished
    unit_s: float = 0.0  # that a unit takes, by Little's law, or between two if that is longer; as of the last one
    done: int = 0  # units finished, as it says
    on_hand: int = 0  # units that it has not begun, by its last exchange, and those leased since
    leased: int = 0  # units leased to it, less those that it released
    reading: int = 0  # units that the driver reads for it
    to_release: int = 0  # units that it should give back, for the reply to its next exchange
    releasing: int = 0  # in a reply, and not answered yet
    busy: bool = False  # had work at some time since it was heard of
    starved: bool = False  # wanted more, and there was nothing
    holds: RangeSet = field(default_factory=RangeSet)
    leases: list[Lease] = field(default_factory=list)
    kept: int = 0  # units of which it brought the records
    ranges: int = 0  # leases that are through
    range_s: float = 0.0  # seconds of those together
    taken_ranges: int = 0  # ranges leased to others, because it was slow or lost, or had too many
    duplicates: int = 0  # units of which it brought records when there were some already
    answering_at: float = float("-inf")  # when the coordinator last had a message of it to answer

    @property
    def silent_since(self) -> float:
        """It is not silent as long as it waits for an answer."""
        return max(self.heard_at, self.answering_at)

    @property
    def ready(self) -> int:
        """Units that it has not begun and is not to give back."""
        return max(0, self.on_hand - self.to_release - self.releasing)

    @property
    def unfinished(self) -> int:
        """Units leased to it that it has not finished, begun or not."""
        return max(0, self.leased - self.done)

    @property
    def under_way(self) -> int:
        """Units that it has begun and not finished; and those of which it has never heard, if a reply was lost."""
        return max(0, self.leased - self.done - self.on_hand)

    def observe(self, now: float, done: int, on_hand: int) -> None:
        """What it says of itself. Its rate is measured while there is enough work for it: not at the end, and not
        before it has begun its first unit, while it loads a model.
        """
        gained = max(0, done - self.done)
        begun = gained or self.leased > self.on_hand
        if self.busy and begun and not (self.starved and self.rate.per_s):
            self.rate.observe(gained, max(0.0, now - self.heard_at))
        self.busy = bool(self.holds)
        if gained:
            self.longest_gap_s = max(now - self.progress_at, self.longest_gap_s * GAP_MEMORY)
            per_s = self.rate.per_s
            self.unit_s = max(self.longest_gap_s, self.parallel / per_s if per_s else 0.0)
        if gained or not self.holds:
            self.progress_at = now
        self.heard_at, self.done, self.on_hand, self.releasing = now, max(done, self.done), on_hand, 0

    def hold(self, work: WorkRange, now: float) -> None:
        """It is leased this range."""
        if not self.holds:
            self.progress_at = now
        self.holds.add(work)
        self.leases.append(Lease(work.start, work.stop, now, len(work)))
        self.leased += len(work)
        self.on_hand += len(work)
        self.busy, self.starved = True, False

    def cut(self, start: int, stop: int, now: float | None = None) -> list[WorkRange]:
        """It holds these units no more: what it had held of them. `now`: they are kept, and leases may be through."""
        found = self.holds.cut(start, stop)
        for work in found:
            for lease in self.leases:
                lease.left -= max(0, min(lease.stop, work.stop) - max(lease.start, work.start))
        if found:
            for lease in self.leases:
                if lease.left <= 0 and now is not None:
                    self.ranges += 1
                    self.range_s += now - lease.at
            self.leases = [lease for lease in self.leases if lease.left > 0]
        return found


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """A node for the view and the report: while it is there and afterwards."""

    number: int
    name: str
    presence: Presence
    joined: float  # on the caller's clock, as is `heard_at`
    heard_at: float
    rate: float  # units a second, of late; 0 while it has finished none
    kept: int  # units of which it brought the records
    done: int  # units finished, by its last exchange
    on_hand: int  # units leased to it that it has not begun
    held: int  # units leased to it of which no records have come
    ranges: int  # ranges leased to it that are through
    range_s: float  # mean seconds from a range's lease to its records; 0 while there is none
    taken_ranges: int  # ranges that were leased to others: it was slow or lost, or had too many
    duplicates: int  # units of which it brought records when there were some already


def describe_node(node: NodeState) -> NodeFigures:
    return NodeFigures(
        node.number,
        node.name,
        node.presence,
        node.joined,
        node.heard_at,
        node.rate.per_s,
        node.kept,
        node.done,
        node.on_hand,
        node.holds.units,
        node.ranges,
        node.range_s / node.ranges if node.ranges else 0.0,
        node.taken_ranges,
        node.duplicates,
    )


@dataclass(frozen=True, slots=True)
class LostNode:
    node: int
    name: str
    presence: Presence  # "lost" or "hung"
    reason: str  # for people
    units: int  # that it held
    since: float  # on the caller's clock: its last word, or its last progress if it hung
