"""How a run over many nodes stands, as the coordinator's counters carry it (`Snapshot.cluster`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuinfer.api import Roofline, TextRoofline
from gpuinfer.host.cpu_contention import CoreTime
from gpuinfer.report.document import ClusterSection, CoresSection
from gpuinfer.stats import Snapshot


@dataclass(frozen=True, slots=True)
class TypicalNode:
    """The node in the middle of all by its speed: options hold for each node, so what limits this one is what the
    causes of a single machine are looked for in.
    """

    name: str
    snapshot: Snapshot
    facts: Mapping[str, float]
    wall_s: float  # on its own run's clock
    core_count: int
    cores: CoreTime | None
    roofline: Roofline | None
    text_roofline: TextRoofline | None


@dataclass(frozen=True, slots=True)
class ClusterState:
    """`roofline`: of all nodes together. `cores`: of all hosts, for as long as nodes were there; `core_shares` makes
    the report's of it.
    """

    section: ClusterSection
    roofline: Roofline | None
    text_roofline: TextRoofline | None
    cores: CoresSection
    typical: TypicalNode | None

    def core_shares(self, wall_s: float) -> CoresSection:
        """`cores` of a stretch of `wall_s` seconds: a core of which no node reports is idle."""
        cores, all_s = self.cores, wall_s * self.cores["count"]
        busy = min(cores["busy_s"], all_s)
        others = stolen = idle = None
        if cores["others_s"] is not None:
            others = min(cores["others_s"], all_s - busy)
            stolen = min(cores["stolen_s"] or 0.0, max(0.0, all_s - busy - others))
            idle = max(0.0, all_s - busy - others - stolen)
        return {**cores, "busy_s": busy, "others_s": others, "stolen_s": stolen, "idle_s": idle}
