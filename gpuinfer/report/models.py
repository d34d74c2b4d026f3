"""Several models in one run: a line each, of what it did and what it had of the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gpuinfer.stats import ERRORS, Snapshot, summarise
from gpuinfer.student import reach


def lines(snapshot: Snapshot, wall_s: float) -> list[dict[str, Any]]:
    """Of each model of several; none where there is one. Times in seconds, sizes in rows.

    `device_share` is of the device time that all of them had, `share` what it may have of it while the others want it
    too. `turn_wait_s` is for how long its forwards waited for others'. `at_once`: how many times as much it got done
    while models ran at once as while they took turns, where both have been looked at.
    """
    total = math.fsum(line["device_s"] for line in snapshot.models.values())
    return [_line(name, line, total, wall_s) for name, line in snapshot.models.items()]


def _line(name: str, line: Mapping[str, Any], total: float, wall_s: float) -> dict[str, Any]:
    return {
        "name": name,
        "kind": line["kind"],
        "share": line["share"],
        "requests": line["requests"],
        "rows": line["rows"],
        "rows_per_s": line["rows"] / wall_s if wall_s > 0 else 0.0,
        "input_tokens": line["tokens"].get("input", 0),
        "output_tokens": line["tokens"].get("output", 0),
        "device_s": line["device_s"],
        "device_share": line["device_s"] / total if total else 0.0,
        "turn_wait_s": line["turn_wait_s"],
        "at_once": _at_once(line.get("sharing", {})),
        "queue_wait_s": summarise(line["queue_wait"]),
        "latency_s": summarise(line["latency"]),
        "waiting_rows": line["waiting"],
        "errors": {kind: line["errors"].get(kind, 0) for kind in ERRORS},
    }


def _at_once(sharing: Mapping[str, float]) -> dict[str, float] | None:
    """By the pairs of looks that were taken (`gpuinfer.models.looks`), with the 95 % interval; two of them at least."""
    pairs, logs = int(sharing.get("pairs", 0)), sharing.get("pair_logs", 0.0)
    if pairs < 2:
        return None
    mean, half = logs / pairs, reach(pairs, logs, sharing.get("pair_squares", 0.0))
    together_s = sharing.get("together_s", 0.0)
    return {
        "times": math.exp(mean),
        "low": math.exp(mean - half),
        "high": math.exp(mean + half),
        "pairs": pairs,
        "time_share": sharing.get("at_once_s", 0.0) / together_s if together_s else 0.0,
    }
