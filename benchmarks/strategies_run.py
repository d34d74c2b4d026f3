"""One load under one strategy: on the real engine, and in the simulator with the same arrivals."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from gpuinfer.api import Backend, Limits, Setup, Strategy
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.backends.service_model import ServiceModel
from gpuinfer.backends.standin import StandIn
from gpuinfer.engine.trace_reader import Trace, read
from gpuinfer.lab.simulate import Arrivals, SimulationOutcome, simulate
from gpuinfer.lab.simulate.fitting import of_trace
from gpuinfer.runtime.run import run
from gpuinfer.strategies.adaptive import Adaptive
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.workloads.load import Load

Build = Callable[[], Strategy]
WAITS = (0.0, 0.001, 0.003, 0.01, 0.03)
SHARES = (0.125, 0.25, 0.5, 1.0)  # of the backend's max_rows


@dataclass(frozen=True)
class Place:
    """Where rows are served: a backend, its limits, and how long its batches take."""

    name: str
    backend: type[Backend]
    limits: Limits
    service: ServiceModel
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None

    @property
    def capacity(self) -> float:
        """Rows per second of full batches in all lanes."""
        return self.limits.in_flight * self.limits.max_rows / self.service.seconds(self.limits.max_rows)


def stand_in(service: ServiceModel, max_rows: int = 64, **options: Any) -> Place:
    """The service-time stand-in backend."""
    given = {
        "alpha": service.alpha,
        "beta": service.beta,
        "step_rows": service.step_rows,
        "step": service.step_s,
        "jitter": service.jitter,
        "max_rows": max_rows,
        **options,
    }
    return Place("stand-in", StandIn, Limits(max_rows), service, given)


def blobnet(max_rows: int = 64) -> Place:
    """The `blobnet` network in this process: its service times are those of a calibration run, at all sizes."""
    options = {"max_rows": max_rows, "in_flight": 1, "threads": 1}
    place = Place("blobnet", InProcess, Limits(max_rows), ServiceModel(beta=1.0), options, "blobnet")
    sizes: dict[str, float] = {}
    for clients in (1, 2, 4, 8, 16, 24, 32, 48, max_rows):
        report = live(place, Dynamic, clients=clients, duration=1.0)
        size = max(report["batches"]["seconds"], key=int)
        sizes[size] = report["batches"]["seconds"][size]
    points, longest = [], 0.0
    for size in sorted(sizes, key=int):
        longest = max(longest, sizes[size])
        points.append((int(size), longest))
    return Place("blobnet", InProcess, Limits(max_rows), ServiceModel(points=points, jitter=0.1), options, "blobnet")


def with_turn(place: Place, **load: Any) -> Place:
    """The place, its service model with what the engine needed between the batches of one run."""
    ran = of_trace(traced(place, Dynamic, **load)[1]).service
    return replace(place, service=replace(place.service, turn_s=ran.turn_s, turn_request_s=ran.turn_request_s))


def live(place: Place, strategy: Build, *, seed: int = 1, trace: Path | None = None, **load: Any) -> dict[str, Any]:
    """The report of one run on the real engine."""
    workload = Load(Setup(seed=seed), model=place.model, **load)
    setup = Setup(model=workload.model(), devices=("cpu",), seed=seed, trace=str(trace) if trace else None)
    built = strategy()
    return run(Load(setup, model=place.model, **load), place.backend(setup, **place.options), built, roofline=False)


def traced(place: Place, strategy: Build, *, seed: int = 1, **load: Any) -> tuple[dict[str, Any], Trace]:
    """The report, and what happened when."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.jsonl")
        report = live(place, strategy, seed=seed, trace=path, **load)
        return report, read(path)


def simulated(place: Place, strategy: Build, arrivals: Arrivals, *, seed: int = 1, **how: Any) -> SimulationOutcome:
    return simulate(arrivals, place.service, strategy, place.limits, seed=seed, warmup=0.0, **how)


def fixed_settings(place: Place) -> list[dict[str, Any]]:
    """Settings that somebody who tunes by hand would try."""
    rows = [max(1, round(share * place.limits.max_rows)) for share in SHARES]
    return [{"max_wait": wait, "max_rows": most} for wait, most in product(WAITS, rows)]


def best_fixed(
    place: Place, arrivals: Arrivals, target_s: float, *, count: int = 5, **how: Any
) -> list[dict[str, Any]]:
    """The best of them by the simulator: those that keep the target go first, then by mean latency."""

    def merit(options: Mapping[str, Any]) -> tuple[bool, float]:
        outcome = simulated(place, partial(Dynamic, **options), arrivals, **how)
        behind = outcome.served_rows_per_s < 0.97 * outcome.offered_rows_per_s
        return behind or outcome.latency_s["p95"] > target_s, outcome.latency_s["mean"]

    return sorted(fixed_settings(place), key=merit)[:count]


def adaptive(target_s: float | None) -> Build:
    return partial(Adaptive, latency_target=target_s)
