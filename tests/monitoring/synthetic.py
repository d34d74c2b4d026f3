"""Snapshots that move like those of a server under load, for tests of what shows them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from gpuinfer.stats import ClassCount, Histogram, Lane, Snapshot, merge_histograms, of_model

TIMES = {"forward": 0.72, "transfer": 0.06, "encode": 0.04, "idle": 0.18}
STEPS = {"rows": 16, "output_tokens": 48, "committed": 64, "idle": 1, "positions": 2_688, "tokens": 680}  # of an answer


class Server:
    """A server of text that does not exist: `step(seconds)` lets it work for so long."""

    def __init__(self, seed: int = 1, model: str = "tiny-llama") -> None:
        self._dice, self._model = random.Random(seed), model
        self._now = 0.0
        self._classes = {name: ClassCount() for name in ("high", "normal")}
        self._first, self._between = Histogram(), Histogram()
        self._batches: dict[int, int] = {}
        self._batch_s: dict[int, list[float]] = {}
        self._reasons = {"free": 0, "full": 0, "waited": 0}
        self._tokens = {"input": 0, "output": 0}
        self._steps: dict[str, int] = {}
        self._lane = Lane("forward 0", clock=lambda: self._now)
        self._prompts = Lane("prompts 0", clock=lambda: self._now)

    def step(self, seconds: float = 1.0, requests: int = 40) -> Snapshot:
        """What it has counted once it has worked on for so long, and answered so many."""
        for station, share in TIMES.items():
            self._lane.enter(station)
            self._prompts.enter("understand" if station == "encode" else "idle")
            self._now += seconds * share
        for _ in range(requests):
            self._answer()
        return self.snapshot()

    def _answer(self) -> None:
        count = self._classes[self._dice.choice(["high", "normal", "normal"])]
        count.requests, count.rows = count.requests + 1, count.rows + 1
        count.latency.add(self._dice.lognormvariate(-1.2, 0.4))
        count.queue_wait.add(self._dice.lognormvariate(-4, 0.8))
        self._first.add(self._dice.lognormvariate(-3, 0.5))
        self._between.add(self._dice.lognormvariate(-4.6, 0.3))
        if self._dice.random() < 0.02:
            count.errors[self._dice.choice(["rejected", "expired", "cancelled"])] += 1
        size = min(32, int(self._dice.lognormvariate(2.2, 0.7)) + 1)
        self._batches[size] = self._batches.get(size, 0) + 1
        spent = self._batch_s.setdefault(size, [0, 0.0])
        spent[0], spent[1] = spent[0] + 1, spent[1] + 0.02
        self._reasons[self._dice.choice(["free", "free", "full", "waited"])] += 1
        self._tokens["input"] += 120
        self._tokens["output"] += 48
        for name, count in STEPS.items():
            self._steps[name] = self._steps.get(name, 0) + count

    def snapshot(self, **changes: Any) -> Snapshot:
        wires = {name: count.to_wire() for name, count in self._classes.items()}
        device: Mapping[str, Any] = {
            "name": "NVIDIA H100 80GB HBM3",
            "utilisation": 0.87,
            "allocated_mb": 41_300.0,
            "reserved_mb": 60_100.0,
            "tokens": dict(self._tokens),
            "steps": dict(self._steps),
            "model": {"name": self._model},
            "devices": {
                "cuda:0": {"rows": 1200, "batches": 40, "busy_s": 3.0, "copies": 1, "failed": ""},
                "cuda:1": {"rows": 300, "batches": 10, "busy_s": 1.0, "copies": 1, "failed": "CUDA error"},
            },
        }
        values = {
            "requests": sum(count.requests for count in self._classes.values()),
            "rows": sum(count.rows for count in self._classes.values()),
            "batches": dict(self._batches),
            "batch_s": {size: list(spent) for size, spent in self._batch_s.items()},
            "reasons": dict(self._reasons),
            "latency": merge_histograms(wire["latency"] for wire in wires.values()),
            "queue_wait": merge_histograms(wire["queue_wait"] for wire in wires.values()),
            "first_token": self._first.to_wire(),
            "between_tokens": self._between.to_wire(),
            "errors": {
                kind: sum(wire["errors"][kind] for wire in wires.values())
                for kind in next(iter(wires.values()))["errors"]
            },
            "classes": wires,
            "waiting": self._dice.randrange(12),
            "slots": 32,
            "lanes": (self._lane.to_wire(), self._prompts.to_wire()),
            "rss_peak_mb": 1_830.0,
            "device": device,
        }
        values["models"] = {name: of_model(Snapshot(**values), "text", 1.0) for name in ("chat", "small")}
        return Snapshot(**{**values, **changes})


def worker(number: int, **changes: Any) -> dict[str, Any]:
    """A replica as a fleet tells of it."""
    return {
        "id": number,
        "index": number,
        "url": f"http://127.0.0.1:{41000 + number}",
        "state": "up",
        "healthy": True,
        "requests_served": 1000 + number,
        "errors": 0,
        "in_flight": 3,
        "breaker": "closed",
        "restarts": 0,
        "retried": 0,
        "resumed": 0,
        "last_event": "",
        **changes,
    }
