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
    if isinstance(values.get("roofline"), dict):
        values["roofline"] = Roofline(**values["roofline"])
    return Evidence(**values)


RUNS = {row["run"]: a_run(row["of"], **row["given"]) for row in TABLE["runs"]}
EXPECTED = {row["run"]: row for row in TABLE["runs"]}
