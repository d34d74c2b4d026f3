"""How the figures of all nodes are added up.

A node sends a `NodeReport` with each exchange, totals since it joined. The coordinator keeps the latest of each node in
a `ClusterFigures`, from which the run's snapshot, its progress, the table of nodes and the report's section `cluster`
are made. Times are seconds; `now` is the coordinator's monotonic clock.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from gpuinfer.api import Progress, Roofline
from gpuinfer.cluster.node_report import NodeMachine, NodeReport
from gpuinfer.division import DivisionProgress
from gpuinfer.stats import Snapshot, merge_in_turn, merge_snapshots

SUM_S = 0.005  # for each node, between two sums of all counters: a sum takes some 0.3 ms a node
SILENT_S = 5.0  # without an exchange: a node counts as silent
MOST_FIGURES = 4096  # steps' figures that wait for a tracker
PACE_POINTS = 512  # of the run's pace that are remembered
MAXIMUM = ("blocks", "threads", "groups_limited", "policy_version")
MEAN = ("environment_share", "reference_share")
"""Facts of a workload (`Progress.facts`) of which the sum over nodes says nothing; all others are added up."""


class RangeFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What became of ranges: the fields of `run_counts.RangeCounts`, and of its `Counts`."""

    kept: int = 0
    held_s: float = 0.0
    returned: int = 0
    stolen: int = 0
    copied: int = 0
    duplicates: int = 0
    units: int = 0  # kept by this run


ADDED = ("done", "starved_s", "room_s", "sending_s", "sendings", "records_bytes")  # of `NodeReport`, over restarts


class NodeAccount:
    """One node, and those that had its place before it died and was started again."""

    def __init__(self, name: str, host: NodeMachine, version: str, now: float) -> None:
        self.name, self.machine, self.version = name, host, version
        self.joined_at = self.heard_at = now
        self.began_at: float | None = None  # it had its first units
        self.left_at: float | None = None
        self.last_word_at: float | None = None  # of one that has left: from then on it did nothing
        self.kept = 0  # units of which it brought the records
        self.why, self.lost = "", False
        self.restarts = 0
        self.starting_s = self.gone_s = 0.0  # after the first start
        self.idle_since: float | None = None  # until the end of the run, once it is over
        self.starved_before_tail_s = 0.0
        self.tail_empty = 1.0  # of its places for units, the share that was empty since then
        self.report = NodeReport()
        self._ready_at: float | None = None  # this life has its first units
        self._before: Counter[str] = Counter()  # of earlier lives
        self._counts_before: Counter[str] = Counter()
        self._failed_before: int | None = None
        self._past: Snapshot | None = None
        self._last = Snapshot()  # of `report`
        self._read = b""

    def rejoin(self, host: NodeMachine, version: str, now: float) -> None:
        """Another process has taken the place of the one that left."""
        self._before.update({name: getattr(self.report, name) for name in ADDED})
        self._counts_before.update(self.report.counts)
        self._failed_before = self.failed
        self._past, self._last, self._read = self._snapshot(), Snapshot(), b""
        self.gone_s += now - (self.last_word_at if self.last_word_at is not None else self.heard_at)
        self.machine, self.version, self.report = host, version, NodeReport()
        self.joined_at = self.heard_at = now
        self.left_at, self.last_word_at, self.why, self.lost, self._ready_at = None, None, "", False, None
        self.restarts += 1

    def heard(self, report: NodeReport, now: float) -> None:
        if not report.snapshot:
            report = msgspec.structs.replace(report, snapshot=self.report.snapshot)
        self.report, self.heard_at = report, now
        self.starved_before_tail_s = self.total("starved_s")
        if self._ready_at is None and not report.setup:
            self._ready_at = now
            if self.began_at is None:
                self.began_at = now
            else:
                self.starting_s += now - self.joined_at

    def total(self, name: str) -> float:
        """One of `ADDED`, earlier lives included."""
        now: float = getattr(self.report, name)
        return self._before[name] + now

    @property
    def units(self) -> float:
        """Done, and of what is under way."""
        return self.total("done") + self.report.begun

    @property
    def failed(self) -> int | None:
        if self.report.failed is None:
            return self._failed_before
        return (self._failed_before or 0) + self.report.failed

    def add_counts(self, total: Counter[str]) -> None:
        """Add those of its workload, earlier lives included."""
        for counts in (self._counts_before, self.report.counts):
            for name, count in counts.items():
                total[name] += count  # type: ignore[assignment]

    @property
    def counts(self) -> Counter[str]:
        self.add_counts(total := Counter[str]())
        return total

    @property
    def rows(self) -> int:
        """That it has computed, earlier lives included."""
        return self.own_snapshot().rows + (0 if self._past is None else self._past.rows)

    def ended(self) -> None:
        """All units are kept: the wait that it is in will have no end."""
        if self.left_at is None and self.report.idle_s:
            self.idle_since = self.heard_at - self.report.idle_s
            self.starved_before_tail_s = self.total("starved_s") - self.report.empty_s
            self.tail_empty = min(1.0, self.report.empty_s / self.report.idle_s)

    def snapshot(self) -> Snapshot:
        """Its counters, the names of lanes and devices with the node's before them."""
        found = self._snapshot()
        device = dict(found.device)
        if several := device.get("devices"):
            device["devices"] = {f"node {self.name}: {name}": one for name, one in several.items()}
        for of_the_host in ("pids", "utilisation"):
            device.pop(of_the_host, None)
        lanes = ({**lane, "name": f"node {self.name}: {lane['name']}"} for lane in found.lanes)
        return replace(found, lanes=tuple(lanes), device=device)

    def own_snapshot(self) -> Snapshot:
        """Of the process that has its place now."""
        if self.report.snapshot is not self._read:
            self._read = self.report.snapshot
            self._last = Snapshot.from_wire(msgspec.msgpack.decode(self._read)) if self._read else Snapshot()
        return self._last

    def _snapshot(self) -> Snapshot:
        now = self.own_snapshot()
        return now if self._past is None else merge_in_turn([self._past, now])


