"""Whose the cores were, in seconds of all of them: this program's stations, other programs, nobody."""

from __future__ import annotations

import math
from typing import Any

from gpuinfer.host import machine
from gpuinfer.host.neighbours import CoreTime
from gpuinfer.stats import Snapshot

COMPUTING = ("forward", "prefill")  # stations in which a forward's other threads compute too


def cores(snapshot: Snapshot, wall_s: float, used: CoreTime | None) -> dict[str, Any]:
    """`{count, busy_s, waiting_s, others_s, stolen_s, idle_s, stations}` of a stretch of `wall_s` seconds.

    Busy, others, stolen and idle sum to `wall_s` × count. Where the system does not tell of other programs (`used` is
    None), the last three are None.

    `waiting_s` is beside that sum: threads of ours that were ready to run and had no core, which somebody else had.
    `stations` share out what is known of `busy_s`; the rest went to threads that are in no lane, event loops above all.
    """
    count = machine.cores()
    all_s = wall_s * count
    others = stolen = idle = None
    busy = min(snapshot.cpu_s if used is None else used.ours, all_s)
    if used is not None:
        others = min(used.others, all_s - busy)
        stolen = min(used.stolen, all_s - busy - others)
        idle = all_s - busy - others - stolen
    return {
        "count": count,
        "busy_s": busy,
        "waiting_s": snapshot.cpu_wait_s,
        "others_s": others,
        "stolen_s": stolen,
        "idle_s": idle,
        "stations": on_cores(snapshot, busy),
    }


def on_cores(snapshot: Snapshot, busy_s: float) -> dict[str, float]:
    """Seconds on a core of each station, over all lanes: `busy_s` at most. A forward of several threads is one lane,
    whose thread knows nothing of the others; they are taken to have run as long as it, as far as that many seconds ran.
    """
    ran: dict[str, float] = {}
    for lane in snapshot.lanes:
        for station, spent in lane.get("ran", {}).items():
            ran[station] = ran.get(station, 0.0) + max(0.0, spent)
    total = math.fsum(ran.values())
    if total > busy_s:
        return {station: spent * busy_s / total for station, spent in ran.items()}
    others = (snapshot.device.get("threads") or 1) - 1
    computed = math.fsum(ran.get(station, 0.0) for station in COMPUTING)
    if others and computed:
        factor = 1 + min(others, (busy_s - total) / computed)
        ran |= {station: factor * ran[station] for station in COMPUTING if station in ran}
    return {station: spent for station, spent in ran.items() if spent}
