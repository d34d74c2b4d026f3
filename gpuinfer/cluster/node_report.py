"""What a node reports of itself with each exchange: totals since it joined."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import psutil

from gpuinfer.api import Roofline, TextRoofline
from gpuinfer.host import machine
from gpuinfer.models import processor
from gpuinfer.stats import Snapshot


class NodeMachine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine of a node, as far as it decides how fast the node is. `cpus`: the cores that the node may use, by the
    system's numbers: nodes on one host may share some.
    """

    host: str
    cores: int
    cpu: str = ""
    cpus: tuple[int, ...] = ()

    @classmethod
    def here(cls) -> NodeMachine:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
        return cls(
            host=os.uname().nodename, cores=machine.cores(), cpu=processor.cpu_name(), cpus=tuple(sorted(allowed))
        )

    @property
    def kind(self) -> tuple[str, int]:
        """Machines of one kind have the same roofline."""
        return self.cpu or self.host, self.cores


class CoreUse(msgspec.Struct, frozen=True):
    """Whose the cores of a node were: the fields of the report's `cores`."""

    count: int = 1
    busy_s: float = 0.0
    waiting_s: float = 0.0
    others_s: float | None = None
    stolen_s: float | None = None
    idle_s: float | None = None
    stations: Mapping[str, float] = {}


class NodeReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a node reports of itself: totals since it joined.

    `snapshot`: its `stats.Snapshot` as msgpack (`packed`); empty: as in the report before. `elapsed_s`: on its own
    run's clock; 0 while it prepares. `starved_s`: in which its workload wanted units and none was left here, by the
    share of its places for units that were empty; `empty_s` of it in the present wait, which has lasted `idle_s`.
    `room_s`: in which its workload waited since too many records were to be sent. `sending_s`: of all requests that
    carried records, of which there were `sendings`; `records_bytes` in all. `clock_offset_s`: its wall clock minus
    the coordinator's. `clock_share`: of the highest clock of its cores, what they run at now; None: not known.
    `figures`: of steps since the report before (`Progress.figures`).
    """

    snapshot: bytes = b""
    done: int = 0
    begun: float = 0.0
    counts: Mapping[str, float] = {}
    facts: Mapping[str, float] = {}
    failed: int | None = None
    failure: str = ""
    figures: Sequence[tuple[int, Mapping[str, float]]] = ()
    setup: bool = True
    phase: str = ""
    elapsed_s: float = 0.0
    setup_s: float = 0.0
    roofline: Roofline | None = None
    text_roofline: TextRoofline | None = None
    cores: CoreUse | None = None
    starved_s: float = 0.0
    idle_s: float = 0.0
    empty_s: float = 0.0
    room_s: float = 0.0
    sending_s: float = 0.0
    sendings: int = 0
    records_bytes: int = 0
    through_folder: bool = False
    clock_offset_s: float = 0.0
    clock_share: float | None = None


def packed(snapshot: Snapshot) -> bytes:
    """For `NodeReport.snapshot`."""
    return msgspec.msgpack.encode(snapshot)


def clock_share() -> float | None:
    """Of the highest clock of this machine's cores, what they run at now, on average; None where that is not known."""
    found = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
    return min(1.0, found.current / found.max) if found and found.max and found.current else None


def core_use(cores: Mapping[str, Any] | None) -> CoreUse | None:
    """Of `RunUpdate.cores`."""
    return None if cores is None else msgspec.convert(cores, CoreUse)
