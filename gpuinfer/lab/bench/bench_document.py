"""The document of a comparison (`gpuinfer.bench/1`): what `--json` and `--report` write. `schema.json` describes it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
from typing import Any

from gpuinfer.lab.bench import comparison as words
from gpuinfer.lab.bench import generators_tables
from gpuinfer.lab.bench.comparison import Comparison, Standing, against
from gpuinfer.lab.bench.measurement import Interval
from gpuinfer.lab.bench.parity import Parity
from gpuinfer.lab.bench.series import SeriesOutcome, SeriesPlan
from gpuinfer.lab.serve_bench import load_tables

SCHEMA = "gpuinfer.bench/1"


def bench_schema() -> dict[str, Any]:
    """The JSON Schema of a document; its runs are reports of `gpuinfer.report/1`."""
    loaded: dict[str, Any] = json.loads(
        resources.files("gpuinfer.lab.bench").joinpath("schema.json").read_text("utf-8")
    )
    return loaded


def bench_document(
    target: str, outcome: SeriesOutcome, comparison: Comparison, series_plan: SeriesPlan, started_at: str
) -> dict[str, Any]:
    """The document, in plain values."""
    winner = comparison.winner
    failed = {
        **outcome.failed,
        **{
            name: f"it counts {words.metric_unit(metric)}, which the others have none of. Compare it with its like."
            for name, metric in comparison.odd.items()
        },
    }
    return {
        "schema": SCHEMA,
        "target": target,
        "of_load": any(one.of_load for one in outcome.runs),
        "started_at": started_at,
        "status": "partial" if outcome.stopped else "failed" if failed else "done",
        "course": asdict(series_plan),
        "environment": outcome.runs[0].report["environment"] if outcome.runs else None,
        "runs": [one.report for one in outcome.runs],
        "samples": [
            {"variant": one.variant, "repeat": one.repeat, "seed": one.seed, "metric": one.metric, "rate": one.rate}
            for one in outcome.runs
        ],
        "comparison": [_row(row, comparison, outcome.parity.get(row.name)) for row in comparison.rows],
        "skipped": [{"name": name, "reason": reason} for name, reason in outcome.skipped.items()],
        "failed": [{"name": name, "reason": reason} for name, reason in failed.items()],
        "winner": winner.name if winner else None,
        "ties": [row.name for row in comparison.ties],
        "verdict": words.comparison_verdict(comparison),
        "why": comparison.why,
        "command": winner.variant.command if winner else None,
    }


def _row(row: Standing, comparison: Comparison, parity: Parity | None) -> dict[str, Any]:
    batches, roofline = row.report["batches"], row.report["roofline"]
    return {
        "name": row.name,
        "settings": dict(row.variant.settings),
        "command": row.variant.command,
        "metric": row.metric,
        "rates": list(row.rates.values()),
        "median": row.speed.median,
        "ci95": row.speed.ends,
        "ratio_to_first": _number(row.to_first),
        "ratio_ci95": row.to_first.ends,
        "keeps_up": row.keeps_up,
        "standing": "first" if row is comparison.rows[0] else row.standing,
        "ratio_to_winner": _number(against(row, comparison.winner)) if comparison.winner else None,
        "rows_per_s": row.served,
        "latency_s": dict(row.report["latency_s"]),
        "rows_per_batch": batches["rows_mean"],
        "rows_per_batch_to_first": words.batch_ratio(row, comparison.rows[0]),
        "reasons": {name: count for name, count in batches["reasons"].items() if count},
        "efficiency": roofline["efficiency"] if roofline else None,
        "exceeded": roofline["rows_per_s"] / max(roofline["measured"])
        if roofline and bool(roofline["raised"] and roofline.get("measured"))
        else None,
        "bottleneck": {name: row.report["bottleneck"][name] for name in ("class", "why")},
        "parity": None if parity is None else _parity(parity),
    }


def _parity(parity: Parity) -> dict[str, Any]:
    """JSON knows no infinity: answers of another shape have no difference."""
    difference = parity.difference if math.isfinite(parity.difference) else None
    return {"difference": difference, "tolerance": parity.tolerance, "rows": parity.rows, "holds": parity.holds}


def _number(ratio: Interval) -> float | None:
    return ratio.median if math.isfinite(ratio.median) else None


def variants_below(document: Mapping[str, Any], least: float) -> list[str]:
    """The variants that are not at least `least` times as good as the first, by the metric, those that do not keep up
    with the load, and those that could not be measured. Of generators: where ours is not so many times as fast; of
    numbers of replicas: which are not so efficient.
    """
    if "grid" in document:
        slow = generators_tables.generators_below(document, least)
    elif document.get("serve", {}).get("scaling"):
        slow = load_tables.replicas_below(document, least)
    else:
        slow = [
            row["name"]
            for row in document["comparison"]
            if row["standing"] != "first" and ((row["ratio_to_first"] or 0.0) < least or not row["keeps_up"])
        ]
    return [*slow, *(one["name"] for one in (*document["skipped"], *document["failed"]))]


def wrong_variants(document: Mapping[str, Any]) -> list[str]:
    """The variants whose answers are not the model's."""
    return [row["name"] for row in document["comparison"] if row["parity"] and not row["parity"]["holds"]]
