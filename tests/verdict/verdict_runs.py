"""Reads `runs.json`: constructed runs, what differs from a base in each, and the verdict that each of them gets.

Of a run: `of` its base, `given` fields of `Evidence`, `class` of its verdict, `said` in its sentences, and what its
command `adds`. A lane is given as `{station: seconds}`; it was idle for the rest of ten seconds, and 10 ms are a
visit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuinfer.api import Roofline
from gpuinfer.report.evidence import Evidence

# What each line of a `NodeLine` and each section of a `ClusterSection` has unless a run says otherwise
NODE = {
    "node": "0", "host": "host0", "cpu": "a processor", "cores": 4, "gpuinfer": "1", "state": "working",
    "joined_s": 0.0, "start_up_s": 0.0, "left_s": None, "why": None, "restarts": 0, "units": 100, "units_per_s": 1.0,
    "rows_per_s": 100.0, "relative": 1.0, "starved_share": 0.0, "records_share": 0.0, "records": "wire",
    "efficiency": None, "rows_mean": 64.0, "latency_s": {}, "others_cores": 0.0, "waited_share": 0.0,
    "clock_share": 1.0, "clock_offset_s": 0.0,
}  # fmt: skip
TIME = {"working": 0.0, "starting": 0.0, "starved": 0.0, "records": 0.0, "tail": 0.0, "gone": 0.0}
RANGES = {"count": 40, "units_mean": 10.0, "mean_s": 10.0, "returned": 0, "stolen": 0, "copied": 0, "duplicates": 0}


def a_cluster(nodes: list[dict[str, Any]], time: dict[str, float], **given: Any) -> dict[str, Any]:
    """The report's `cluster` of a run of 100 s; what `time` leaves is work."""
    lines = [{**NODE, "node": f"{index}", "host": f"host{index}", **one} for index, one in enumerate(nodes)]
    usual = {
        "unit": "games", "wall_s": 100.0, "nodes": lines, "slowest": None, "start_up_s": 0.0, "tail_s": 0.0,
        "tail_cost_s": 0.0, "twice": None, "wanted_cores": None,
        "time": {**TIME, **time, "working": 1 - sum(time.values())},
        "ranges": {**RANGES, **given.pop("ranges", {})},
        "records": {"bytes": 1000.0, "through_folder": 0.0, "sending_s": 0.01, **given.pop("records", {})},
        "coordinator": {
            "host": "host", "cpu_share": 0.01, "reading_share": 0.0, "keeping_share": 0.0,
            **given.pop("coordinator", {}),
        },
    }  # fmt: skip
    return usual | given


TABLE = json.loads(Path(__file__).with_name("runs.json").read_text("utf-8"))


def lane(name: str, visits: Mapping[str, int] | None = None, ran: Any = None, wall_s: float = 10.0, **stations) -> dict:
    counted = {station: round(seconds * 100) for station, seconds in stations.items()} if visits is None else visits
    found = {"name": name, "stations": {"idle": wall_s - sum(stations.values()), **stations}, "visits": counted}
    return found if ran is None else {**found, "ran": ran}


def a_run(base: str, **given: Any) -> Evidence:
    """A run of this base with other fields: `lanes` by name or as a sequence, batches by their rows."""
    values = {**TABLE["bases"].get(base, {}), **given}
    if isinstance(values.get("lanes"), dict):
        values["lanes"] = [lane(name, **stations) for name, stations in values["lanes"].items()]
    values["batch_s"] = {int(rows): list(seen) for rows, seen in values.get("batch_s", {}).items()}
    if "cluster" in values:
        values["cluster"] = a_cluster(**values["cluster"])
    if isinstance(values.get("roofline"), dict):
        values["roofline"] = Roofline(**values["roofline"])
    return Evidence(**values)


RUNS = {row["run"]: a_run(row["of"], **row["given"]) for row in TABLE["runs"]}
EXPECTED = {row["run"]: row for row in TABLE["runs"]}
