"""Counters, histograms and the time ledger of a run, and the frozen Snapshot that every view of them draws from."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gpuinfer.host import spending

SUB_BUCKETS = 64  # per doubling: a percentile is off by at most 1.1 %
FLOOR = 1e-7  # seconds; anything shorter falls in the first bucket

COUNTED = ("stations", "visits", "ran")  # of a lane, each by station
ERRORS = ("failed", "retried", "rejected", "expired", "cancelled")


class Histogram:
    """Durations in seconds, kept in logarithmic buckets: constant memory, mergeable by addition."""

    __slots__ = ("counts", "maximum", "total")

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.total = 0.0
        self.maximum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[int(math.log2(seconds / FLOOR) * SUB_BUCKETS) if seconds > FLOOR else 0] += 1
        self.total += seconds
        if seconds > self.maximum:
            self.maximum = seconds

    def summary(self) -> dict[str, float]:
        """`{mean, p50, p95, p99, max}` in seconds; empty when nothing was recorded."""
        return summarise(self.to_wire())

    def to_wire(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "total": self.total, "max": self.maximum}


def merge_histograms(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    counts: Counter[int] = Counter()
    total = maximum = 0.0
    for part in parts:
        counts.update(part["counts"])
        total += part["total"]
        maximum = max(maximum, part["max"])
    return {"counts": dict(counts), "total": total, "max": maximum}


def summarise(wire: Mapping[str, Any]) -> dict[str, float]:
    """`{mean, p50, p95, p99, max}` in seconds of a histogram's wire form; empty when nothing was recorded."""
    counts = wire["counts"]
    n = sum(counts.values())
    if not n:
        return {}
    quantiles = {}
    for name, share in (("p50", 0.50), ("p95", 0.95), ("p99", 0.99)):
        seen = 0
        for bucket in sorted(counts):
            seen += counts[bucket]
            if seen >= share * n:
                quantiles[name] = min(FLOOR * 2 ** ((bucket + 0.5) / SUB_BUCKETS), wire["max"])
                break
    return {"mean": wire["total"] / n, **quantiles, "max": wire["max"]}


def percentile(sizes: Mapping[int, int], share: float) -> int:
    """The smallest size that at least this share of the batches do not exceed; `sizes`: size → how many batches."""
    seen, wanted = 0, share * sum(sizes.values())
    for size in sorted(sizes):
        seen += sizes[size]
        if seen >= wanted:
            return size
    raise ValueError("there is no percentile of no batches")


def mean_size(sizes: Mapping[int, int]) -> float:
    """The mean size of the batches; `sizes`: size → how many batches. 0 when there were none."""
    count = sum(sizes.values())
    return sum(size * times for size, times in sizes.items()) / count if count else 0.0


