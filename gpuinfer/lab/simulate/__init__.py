"""The strategies on a virtual clock: a discrete-event simulation of engines, for capacity planning and for tests.

    outcome = simulate(Poisson(2000), ServiceModel(alpha=50e-6, beta=2e-3), Dynamic, Limits(64), requests=100_000)
    outcome.latency_s["p95"], outcome.served_rows_per_s, outcome.utilisation

Strategy, queue, admission and counters are the very objects that the engine uses; only clock and backend are made up.
"""

from gpuinfer.engine.arrivals import Arrivals, Bursty, ClosedLoop, Mix, Offer, Poisson, RecordedArrivals
from gpuinfer.lab.simulate.event_loop import simulate
from gpuinfer.lab.simulate.outcome import SimulationOutcome, Watch

__all__ = [
    "Arrivals",
    "Bursty",
    "ClosedLoop",
    "Mix",
    "Offer",
    "Poisson",
    "RecordedArrivals",
    "SimulationOutcome",
    "Watch",
    "simulate",
]
