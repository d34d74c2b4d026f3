"""How long a run over nodes would take with another number of them.

A run of n nodes has a start that every node pays, work that is divided, and a tail in which few compute the last units:
T(n) = start + work / n + tail, the law of Amdahl (1967) with what cannot be divided measured in seconds. All units and
all records pass through the coordinator, one at a time, and so through its input and its folder: by the utilisation law
(Denning and Buzen, 1978) none of these can take less time for all of them than it was busy with them.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from dataclasses import dataclass

from gpuinfer.report import thresholds
from gpuinfer.report.document import ClusterSection, TwiceSection
from gpuinfer.units import lasting


@dataclass(frozen=True, slots=True)
class ClusterForecast:
    """Seconds that a run took, in parts. `work_s`: of all nodes together. `waits_s`: that a node waits or is gone,
    however many there are. The other three are what all of the work takes at least, however many nodes there are: for
    the coordinator, for the way of the records, and for units to come.
    """

    start_s: float
    work_s: float
    tail_s: float
    waits_s: float
    coordinator_s: float
    records_s: float
    input_s: float
    nodes: int  # there were
    wanted_cores: float | None  # as in the report: with more than 1, more nodes have no more cores

    @classmethod
    def of(cls, found: ClusterSection) -> ClusterForecast | None:
        """None where too little has been done to tell. What nodes wait for a notable part of their time is full: it
        takes as long as the nodes' work and their waiting for it together.
        """
        nodes, wall_s, time = len(found["nodes"]), found["wall_s"], found["time"]
        if not nodes or not wall_s or time["working"] <= 0:
            return None
        starved_s, with_records_s, gone_s = (time[name] * wall_s for name in ("starved", "records", "gone"))
        starts = [wall_s if line["start_up_s"] is None else line["start_up_s"] for line in found["nodes"]]
        start_s, tail_s = min(statistics.median(starts), time["starting"] * wall_s), found["tail_cost_s"]
        waits_s = gone_s + time["starting"] * wall_s - start_s  # of nodes that start slower than most
        each_s = max(0.0, wall_s - start_s - tail_s - starved_s - with_records_s - waits_s)
        coordinator = found["coordinator"]
        records_s, input_s = coordinator["keeping_share"] * wall_s, coordinator["reading_share"] * wall_s
        if time["records"] >= thresholds.NOTICED:
            records_s = max(records_s, each_s + with_records_s)
        else:
            waits_s += with_records_s
        if time["starved"] >= thresholds.NOTICED:
            input_s = max(input_s, each_s + starved_s)
        else:
            waits_s += starved_s
        coordinator_s = coordinator["cpu_share"] * wall_s
        wanted = found["wanted_cores"]
        return cls(start_s, each_s * nodes, tail_s, waits_s, coordinator_s, records_s, input_s, nodes, wanted)

    @property
    def undivided_s(self) -> float:
        return self.start_s + self.tail_s

    def seconds(self, nodes: float) -> float:
        """Of a run of so many nodes."""
        least_s = max(self.coordinator_s, self.records_s, self.input_s)
        return self.undivided_s + self.waits_s + max(self.work_s / self.at_work(nodes), least_s)

    def at_work(self, nodes: float) -> float:
        """So many nodes do as much as this many of those that there were: on hosts that they share, no more than
        there are cores for.
        """
        if not self.wanted_cores:
            return nodes
        each = self.wanted_cores / self.nodes
        return self.nodes * min(nodes * each, 1.0) / min(self.wanted_cores, 1.0)

    @property
    def crowded_s(self) -> float:
        """Of a run of twice as many, that it would be shorter if each had cores of its own."""
        twice = 2 * self.nodes
        return self.work_s / self.at_work(twice) - self.work_s / twice

    def right_nodes(self) -> int:
        """The fewest nodes that are nearly as quick as those that there were (`thresholds.NEARLY_AS_QUICK`)."""
        enough_s = thresholds.NEARLY_AS_QUICK * self.seconds(self.nodes)
        return bisect_left(range(1, self.nodes), True, key=lambda nodes: self.seconds(nodes) <= enough_s) + 1

    @property
    def badly_divided(self) -> bool:
        """Start and tail take much of the run."""
        divided_s = self.work_s / self.nodes
        return divided_s < thresholds.WORTH_A_NODE * (divided_s + self.undivided_s)


def twice_as_many(found: ClusterSection) -> TwiceSection | None:
    """What twice as many nodes would bring, and why not twice the speed."""
    forecast, nodes = ClusterForecast.of(found), len(found["nodes"])
    if forecast is None:
        return None
    now_s, then_s = found["wall_s"], forecast.seconds(2 * nodes)
    factor = now_s / max(then_s, 1e-9)
    limits = {
        f"the nodes' start takes {lasting(forecast.start_s)} however many there are": forecast.start_s,
        f"the last units take {lasting(forecast.tail_s)} however many nodes there are": forecast.tail_s,
        f"nodes wait or are gone for {lasting(forecast.waits_s)}": forecast.waits_s,
        f"the coordinator needs {lasting(forecast.coordinator_s)} for all ranges": forecast.coordinator_s,
        "the nodes share the cores of their host, which are all used": forecast.crowded_s,
        f"all records need {lasting(forecast.records_s)} to be taken": forecast.records_s,
        f"units come no faster: all of them need {lasting(forecast.input_s)}": forecast.input_s,
    }
    why, seconds = max(limits.items(), key=lambda one: one[1])
    if seconds < thresholds.NOTICED * then_s:
        why = "nearly all of the time is work that is divided"
    return {"nodes": 2 * nodes, "factor": factor, "wall_s": then_s, "why": why}
