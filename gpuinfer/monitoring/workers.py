"""The replicas of a fleet as metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpuinfer.monitoring.families import Family, Labels, Value

BREAKER = ("closed", "half-open", "open")
COUNTED = (
    ("requests", "requests_served", "Requests that a replica has answered through the router."),
    ("errors", "errors", "Requests at which a replica itself has failed."),
    ("retried", "retried", "Requests that were sent elsewhere after this replica failed them."),
    ("resumed", "resumed", "Streams that were taken up elsewhere after this replica broke off."),
    ("restarts", "restarts", "How often a replica was started again."),
)


def of_workers(workers: Sequence[Mapping[str, Any]]) -> Iterator[Family]:
    """Families of a fleet's replicas, each labelled `worker` with its `id`.

    `workers` are those of `/stats`: {index or id, url, healthy, requests_served, errors, in_flight} and, where they
    are known, {breaker, restarts, retried, resumed}. There is one series for each replica that is there now.
    """
    named = [({"worker": name_of(worker)}, worker) for worker in workers]
    up: list[tuple[Labels, Value]] = [(labels, float(bool(worker.get("healthy")))) for labels, worker in named]
    yield Family("gpuinfer_worker_up", "Whether a replica is healthy and takes requests.", "gauge", up)
    for name, key, told in COUNTED:
        counts = [(labels, float(worker.get(key) or 0)) for labels, worker in named]
        yield Family(f"gpuinfer_worker_{name}", told, "counter", counts)
    load = [(labels, float(worker.get("in_flight") or 0)) for labels, worker in named]
    yield Family("gpuinfer_worker_in_flight", "Requests that a replica is answering now.", "gauge", load)
    states = [
        ({**labels, "state": state}, float(worker.get("breaker", "closed") == state))
        for labels, worker in named
        for state in BREAKER
    ]
    yield Family("gpuinfer_worker_breaker_state", "1 for the state of its circuit breaker.", "gauge", states)


def name_of(worker: Mapping[str, Any]) -> str:
    """What a replica is called on the page and in metrics: its number in the fleet."""
    return str(worker.get("id", worker.get("index", "")))
