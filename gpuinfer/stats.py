"""Counters, histograms and the time ledger of a run, and the frozen Snapshot that every view of them draws from.

Also which station of which lane a thread has spent its CPU time on (each thread keeps its own account, by its own
clock), the counters of masked diffusion steps, and the 95 % interval of a mean (Student, "The probable error of a
mean", 1908).
"""

from __future__ import annotations

import itertools
import math
import operator
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

CPU_CLOCK_READ_S = 0.0005  # between two readings of the thread's clock, which takes a call of the system
IDLE_STATION = "idle"  # a lane that waits: whatever its thread runs then is not for it


Stay = tuple["Lane", str, int, float]
"""The lane, the station, which of the lane's stays it is, and since when."""


class _ThreadAccount:
    """A thread's."""

    __slots__ = ("ended", "open", "ran", "read_at")

    def __init__(self) -> None:
        self.read_at, self.ran = time.monotonic(), time.thread_time()
        self.open: Stay | None = None
        self.ended: list[tuple[Lane, str, float]] = []  # since the last reading: lane, station, seconds in it


class _ThreadAccounts(threading.local):
    def __init__(self) -> None:
        self.account = _ThreadAccount()


_of_this_thread = _ThreadAccounts()


def account_station(lane: Lane, station: str) -> None:
    """The calling thread has just taken this lane into this station."""
    account, now = _of_this_thread.account, time.monotonic()
    if account.open is not None:
        last, place, number, since = account.open
        # a stay that another thread has ended meanwhile does not count: its length is not known here
        if place != IDLE_STATION and last.stays == number + (last is lane):
            account.ended.append((last, place, now - since))
    account.open = (lane, station, lane.stays, now)
    if now - account.read_at < CPU_CLOCK_READ_S:
        return
    # What the thread ran since the last reading goes to the stations that it was in, to each by its length.
    ran = time.thread_time()
    lasted = sum(seconds for _, _, seconds in account.ended)
    share = min(1.0, (ran - account.ran) / lasted) if lasted > 0 else 0.0
    for one, spent, seconds in account.ended:
        one.ran[spent] = one.ran.get(spent, 0.0) + seconds * share
    account.ended.clear()
    account.read_at, account.ran = now, ran


SUB_BUCKETS = 64  # per doubling: a percentile is off by at most 1.1 %
FLOOR = 1e-7  # seconds; anything shorter falls in the first bucket

COUNTED = ("stations", "visits", "ran")  # of a lane, each by station
DONE_BY_A_DEVICE = ("tokens", "steps", "stages", "turns", "transfers")  # each name → how much until now
COUNTED_OF_DEVICES = ("rows", "batches", "busy_s")  # of each of several: see `DeviceCount`
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


StationWatcher = Callable[["Lane", str, str], None]
_watcher: StationWatcher | None = None


def watch_stations(watcher: StationWatcher | None) -> None:
    """From now on call this at each lane's change of station, with the lane, the station it leaves and the one it
    enters, on the thread that makes the change; None: nothing. There is one watcher.
    """
    global _watcher
    _watcher = watcher


