"""What the replicas have counted together, as plain JSON. Times in seconds, sizes in rows."""

from __future__ import annotations

from typing import Any

from gpuinfer.report import models, report
from gpuinfer.stats import ERRORS, Snapshot, summarise, tokens_of


def figures(snapshot: Snapshot, seconds: float, recent: Snapshot) -> dict[str, Any]:
    """`recent`: what was counted in the last so many seconds. Fields are those of the report."""
    counts = {"requests": recent.requests, "rows": recent.rows, **tokens_of(recent)}
    rates = {f"{name}_per_s": count / seconds if seconds else 0.0 for name, count in counts.items()}
    return {
        "requests": snapshot.requests,
        "rows": snapshot.rows,
        "waiting_rows": snapshot.waiting,
        "slots": snapshot.slots or None,
        "throughput": {"over_s": seconds, **rates},
        "batches": report.batches(snapshot),
        "latency_s": summarise(snapshot.latency),
        "queue_wait_s": summarise(snapshot.queue_wait),
        "first_token_s": summarise(snapshot.first_token),
        "between_tokens_s": summarise(snapshot.between_tokens),
        "tokens": tokens_of(snapshot),
        "unmasking": report.unmasking(snapshot),
        "models": models.lines(snapshot, 0.0),
        "errors": {name: snapshot.errors.get(name, 0) for name in ERRORS},
        "notices": list(snapshot.notices),
    }
