"""Nodes of a divided run that are made up: each reports once a second, on a virtual clock, what it would have done."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec

from gpuinfer.api import Roofline, Setup
from gpuinfer.cluster.cluster_section import state_of
from gpuinfer.cluster.node_figures import ClusterFigures, RangeFigures
from gpuinfer.cluster.node_report import CoreUse, NodeMachine, NodeReport, packed
from gpuinfer.report.cluster_state import ClusterState
from gpuinfer.report.report import Run, build
from gpuinfer.stats import Histogram, Snapshot

ROWS = 100  # of a unit


@dataclass(kw_only=True)
class MadeUpNode:
    """Shares are of the time in which it has work; times are seconds on the run's clock."""

    speed: float = 1.0  # units a second
    ready_at: float = 0.0
    idle_from: float | None = None  # nothing is left for it
    dies_at: float | None = None
    starved: float = 0.0
    with_records: float = 0.0
    host: str = ""
    cores: int = 4
    cpus: tuple[int, ...] = ()
    cpu: str = "Made-up 1000"
    others: float = 0.0  # cores that other programs have
    waited: float = 0.0  # of the time in which its threads were ready to run
    clock_share: float | None = 1.0
    through_folder: bool = False
    sending_s: float = 0.01
    roofline: float = 0.0
    facts: dict[str, float] = field(default_factory=lambda: {"workers": 4.0, "blocks": 2.0})

    def report(self, now: float) -> NodeReport:
        until = now if self.idle_from is None else min(now, self.idle_from)
        busy_s = max(0.0, until - self.ready_at)
        idle_s = 0.0 if self.idle_from is None else max(0.0, now - self.idle_from)
        lasted_s = busy_s + idle_s
        done = int(busy_s * self.speed)
        latency = Histogram()
        latency.add(0.02)
        lanes = (
            {"name": "worker 0: search", "stations": {"search": busy_s, "idle": idle_s}, "visits": {"search": done}},
            {"name": "worker 0: forward 0", "stations": {"forward": 0.4 * busy_s, "idle": 0.6 * busy_s + idle_s}},
        )
        ran = busy_s * (self.cores - self.others) * (1 - self.waited)
        rows = int(busy_s * self.speed * ROWS)
        snapshot = Snapshot(
            requests=done, rows=rows, batches={ROWS: done}, batch_s={ROWS: [done, 0.4 * busy_s]},
            reasons={"clients": done}, latency=latency.to_wire(),
            lanes=tuple({"visits": {}, "ran": {"search": ran}, **lane} for lane in lanes),
            cpu_s=ran, cpu_wait_s=self.waited * ran / max(1 - self.waited, 0.01), rss_peak_mb=100.0,
        )  # fmt: skip
        own_s, all_s = min(ran, lasted_s * self.cores), lasted_s * self.cores
        others_s = min(self.others * lasted_s, all_s - own_s) if self.cores * lasted_s else 0.0
        ranges = done // 10
        return NodeReport(
            snapshot=packed(snapshot) if busy_s else b"", done=done, counts={"games": float(done)}, facts=self.facts,
            setup=now < self.ready_at, elapsed_s=lasted_s, cores=CoreUse(self.cores, own_s, 0.0, others_s, 0.0),
            starved_s=self.starved * busy_s + idle_s, idle_s=idle_s, empty_s=idle_s, room_s=self.with_records * busy_s,
            sending_s=self.sending_s * ranges, sendings=ranges, records_bytes=1000 * done,
            through_folder=self.through_folder, clock_share=self.clock_share,
            roofline=Roofline(self.roofline, 256, "1 forward × 1 thread") if self.roofline else None,
        )  # fmt: skip


class MadeUpRun:
    """Nodes from the beginning to `end_s`; of many a report every ten seconds is enough. `coordinator`: the share of a
    core that the coordinator has used. `keeping`: the share of the time in which it wrote records.
    """

    def __init__(
        self,
        *nodes: MadeUpNode,
        end_s: float = 100.0,
        coordinator: float = 0.02,
        range_s: float = 10.0,
        keeping: float = 0.0,
    ):
        self.now = 0.0
        self.figures = ClusterFigures(0.0, cpu_clock=lambda: coordinator * self.now)
        self.figures.unit = "games"
        self.figures.count_ranges = self._ranges
        self._keeping = keeping
        self.end_s, self._nodes, self._range_s = end_s, nodes, range_s
        self._kept = [0] * len(nodes)
        for number, node in enumerate(nodes):
            machine = NodeMachine(host=node.host or f"host{number}", cores=node.cores, cpu=node.cpu, cpus=node.cpus)
            self.figures.joined(number, machine, 0.0, index=number, version="1.0")

    def _ranges(self) -> RangeFigures:
        units = sum(int(one.total("done")) for one in self.figures.accounts.values())
        ranges = units // 10
        return RangeFigures(kept=ranges, held_s=self._range_s * ranges, units=units)

    def go_on(self, until: float | None = None) -> MadeUpRun:
        """A report of each node each second, sent as nodes send it, until then or to the end."""
        end = self.end_s if until is None else until
        while self.now < end:
            self.now = min(end, self.now + (1.0 if len(self._nodes) < 100 else 10.0))
            for number, node in enumerate(self._nodes):
                if node.dies_at is not None and self.now >= node.dies_at:
                    self.figures.gone(number, self.now, "killed by signal 9", lost=True)
                    continue
                done = node.report(self.now).done
                self.figures.kept(number, done - self._kept[number])
                self._kept[number] = done
                wire = msgspec.msgpack.encode(node.report(self.now))
                self.figures.heard(number, msgspec.msgpack.decode(wire, type=NodeReport), self.now)
            self.figures.snapshot(self.now)
        return self

    def state(self) -> ClusterState:
        return state_of(self.figures, self.now)

    def finished(self) -> ClusterState:
        self.go_on()
        self.figures.keeping_s = self._keeping * self.now
        self.figures.ended(self.now)
        return self.state()

    def report(self, **settings: object) -> dict:
        """The run's report, with its verdict."""
        state = self.finished()
        snapshot = replace(self.figures.snapshot(self.now), cluster=state)
        progress = self.figures.progress(self._ranges().units, total=self._ranges().units, unit="games")
        wall_s = self.now - (self.figures.clock_from or 0.0)
        names = {"workload": "selfplay", "backend": "inprocess", "strategy": "dynamic"}
        command = f"gpuinfer selfplay --games 1000 --launcher local -L nodes={len(self._nodes)}"
        return build(
            Run(
                **names, started_at="2026-01-01T00:00:00+00:00", setup_s=1.0, wall_s=wall_s, status="done",
                setup=Setup(), snapshot=snapshot, progress=progress, roofline=state.roofline, command=command,
                settings={**names, **settings},
            )
        )  # fmt: skip