class Lane:
    """One worker thread or forward slot. Only its own thread calls `enter`; anyone may read what it has counted."""

    __slots__ = ("_clock", "_real", "_since", "_spent", "_station", "name", "ran", "stays")

    def __init__(self, name: str, station: str = "idle", clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.stays, self.ran = 0, dict[str, float]()  # see `spending`
        self._clock, self._real = clock, clock is time.monotonic
        self._spent: dict[str, list[float]] = {}  # station → [seconds, visits that have ended]
        self._station = station
        self._since = clock()

    def enter(self, station: str) -> None:
        now = self._clock()
        spent = self._spent.get(self._station)
        if spent is None:
            self._spent[self._station] = [now - self._since, 1]
        else:
            spent[0] += now - self._since
            spent[1] += 1
        self._station, self._since = station, now
        self.stays += 1
        if self._real:  # on a virtual clock nobody runs
            spending.entered(self, station)

    def stations(self) -> dict[str, float]:
        """Seconds in each station until now."""
        times = {station: spent[0] for station, spent in list(self._spent.items())}
        times[self._station] = times.get(self._station, 0.0) + self._clock() - self._since
        return times

    def visits(self) -> dict[str, int]:
        """How often each station was entered and left again."""
        return {station: int(spent[1]) for station, spent in list(self._spent.items())}

    def to_wire(self) -> dict[str, Any]:
        return {"name": self.name, "stations": self.stations(), "visits": self.visits(), "ran": dict(self.ran)}


class ClassCount:
    """What became of the requests of one class, and how long they took."""

    __slots__ = ("errors", "latency", "queue_wait", "requests", "rows")

    def __init__(self) -> None:
        self.requests = self.rows = 0  # answered
        self.errors = dict.fromkeys(ERRORS, 0)
        self.latency, self.queue_wait = Histogram(), Histogram()

    @property
    def seen(self) -> bool:
        """Whether there was any request of this class."""
        return bool(self.requests or self.queue_wait.counts or any(self.errors.values()))

    def to_wire(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "rows": self.rows,
            "errors": dict(self.errors),
            "latency": self.latency.to_wire(),
            "queue_wait": self.queue_wait.to_wire(),
        }


@dataclass(frozen=True)
class Snapshot:
    """Frozen counters at one moment, since the start of a run. Snapshots of several processes add up."""

    requests: int = 0  # settled with a result
    rows: int = 0
    batches: Mapping[int, int] = field(default_factory=dict)  # batch size in rows → how many batches
    batch_s: Mapping[int, Sequence[float]] = field(default_factory=dict)  # size → [batches answered, their seconds]
    reasons: Mapping[str, int] = field(default_factory=dict)  # why they were cut → how many
    latency: Mapping[str, Any] = field(default_factory=lambda: Histogram().to_wire())  # submit → result
    queue_wait: Mapping[str, Any] = field(default_factory=lambda: Histogram().to_wire())  # submit → batch
    errors: Mapping[str, int] = field(default_factory=dict)  # requests, by ERRORS
    failure: str = ""  # what the first of those that failed was told
    classes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # name → `ClassCount.to_wire()`
    notices: tuple[str, ...] = ()  # what the strategy has to say to the user
    waiting: int = 0  # rows in the queue now
    slots: int = 0  # rows that may be generated at once: batches are then forward steps. 0: there are no slots
    lanes: tuple[Mapping[str, Any], ...] = ()
    """{name, stations{station: seconds}, visits{station: how often}, ran{station: seconds on a core}}"""
    cpu_s: float = 0.0  # that the processes' threads ran on a core
    cpu_wait_s: float = 0.0  # that they were ready to run and waited for a core; 0 where the system does not tell
    rss_peak_mb: float = 0.0
    device: Mapping[str, Any] = field(default_factory=dict)

    def to_wire(self) -> dict[str, Any]:
        """Plain values only, for msgpack."""
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Snapshot:
        return cls(**{**wire, "lanes": tuple(wire["lanes"]), "notices": tuple(wire.get("notices", ()))})


def tokens_of(snapshot: Snapshot) -> dict[str, float]:
    """Tokens as they are drawn: what the workload counts comes only with whole answers, minutes later perhaps."""
    return {f"{way}_tokens": count for way, count in (snapshot.device.get("tokens") or {}).items()}


def merge_sums(parts: Iterable[Mapping[int, Sequence[float]]]) -> dict[int, list[float]]:
    """Add `Snapshot.batch_s` of several processes up."""
    total: dict[int, list[float]] = {}
    for part in parts:
        for rows, (count, seconds) in part.items():
            before = total.get(rows, (0, 0.0))
            total[rows] = [before[0] + count, before[1] + seconds]
    return total


def merge_classes(parts: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Add `Snapshot.classes` of several processes up."""
    parts = list(parts)
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _merge_class([part[name] for part in parts if name in part]) for name in names}


def _merge_class(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    errors: Counter[str] = Counter()
    for part in parts:
        errors.update(part["errors"])
    return {
        "requests": sum(part["requests"] for part in parts),
        "rows": sum(part["rows"] for part in parts),
        "errors": dict(errors),
        "latency": merge_histograms(part["latency"] for part in parts),
        "queue_wait": merge_histograms(part["queue_wait"] for part in parts),
    }


def sums_beyond(
    late: Mapping[int, Sequence[float]], early: Mapping[int, Sequence[float]]
) -> dict[int, Sequence[float]]:
    """What `Snapshot.batch_s` counts beyond an earlier one."""
    left = {rows: (late[rows], early.get(rows, (0, 0.0))) for rows in late}
    return {rows: [now[0] - then[0], now[1] - then[1]] for rows, (now, then) in left.items() if now[0] != then[0]}


def merge_devices(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The processes share one device: its name and utilisation are the same for all, what each has taken adds up."""
    known = [part for part in parts if part]
    taken = {name for part in known for name in part if name.endswith("_mb")}
    added = {name: sum(part.get(name, 0.0) for part in known) for name in taken}
    return {**known[0], **added} if known else {}


def merge(parts: Iterable[Snapshot]) -> Snapshot:
    """Add snapshots of several processes up."""
    parts = list(parts)

    def added(name: str) -> dict[Any, int]:
        total: Counter[Any] = Counter()
        for part in parts:
            total.update(getattr(part, name))
        return dict(total)

    return Snapshot(
        requests=sum(p.requests for p in parts),
        rows=sum(p.rows for p in parts),
        batches=added("batches"),
        batch_s=merge_sums(p.batch_s for p in parts),
        reasons=added("reasons"),
        latency=merge_histograms(p.latency for p in parts),
        queue_wait=merge_histograms(p.queue_wait for p in parts),
        errors=added("errors"),
        failure=next((p.failure for p in parts if p.failure), ""),
        classes=merge_classes(p.classes for p in parts),
        notices=tuple(dict.fromkeys(notice for p in parts for notice in p.notices)),
        waiting=sum(p.waiting for p in parts),
        slots=sum(p.slots for p in parts),
        lanes=tuple(lane for p in parts for lane in p.lanes),
        cpu_s=math.fsum(p.cpu_s for p in parts),
        cpu_wait_s=math.fsum(p.cpu_wait_s for p in parts),
        rss_peak_mb=sum(p.rss_peak_mb for p in parts),
        device=merge_devices(p.device for p in parts),
    )


def merge_in_turn(parts: Iterable[Snapshot]) -> Snapshot:
    """Add up snapshots of processes of which each took the place of the one before: lanes of one name are one lane.

    Levels are those of the last; the memory is the most that one of them took, as they never ran together.
    """
    parts = list(parts)
    return replace(
        merge(parts),
        waiting=parts[-1].waiting if parts else 0,
        slots=parts[-1].slots if parts else 0,
        lanes=_joined(lane for part in parts for lane in part.lanes),
        rss_peak_mb=max((part.rss_peak_mb for part in parts), default=0.0),
        device=next((part.device for part in reversed(parts) if part.device), {}),
    )


def _joined(lanes: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Lanes of one name as one, in the order in which the names first appear."""
    found: dict[str, dict[str, Any]] = {}
    for lane in lanes:
        known = found.setdefault(lane["name"], {"name": lane["name"], **{what: {} for what in COUNTED}})
        for what in COUNTED:
            for station, counted in lane.get(what, {}).items():
                known[what][station] = known[what].get(station, 0) + counted
    return tuple(found.values())


def since(now: Snapshot, then: Snapshot) -> Snapshot:
    """What `now` counts beyond `then`, an earlier snapshot of the same process. Maxima and levels stay those of `now`.

    Lanes are matched by name; one that `then` does not know counts from its opening.
    """

    def beyond(late: Mapping[Any, float], early: Mapping[Any, float]) -> dict[Any, Any]:
        return {key: late[key] - early.get(key, 0) for key in late if late[key] != early.get(key, 0)}

    def histogram(late: Mapping[str, Any], early: Mapping[str, Any]) -> dict[str, Any]:
        return {**late, "counts": beyond(late["counts"], early["counts"]), "total": late["total"] - early["total"]}

    def class_beyond(late: Mapping[str, Any], early: Mapping[str, Any] | None) -> Mapping[str, Any]:
        if early is None:
            return late
        return {
            "requests": late["requests"] - early["requests"],
            "rows": late["rows"] - early["rows"],
            "errors": beyond(late["errors"], early["errors"]),
            "latency": histogram(late["latency"], early["latency"]),
            "queue_wait": histogram(late["queue_wait"], early["queue_wait"]),
        }

    def lane_beyond(late: Mapping[str, Any], early: Mapping[str, Any]) -> dict[str, Any]:
        counted = {name: beyond(late.get(name, {}), early.get(name, {})) for name in COUNTED}
        return {**late, **counted}

    earlier = {lane["name"]: lane for lane in then.lanes}
    counts = {name: class_beyond(late, then.classes.get(name)) for name, late in now.classes.items()}
    return replace(
        now,
        requests=now.requests - then.requests,
        rows=now.rows - then.rows,
        batches=beyond(now.batches, then.batches),
        batch_s=sums_beyond(now.batch_s, then.batch_s),
        reasons=beyond(now.reasons, then.reasons),
        latency=histogram(now.latency, then.latency),
        queue_wait=histogram(now.queue_wait, then.queue_wait),
        errors=beyond(now.errors, then.errors),
        classes={name: count for name, count in counts.items() if _any_counted(count)},
        lanes=tuple(lane_beyond(lane, earlier.get(lane["name"], {})) for lane in now.lanes),
        cpu_s=max(0.0, now.cpu_s - then.cpu_s),
        cpu_wait_s=max(0.0, now.cpu_wait_s - then.cpu_wait_s),  # threads that ended take what they counted along
    )


def _any_counted(count: Mapping[str, Any]) -> bool:
    """Whether there was any request of a class, as `ClassCount.seen` has it."""
    return bool(count["requests"] or count["queue_wait"]["counts"] or any(count["errors"].values()))