class Lane:
    """One worker thread or forward slot. Only its own thread calls `enter`; anyone may read what it has counted."""

    __slots__ = ("_clock", "_real", "_since", "_spent", "device", "name", "ran", "retired", "station", "stays")

    def __init__(
        self, name: str, station: str = "idle", clock: Callable[[], float] = time.monotonic, device: str = ""
    ) -> None:
        self.name = name
        self.device = device  # that its batches go to, where there are several
        self.retired = False  # that device is gone: it gets no more batches
        self.stays, self.ran = 0, dict[str, float]()  # see `spending`
        self._clock, self._real = clock, clock is time.monotonic
        self._spent: dict[str, list[float]] = {}  # station → [seconds, visits that have ended]
        self.station = station  # where it is now
        self._since = clock()

    def enter(self, station: str) -> None:
        now = self._clock()
        spent = self._spent.get(self.station)
        if spent is None:
            self._spent[self.station] = [now - self._since, 1]
        else:
            spent[0] += now - self._since
            spent[1] += 1
        if _watcher is not None:
            _watcher(self, self.station, station)
        self.station, self._since = station, now
        self.stays += 1
        if self._real:  # on a virtual clock no thread spends CPU time
            account_station(self, station)

    def rebook(self, source: str, target: str, seconds: float) -> None:
        """So many seconds of what was booked as one station were another's: it shows only afterwards which."""
        spent = self._spent.get(source)
        moved = min(seconds, spent[0]) if spent is not None else 0.0
        if spent is None or moved <= 0:
            return
        ran = self.ran.get(source, 0.0)
        on_core = ran * moved / spent[0]
        known = self._spent.setdefault(target, [0.0, 0])
        spent[0] -= moved
        known[0] += moved
        known[1] += 1
        self.ran[source] = ran - on_core
        self.ran[target] = self.ran.get(target, 0.0) + on_core

    def retire(self) -> None:
        self.retired = True

    def stations(self) -> dict[str, float]:
        """Seconds in each station until now."""
        times = {station: spent[0] for station, spent in list(self._spent.items())}
        times[self.station] = times.get(self.station, 0.0) + self._clock() - self._since
        return times

    def visits(self) -> dict[str, int]:
        """How often each station was entered and left again."""
        return {station: int(spent[1]) for station, spent in list(self._spent.items())}

    def to_wire(self) -> dict[str, Any]:
        return {"name": self.name, "stations": self.stations(), "visits": self.visits(), "ran": dict(self.ran)}


class DeviceCount:
    """What one of several devices has done. Threads may share one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.rows = self.batches = 0  # answered
        self.running = 0  # batches that it has now
        self.failed = ""  # why it is given up; "": it is not
        self._busy_s, self._since = 0.0, 0.0
        self._clock, self._lock = clock, threading.Lock()

    def begin(self) -> None:
        with self._lock:
            if not self.running:
                self._since = self._clock()
            self.running += 1

    def end(self, rows: int) -> None:
        """Of a batch that has begun; of one that was not answered, no rows."""
        with self._lock:
            self.running -= 1
            if not self.running:
                self._busy_s += self._clock() - self._since
            if rows:
                self.rows += rows
                self.batches += 1

    def told(self) -> dict[str, Any]:
        """For `Backend.device`, under `devices`: `busy_s`, in which it had a batch, is of `copies` processes."""
        with self._lock:
            busy_s = self._busy_s + (self._clock() - self._since if self.running else 0.0)
            counted = {"rows": self.rows, "batches": self.batches, "busy_s": busy_s, "copies": 1}
            return {**counted, "failed": self.failed}


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


@dataclass(frozen=True, slots=True)
class Rule:
    """How one counter of several processes becomes one, and what it counts beyond an earlier moment."""

    add: Callable[[Sequence[Any]], Any]
    beyond: Callable[[Any, Any], Any] = lambda late, early: late  # of a level: what it is now
    in_turn: Callable[[Sequence[Any]], Any] | None = None  # of processes, each in the place of the one before; or `add`


def _added(parts: Sequence[Mapping[Any, int]]) -> dict[Any, int]:
    total: Counter[Any] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


def _beyond(late: Mapping[Any, float], early: Mapping[Any, float]) -> dict[Any, Any]:
    return {key: late[key] - early.get(key, 0) for key in late if late[key] != early.get(key, 0)}


def _sums_added(parts: Sequence[Mapping[int, Sequence[float]]]) -> dict[int, list[float]]:
    total: dict[int, list[float]] = {}
    for part in parts:
        for rows, (count, seconds) in part.items():
            before = total.get(rows, (0, 0.0))
            total[rows] = [before[0] + count, before[1] + seconds]
    return total


def sums_beyond(
    late: Mapping[int, Sequence[float]], early: Mapping[int, Sequence[float]]
) -> dict[int, Sequence[float]]:
    """What `Snapshot.batch_s` counts beyond an earlier one."""
    left = {rows: (late[rows], early.get(rows, (0, 0.0))) for rows in late}
    return {rows: [now[0] - then[0], now[1] - then[1]] for rows, (now, then) in left.items() if now[0] != then[0]}


def _by_name(rules: Mapping[str, Rule], counts: Callable[[Mapping[str, Any]], bool] = bool) -> Rule:
    """For name → counters, each with its own rule; names of which nothing `counts` beyond the earlier moment are left
    out.
    """

    def add(parts: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
        names = dict.fromkeys(name for part in parts for name in part)
        return {
            name: {key: rule.add([part[name][key] for part in parts if name in part]) for key, rule in rules.items()}
            for name in names
        }

    def beyond(late: Mapping[str, Any], early: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        left = dict(late)
        for name in late.keys() & early.keys():
            left[name] = {key: rule.beyond(late[name][key], early[name][key]) for key, rule in rules.items()}
        return {name: line for name, line in left.items() if counts(line)}

    return Rule(add, beyond)


def _lanes_beyond(late: Sequence[Mapping[str, Any]], early: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """Matched by name; one that was not there counts from its opening."""
    earlier = {lane["name"]: lane for lane in early}
    return tuple(
        {**lane, **{what: _beyond(lane.get(what, {}), earlier.get(lane["name"], {}).get(what, {})) for what in COUNTED}}
        for lane in late
    )


def _joined(parts: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[Mapping[str, Any], ...]:
    """Lanes of one name as one, in the order in which the names first appear."""
    found: dict[str, dict[str, Any]] = {}
    for lane in itertools.chain.from_iterable(parts):
        known = found.setdefault(lane["name"], {"name": lane["name"], **{what: {} for what in COUNTED}})
        for what in COUNTED:
            for station, counted in lane.get(what, {}).items():
                known[what][station] = known[what].get(station, 0) + counted
    return tuple(found.values())


def _devices_added(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The processes share one device: its name and utilisation are the same for all; what each has taken and done
    adds up. Models beside the run's own are there by name. Strangers on the device are those that are none of ours.
    """
    known = [part for part in parts if part]
    taken = {name for part in known for name in part if name.endswith("_mb")}
    added = {name: sum(part.get(name, 0.0) for part in known) for name in taken}
    done = {name: _added([part[name] for part in known if part.get(name)]) for name in DONE_BY_A_DEVICE}
    beside = dict(itertools.chain.from_iterable(part.get("beside", {}).items() for part in known))
    named: dict[str, Any] = {"beside": beside} if beside else {}
    if several := [part["devices"] for part in known if part.get("devices")]:
        named["devices"] = _each_added(several)
    if pids := {pid for part in known for pid in part.get("pids", ())}:
        seen = {one["pid"]: one for part in known for one in part.get("others", ())}
        named |= {"pids": sorted(pids), "others": [one for pid, one in seen.items() if pid not in pids]}
    return {**known[0], **added, **{name: counts for name, counts in done.items() if counts}, **named} if known else {}


