"""What `--json` writes of simulations (`gpuinfer.simulation/1`), in plain values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gpuinfer import __version__
from gpuinfer.api import Reason
from gpuinfer.simulate.outcome import Outcome
from gpuinfer.simulate.solving import LEAST_SERVED, Solution
from gpuinfer.stats import ERRORS, FLOOR, SUB_BUCKETS, Snapshot, mean_size, percentile, summarise

SCHEMA = "gpuinfer.simulation/1"
STEP = 0.01  # between two points of a distribution


def document(command: str, seed: int, runs: Sequence[dict[str, Any]], solution: Solution | None) -> dict[str, Any]:
    """`runs` are made by `run`."""
    return {
        "schema": SCHEMA,
        "gpuinfer": __version__,
        "command": command,
        "seed": seed,
        "runs": list(runs),
        "solve": None if solution is None else _solve(solution),
    }


def run(settings: Mapping[str, str], strategy: str, outcome: Outcome, target_s: float | None) -> dict[str, Any]:
    """One simulation; `settings` are those in which it differs from the others."""
    snapshot = outcome.snapshot
    p95 = outcome.latency_s.get("p95", math.inf)
    return {
        "settings": dict(settings),
        "strategy": strategy,
        "replicas": len(outcome.replicas),
        "simulated_s": outcome.seconds,
        "offered": {"requests": outcome.offered_requests, "rows_per_s": outcome.offered_rows_per_s},
        "throughput": {"rows_per_s": outcome.served_rows_per_s, "requests_per_s": outcome.served_requests_per_s},
        "served_share": outcome.served_share,
        "capacity_rows_per_s": outcome.capacity_rows_per_s,
        "utilisation": outcome.utilisation,
        "batches": batches(snapshot),
        "latency_s": outcome.latency_s,
        "latency_cdf": cdf(snapshot.latency),
        "queue_wait_s": outcome.queue_wait_s,
        "classes": {name: _of_class(count) for name, count in snapshot.classes.items()},
        "errors": {name: snapshot.errors.get(name, 0) for name in ERRORS},
        "target_s": target_s,
        "met": None if target_s is None else p95 <= target_s and outcome.served_share >= LEAST_SERVED,
        "notices": list(outcome.notices),
    }


def batches(snapshot: Snapshot) -> dict[str, Any]:
    """As in the report of a run: sizes in doublings, seconds by rows; null where no batch ran."""
    count, sizes = sum(snapshot.batches.values()), Counter[int]()
    for rows, times in snapshot.batches.items():
        sizes[1 << max(0, rows - 1).bit_length()] += times
    return {
        "count": count,
        "rows_mean": mean_size(snapshot.batches) if count else None,
        "rows_p50": percentile(snapshot.batches, 0.5) if count else None,
        "rows_max": max(snapshot.batches) if count else None,
        "sizes": {str(size): times for size, times in sorted(sizes.items())},
        "seconds": {str(rows): spent[1] / spent[0] for rows, spent in sorted(snapshot.batch_s.items()) if spent[0]},
        "reasons": {reason.value: snapshot.reasons.get(reason.value, 0) for reason in Reason},
    }


def cdf(histogram: Mapping[str, Any]) -> list[tuple[float, float]]:
    """(seconds, share of the requests that took no longer), at most about a hundred points."""
    counts, points, seen = histogram["counts"], [], 0
    total, last = sum(counts.values()), 0.0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen / total >= last + STEP or seen == total:
            last = seen / total
            points.append((min(FLOOR * 2 ** ((bucket + 1) / SUB_BUCKETS), histogram["max"]), last))
    return points


def _of_class(count: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **summarise(count["latency"]),
        "requests": count["requests"],
        "rows": count["rows"],
        "errors": {name: count["errors"].get(name, 0) for name in ERRORS},
        "queue_wait_s": summarise(count["queue_wait"]),
    }


def _solve(solution: Solution) -> dict[str, Any]:
    return {
        "target_s": solution.target_s,
        "least_served": LEAST_SERVED,
        "replicas": solution.replicas,
        "answer": solution.answer,
        "tried": [
            {
                "replicas": trial.replicas,
                "p95_s": trial.p95 if trial.p95 < math.inf else None,
                "served_share": trial.outcome.served_share,
                "met": trial.met,
            }
            for trial in solution.tried
        ],
    }