class ClusterFigures:
    """The figures of all nodes of one run. Belongs to the coordinator's event loop.

    A node is called by the number that its launcher has for it, and keeps the name when it is started again; one that
    was started by hand is called `+1`, `+2`, ….
    """

    def __init__(self, now: float, cpu_clock: Callable[[], float] = time.thread_time) -> None:
        self.began_at = now
        self.first_joined: float | None = None
        self.clock_from: float | None = None  # the first node had its first units
        self.clock_to: float | None = None  # all units were kept
        self._summed: tuple[Snapshot, float] | None = None  # the last sum, and when it was made
        self.done_at: float | None = None  # nodes had finished as many as there are: what was left was to keep them
        self._wanted: int | None = None  # units of this run
        self.accounts: dict[str, NodeAccount] = {}
        self.changes = 0  # counted up at each: a sum is made anew,
        self.events = 0  # and at once where a node has come, begun or gone
        self.reading_s = self.keeping_s = 0.0  # of the division's `read`, of its `keep`
        self.unit = "units"  # many of them, for people
        self.one_host = False  # more nodes would be on this host as well
        self.count_ranges: Callable[[], RangeFigures] = RangeFigures  # the coordinator's
        self.measured: dict[tuple[str, int], Roofline] = {}  # the bare model, by kind of machine
        self._pace: list[tuple[float, float]] = []  # when, units done by all: for what the end of the run cost
        self._cpu_clock, self._cpu_from = cpu_clock, cpu_clock()
        self._numbers: dict[int, NodeAccount] = {}  # by the number of the present process
        self._bringers: dict[int, NodeAccount] = {}  # by that of any process: records may come after it has left
        self._measuring: set[tuple[str, int]] = set()
        self._figures: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=MOST_FIGURES)

    def joined(
        self, node: int, host: NodeMachine, now: float, *, index: int | None = None, version: str = ""
    ) -> NodeAccount:
        """A process has joined under this number; `index`: its launcher's."""
        self.events += 1
        if self.first_joined is None:
            self.first_joined, self._cpu_from = now, self._cpu_clock()
        by_hand = sum(name.startswith("+") for name in self.accounts)
        name = f"+{by_hand + 1}" if index is None else f"{index}"
        if (account := self.accounts.get(name)) is None:
            account = self.accounts[name] = NodeAccount(name, host, version, now)
        else:
            account.rejoin(host, version, now)
        self._numbers[node] = self._bringers[node] = account
        return account

    def measures_roofline(self, node: int) -> bool:
        """Whether this node is to measure the bare model: the first one of each kind of machine."""
        kind = self._numbers[node].machine.kind
        first = kind not in self._measuring
        self._measuring.add(kind)
        return first

    def heard(self, node: int, report: NodeReport, now: float) -> None:
        """Of a number that is not known, nothing is counted."""
        if (account := self._numbers.get(node)) is None:
            return
        self.changes += 1
        if self.clock_to is None:
            account.heard(report, now)
        else:  # its counts are still welcome, such as a roofline that was measured after the work
            account.report = msgspec.structs.replace(report, snapshot=report.snapshot or account.report.snapshot)
        self._figures.extend(report.figures)
        if report.roofline is not None:
            self.measured[account.machine.kind] = report.roofline
        if self.clock_from is None and account.began_at is not None:
            self.clock_from, self._summed = now, None
            self.events += 1

    def kept(self, node: int, units: int) -> None:
        """It brought the records of so many units that had none."""
        if (account := self._bringers.get(node)) is not None:
            account.kept += units
            self.changes += 1

    def gone(self, node: int, now: float, why: str = "", lost: bool = False, since: float | None = None) -> None:
        """It has left, or is `lost`. What it has counted stays in the sum. `since`: from when on it did nothing; by
        default, where it left for a reason (`why`), since it was last heard.
        """
        self.events += 1
        if (account := self._numbers.pop(node, None)) is not None and account.left_at is None:
            account.left_at, account.why, account.lost = now, why, lost
            broke_off = (lost or bool(why)) and self.clock_to is None
            account.last_word_at = min(now, since) if since is not None else account.heard_at if broke_off else now

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """The coordinator reads its input within."""
        began = time.monotonic()
        yield
        self.reading_s += time.monotonic() - began

    @contextlib.asynccontextmanager
    async def keeping(self) -> AsyncIterator[None]:
        """The coordinator keeps records within."""
        began = time.monotonic()
        yield
        self.keeping_s += time.monotonic() - began

    def ended(self, now: float) -> None:
        """All units are kept, or the run is to stop: what nodes do from here on is not counted."""
        if self.clock_to is None:
            self.events += 1
            self.clock_to = now
            for one in self.accounts.values():
                one.ended()

    def cpu_s(self) -> float:
        """Seconds that the coordinator's event loop has run on a core since the first node joined."""
        return self._cpu_clock() - self._cpu_from

    def tail_cost_s(self, start: float, end: float) -> float:
        """Of the seconds from `start` to the end of the run, those that it would have been shorter had all nodes gone
        on at the pace that they had before.
        """
        before = [one for one in self._pace if one[0] <= start]
        if len(before) < 2 or before[-1][1] <= before[0][1]:
            return end - start
        per_s = (before[-1][1] - before[0][1]) / (before[-1][0] - before[0][0])
        late = self._pace[-1][1] - before[-1][1] - per_s * (start - before[-1][0])
        return min(end - start, max(0.0, end - start - max(0.0, late) / per_s))

    @property
    def present(self) -> list[NodeAccount]:
        """Those that are not lost."""
        return [one for one in self.accounts.values() if not one.lost]

    def snapshot(self, now: float) -> Snapshot:
        """The sum of all nodes. In the middle of a run of many it may be some seconds old, as adding up takes time."""
        accounts = list(self.accounts.values())
        if self._summed is not None and self.clock_from is not None and self.clock_to is None:
            found, at = self._summed
            if now - at < SUM_S * len(accounts):
                return found
        again = self.count_ranges().duplicates  # units of which there were records already
        self._keep_pace(now, math.fsum(one.units for one in accounts) - again)
        finished = sum(one.total("done") for one in self.present) - again
        if self.done_at is None and self._wanted is not None and finished >= self._wanted:
            self.done_at = now
        total = merge_snapshots(one.snapshot() for one in accounts)
        device = dict(total.device)
        names = Counter(str(name) for one in accounts if (name := one.own_snapshot().device.get("name")))
        if names.total() > 1:
            device["name"] = ", ".join(f"{count} × {name}" for name, count in names.items())
        busy = [share for one in accounts if (share := one.own_snapshot().device.get("utilisation")) is not None]
        if busy:
            device["utilisation"] = statistics.fmean(busy)
        found = replace(total, device=device)
        self._summed = found, now
        return found

    def _keep_pace(self, now: float, units: float) -> None:
        if self.clock_from is None:
            return
        self._pace.append((now, units))
        if len(self._pace) > PACE_POINTS:  # every second one of the older half
            half = len(self._pace) // 2
            self._pace[:half] = self._pace[:half:2]

    def progress(
        self,
        done: int,
        *,
        total: int | None,
        unit: str,
        before: int = 0,
        besides: DivisionProgress | None = None,
        note: str = "",
        facts: Mapping[str, float] | None = None,
    ) -> Progress:
        """Of the run, of which `done` units of ranges are kept, `before` of them by an earlier run; `besides` are added
        to them. `facts` take the place of those of the nodes. Figures of steps come once.
        """
        besides = besides or DivisionProgress()
        apart = besides.before + besides.done
        self._wanted = None if total is None else total - before
        accounts = list(self.accounts.values())
        counts: Counter[str] = Counter()
        for one in accounts:
            one.add_counts(counts)
        if unit in counts:
            counts[unit] = done - before
        by_nodes = [one.failed for one in accounts if one.failed is not None]
        failed = besides.failed if besides.failed is not None else sum(by_nodes) if by_nodes else None
        reported = next((one.report.failure for one in accounts if one.report.failure), "")
        figures, self._figures = sorted(self._figures, key=lambda one: one[0]), deque(maxlen=MOST_FIGURES)
        finished = math.fsum(one.total("done") for one in self.present)
        return Progress(
            done=done + apart,
            total=None if total is None else total + apart,
            unit=unit,
            before=before + besides.before,
            begun=max(0.0, math.fsum(one.units for one in self.present) - min(finished, done - before)),
            counts=dict(counts),
            facts={**merge_facts([one.report.facts for one in self.present]), **(facts or {})},
            note=note or self._starting(),
            setup=self.clock_from is None,
            failed=failed,
            failure=besides.failure if besides.failed is not None else reported,
            figures=figures,
        )

    def _starting(self) -> str:
        """What there is to say while no node works: none does yet, or none is left."""
        waiting = [one for one in self.present if one.left_at is None]
        if self.clock_from is not None:
            return "" if waiting or self.clock_to is not None else "no node is there"
        if not waiting:
            return "waiting for nodes"
        phases = Counter(one.report.phase or "starting" for one in waiting)
        return f"{len(waiting)} node{'' if len(waiting) == 1 else 's'}: {phases.most_common(1)[0][0]}"


def merge_facts(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Facts of a workload over several nodes: `MAXIMUM` and `MEAN` of some, the sum of all others."""
    found: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            found.setdefault(name, []).append(value)
    return {name: _merged(name, values) for name, values in found.items()}


def _merged(name: str, values: Sequence[float]) -> float:
    if name in MEAN:
        return statistics.fmean(values)
    return max(values) if name in MAXIMUM else math.fsum(values)