def _each_added(parts: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Several devices, by name: each has a copy of the model in each process."""
    found: dict[str, dict[str, Any]] = {}
    for name, device in itertools.chain.from_iterable(part.items() for part in parts):
        known = found.get(name)
        if known is None:
            found[name] = dict(device)
            continue
        for key, value in device.items():
            if key in COUNTED_OF_DEVICES or key == "copies" or key.endswith("_mb"):
                known[key] = known.get(key, 0) + value
        known["failed"] = known.get("failed") or device.get("failed", "")
    return found


def _done_beyond(late: Mapping[str, Any], early: Mapping[str, Any]) -> dict[str, Any]:
    """A device is what it is now; what it has done is counted on from the earlier moment."""
    done = {
        what: {name: count - early.get(what, {}).get(name, 0) for name, count in late[what].items()}
        for what in DONE_BY_A_DEVICE
        if late.get(what)
    }
    if several := late.get("devices"):
        before = early.get("devices", {})
        done["devices"] = {
            name: {**now, **{key: now.get(key, 0) - before.get(name, {}).get(key, 0) for key in COUNTED_OF_DEVICES}}
            for name, now in several.items()
        }
    return {**late, **done}


def merge_histograms(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    counts: Counter[int] = Counter()
    total = maximum = 0.0
    for part in parts:
        counts.update(part["counts"])
        total += part["total"]
        maximum = max(maximum, part["max"])
    return {"counts": dict(counts), "total": total, "max": maximum}


COUNT = Rule(sum, operator.sub)
COUNTS = Rule(_added, _beyond)  # key → how many
SUMS = Rule(_sums_added, sums_beyond)
HISTOGRAM = Rule(
    merge_histograms,
    lambda late, early: {
        **late,
        "counts": _beyond(late["counts"], early["counts"]),
        "total": late["total"] - early["total"],
    },
)
CLASSES = _by_name(
    {"requests": COUNT, "rows": COUNT, "errors": COUNTS, "latency": HISTOGRAM, "queue_wait": HISTOGRAM},
    lambda count: bool(count["requests"] or count["queue_wait"]["counts"] or any(count["errors"].values())),
)
SECONDS = Rule(math.fsum, lambda late, early: max(0.0, late - early))  # threads that ended take theirs along
FIRST = Rule(lambda parts: next(filter(None, parts), ""))
MODELS = _by_name(
    {
        **dict.fromkeys(("requests", "rows"), COUNT),
        **dict.fromkeys(("tokens", "errors"), COUNTS),
        **dict.fromkeys(("latency", "queue_wait"), HISTOGRAM),
        **dict.fromkeys(("device_s", "turn_wait_s"), SECONDS),
        "kind": FIRST,
        "share": Rule(lambda parts: max(parts, default=1.0)),  # the same in every process
        "waiting": Rule(sum),
    }
)
FALLBACKS = _by_name(
    {
        **dict.fromkeys(("why", "said"), FIRST),
        "processes": Rule(sum),
        **dict.fromkeys(("requests", "rows", "batches"), COUNT),
    },
    lambda line: bool(line["processes"]),
)
LEVEL = Rule(sum, in_turn=lambda parts: parts[-1] if parts else 0)
PEAK = Rule(sum, in_turn=lambda parts: max(parts, default=0.0))  # they never ran together
WORDS = Rule(lambda parts: tuple(dict.fromkeys(itertools.chain.from_iterable(parts))))
LANES = Rule(lambda parts: tuple(itertools.chain.from_iterable(parts)), _lanes_beyond, _joined)
NEWEST = Rule(lambda parts: next(filter(None, parts), None))
DEVICE = Rule(_devices_added, _done_beyond, in_turn=lambda parts: next(filter(None, reversed(parts)), {}))


def _counter(rule: Rule, default: Any = 0) -> Any:
    """A field of `Snapshot`; `default` is a value, or makes one."""
    if callable(default):
        return field(default_factory=default, metadata={"rule": rule})
    return field(default=default, metadata={"rule": rule})


def _nothing() -> dict[str, Any]:
    return Histogram().to_wire()


@dataclass(frozen=True)
class Snapshot:
    """Frozen counters at one moment, since the start of a run. Each says how it adds up over several processes."""

    requests: int = _counter(COUNT)  # settled with a result
    rows: int = _counter(COUNT)
    batches: Mapping[int, int] = _counter(COUNTS, dict)  # batch size in rows → how many batches
    batch_s: Mapping[int, Sequence[float]] = _counter(SUMS, dict)  # size → [batches answered, their seconds]
    reasons: Mapping[str, int] = _counter(COUNTS, dict)  # why they were cut → how many
    latency: Mapping[str, Any] = _counter(HISTOGRAM, _nothing)  # submit → result
    queue_wait: Mapping[str, Any] = _counter(HISTOGRAM, _nothing)  # submit → batch
    first_token: Mapping[str, Any] = _counter(HISTOGRAM, _nothing)  # of each answer in text: submit → its first token
    between_tokens: Mapping[str, Any] = _counter(HISTOGRAM, _nothing)  # of each: from token to token, its mean
    errors: Mapping[str, int] = _counter(COUNTS, dict)  # requests, by ERRORS
    failure: str = _counter(FIRST, "")  # the error of the first request that failed
    classes: Mapping[str, Mapping[str, Any]] = _counter(CLASSES, dict)  # name → `ClassCount.to_wire()`
    models: Mapping[str, Mapping[str, Any]] = _counter(MODELS, dict)  # of several in one run: name → `of_model`
    notices: tuple[str, ...] = _counter(WORDS, ())  # what the strategy has to say to the user
    fallback: Mapping[str, Mapping[str, Any]] = _counter(FALLBACKS, dict)
    """Of a remote backend whose server is gone: the backend that goes on → {why, said (for people), processes,
    requests, rows, batches}, as answered in this process."""
    waiting: int = _counter(LEVEL)  # rows in the queue now
    slots: int = _counter(LEVEL)  # rows that may be generated at once: batches are then forward steps. 0: no slots
    lanes: tuple[Mapping[str, Any], ...] = _counter(LANES, ())
    """{name, stations{station: seconds}, visits{station: how often}, ran{station: seconds on a core}}"""
    cpu_s: float = _counter(SECONDS, 0.0)  # that the processes' threads ran on a core
    cpu_wait_s: float = _counter(SECONDS, 0.0)  # that they were ready and waited for a core; 0 where that is not known
    rss_peak_mb: float = _counter(PEAK, 0.0)
    device: Mapping[str, Any] = _counter(DEVICE, dict)
    cluster: Any = field(default=None, metadata={"rule": NEWEST})
    """Of the coordinator of a run over nodes: `report.cluster_state.ClusterState`, which does not travel."""

    def __repr__(self) -> str:
        """Without the histograms, which are thousands of numbers: `to_wire` has all."""
        errors = {name: count for name, count in self.errors.items() if count}
        return (
            f"Snapshot(requests={self.requests}, rows={self.rows}, batches={sum(self.batches.values())}, "
            f"errors={errors}, waiting={self.waiting}, …)"
        )

    def to_wire(self) -> dict[str, Any]:
        """Plain values only, for msgpack."""
        return asdict(self if self.cluster is None else replace(self, cluster=None))

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Snapshot:
        return cls(**{**wire, "lanes": tuple(wire["lanes"]), "notices": tuple(wire.get("notices", ()))})


RULES: Mapping[str, Rule] = {one.name: one.metadata["rule"] for one in fields(Snapshot)}


def counted_tokens(snapshot: Snapshot) -> dict[str, float]:
    """Tokens as they are drawn: what the workload counts comes only with whole answers, minutes later perhaps."""
    return {f"{way}_tokens": count for way, count in (snapshot.device.get("tokens") or {}).items()}


def of_model(counted: Snapshot, kind: str, share: float) -> dict[str, Any]:
    """The counters of one model of several. `device_s`: device time in seconds of the whole device, or the time for
    which its forward lanes were at work where the device is not shared out (`models.device_arbiter`).
    """
    turns = counted.device.get("turns") or {}
    forwards = (lane["stations"] for lane in counted.lanes if lane["name"].rpartition(": ")[2].startswith("forward"))
    forward_s = (seconds for stations in forwards for name, seconds in stations.items() if name != "idle")
    return {
        "kind": kind,
        "share": share,
        "requests": counted.requests,
        "rows": counted.rows,
        "tokens": dict(counted.device.get("tokens") or {}),
        "errors": dict(counted.errors),
        "device_s": turns["had_s"] if "had_s" in turns else math.fsum(forward_s),
        "turn_wait_s": turns.get("waited_s", 0.0),
        "latency": counted.latency,
        "queue_wait": counted.queue_wait,
        "waiting": counted.waiting,
    }


def merge_snapshots(parts: Iterable[Snapshot]) -> Snapshot:
    """Add snapshots of several processes up."""
    parts = list(parts)
    return Snapshot(**{name: rule.add([getattr(part, name) for part in parts]) for name, rule in RULES.items()})


def merge_in_turn(parts: Iterable[Snapshot]) -> Snapshot:
    """Add up snapshots of processes of which each took the place of the one before: lanes of one name are one lane.

    Levels are those of the last; the memory is the most that one of them took, as they never ran together.
    """
    parts = list(parts)
    values = {name: [getattr(part, name) for part in parts] for name in RULES}
    return Snapshot(**{name: (rule.in_turn or rule.add)(values[name]) for name, rule in RULES.items()})


def since(now: Snapshot, then: Snapshot) -> Snapshot:
    """What `now` counts beyond `then`, an earlier snapshot of the same process. Levels and maxima stay its own."""
    return Snapshot(**{name: rule.beyond(getattr(now, name), getattr(then, name)) for name, rule in RULES.items()})


T_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469)  # the 0.975 quantile for 1 to 6 degrees of freedom
NORMAL_QUANTILE = 1.96


def t_interval(count: int, total: float, squares: float) -> float:
    """Half of the 95 % interval of a mean, by how many values there are, their sum and that of their squares; inf for
    fewer than two.
    """
    if count < 2:
        return math.inf
    variance = max(0.0, squares - total * total / count) / (count - 1)
    return t_quantile(count - 1) * math.sqrt(variance / count)


def t_quantile(freedom: int) -> float:
    """Of Student's distribution with so many degrees of freedom, at 0.975; beyond the table a little more than that."""
    return (
        T_QUANTILES[freedom - 1]
        if freedom <= len(T_QUANTILES)
        else NORMAL_QUANTILE + (T_QUANTILES[-1] - NORMAL_QUANTILE) * len(T_QUANTILES) / freedom
    )


SPECULATION_COUNTS = ("proposed", "accepted", "decode_rows", "decode_tokens", "spared_s", "seconds")
"""Of a backend's `steps`, what is needed for it."""


@dataclass(frozen=True, slots=True)
class SpeculationCounters:
    """Totals over steps in which tokens were proposed to come next, or might have been."""

    proposed: float  # tokens
    accepted: float  # of these, those that were drawn
    rows: float  # summed over the steps without prompts
    tokens: float  # drawn in those
    spared_s: float  # how much longer steps without proposals would have taken, as far as is known
    seconds: float  # in steps

    @classmethod
    def of(cls, steps: Mapping[str, float] | None) -> SpeculationCounters | None:
        """From the `steps` that a backend with slots tells; None where nothing was proposed."""
        if not steps or not steps.get("proposed"):
            return None
        return cls(*(float(steps.get(name, 0)) for name in SPECULATION_COUNTS))

    def plain(self) -> dict[str, float]:
        """As reports and `/stats` have it."""
        return {
            "proposed_tokens": self.proposed,
            "accepted_tokens": self.accepted,
            "acceptance": self.accepted / self.proposed if self.proposed else 0.0,
            "tokens_per_step": self.tokens / self.rows if self.rows else 0.0,
            "gain": max(0.0, 1 + self.spared_s / self.seconds) if self.seconds else 1.0,
        }


DIFFUSION_COUNTS = ("rows", "tokens", "output_tokens", "positions", "committed", "idle")
"""Of a backend's `steps`, what is needed for it."""


@dataclass(frozen=True, slots=True)
class DiffusionCounters:
    """Totals over steps. A forward is one row in one step: a step of 16 rows is 16 of them."""

    forwards: float
    idle: float  # forwards that committed nothing
    positions: float  # of their canvases, prompts and what guidance takes besides included
    computed: float  # of these, those that went through the model: the others' keys and values were kept
    committed: float  # masks that became tokens
    useful: float  # tokens of answers: nothing of a prompt, nothing after the end of an answer, no mask

    @classmethod
    def of(cls, steps: Mapping[str, float] | None) -> DiffusionCounters | None:
        """From the `steps` that a backend with slots tells; None where no canvas was in one."""
        if not steps or not steps.get("positions"):
            return None
        rows, computed, useful, positions, committed, idle = (float(steps.get(name, 0)) for name in DIFFUSION_COUNTS)
        return cls(rows, idle, positions, computed, committed, useful)

    @property
    def tokens_per_forward(self) -> float:
        """Useful ones."""
        return self.useful / self.forwards if self.forwards else 0.0

    @property
    def idle_share(self) -> float:
        """Of the forwards."""
        return self.idle / self.forwards if self.forwards else 0.0

    @property
    def computed_share(self) -> float:
        """Of all positions, those that were computed anew."""
        return self.computed / self.positions if self.positions else 0.0

    def plain(self) -> dict[str, float]:
        """As reports and `/stats` have it."""
        return {
            "forwards": self.forwards,
            "idle_forwards": self.idle,
            "committed_tokens": self.committed,
            "useful_tokens": self.useful,
            "positions": self.positions,
            "computed_positions": self.computed,
            "tokens_per_forward": self.tokens_per_forward,
            "idle_share": self.idle_share,
            "computed_share": self.computed_share,
        }
