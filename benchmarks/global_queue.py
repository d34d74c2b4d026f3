"""Where requests wait: at each replica, or in the router for the first one with room.

    python benchmarks/global_queue.py [--requests N] [--real] [--rounds N]

On the virtual clock of `gpuinfer simulate`, with the router's own queue and policies: answers of like and of very
different length, replicas of 8 slots and of one, and networks of rows whose batches gain by being large. p95 is of all
requests, and of the fifth that is of the high class; seconds. The same seed meets the same load in each column.

`--real`: two replicas of a stand-in with one slot, whose answers take 30 ms with a jitter of 1, behind the real
router, at nine tenths of what they can answer, a fifth of the requests of the high class; in turns, the median of the
rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from fleet_turns import Body, Served, clients_of, open_load, served

from gpuinfer.api import Limits, Priority
from gpuinfer.backends.service_model import ServiceModel
from gpuinfer.lab.simulate import Mix, Poisson, SimulationOutcome, simulate
from gpuinfer.lab.simulate.simulated_router import RoutingSetup
from gpuinfer.stats import summarise
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.strategies.priority import ByPriority


class Case(NamedTuple):
    """`load`: of what the replicas can answer."""

    name: str
    load: float
    service: ServiceModel
    limits: Limits
    replicas: int = 4


SLOTS, ONE, ROWS = Limits(1, 8), Limits(1, 1), Limits(64, 1)
LIKE, APART = ServiceModel(0.0, 1.0, jitter=0.1), ServiceModel(0.0, 1.0, jitter=1.0)
BATCHES = ServiceModel(50e-6, 2e-3)
CASES = [
    Case("8 slots, like lengths", 0.75, LIKE, SLOTS),
    Case("8 slots, like lengths", 0.95, LIKE, SLOTS),
    Case("8 slots, lengths apart", 0.95, APART, SLOTS),
    Case("1 slot, like lengths", 0.9, LIKE, ONE, 8),
    Case("1 slot, lengths apart", 0.9, APART, ONE, 8),
    Case("1 slot, overloaded", 1.2, APART, ONE, 8),
    Case("rows, batches of 64", 0.6, BATCHES, ROWS),
    Case("rows, batches of 64", 0.95, BATCHES, ROWS),
]
ARRANGEMENTS = {
    "round-robin": (RoutingSetup("round-robin"), Dynamic),
    "least-loaded": (RoutingSetup(), Dynamic),
    "and -S priority": (RoutingSetup(), ByPriority),
    "global": (RoutingSetup(queue="global"), Dynamic),
}
CLASSES = {Priority.HIGH: 0.2, Priority.NORMAL: 0.8}
WAITING = 4096  # rows or requests, in all queues together
SEED = 1


def simulated(case: Case, arrangement: str, requests: int) -> SimulationOutcome:
    routing, strategy = ARRANGEMENTS[arrangement]
    capacity = case.service.capacity(case.limits.max_rows) * case.limits.in_flight * case.replicas
    return simulate(
        Poisson(case.load * capacity, Mix(classes=CLASSES)),
        case.service,
        strategy,
        case.limits,
        replicas=case.replicas,
        routing=routing._replace(queue_limit=WAITING),
        requests=requests,
        seed=SEED,
        max_queue_rows=WAITING // case.replicas,
    )


def table(requests: int) -> None:
    columns = [f"{name}: {what}" for name in ARRANGEMENTS for what in ("p95", "high")]
    print(f"| | load | {' | '.join(columns)} |")
    print(f"|---|{'---:|' * (len(columns) + 1)}")
    for case in CASES:
        cells = []
        for name in ARRANGEMENTS:
            outcome = simulated(case, name, requests)
            high = simulated_p95(outcome, "high")
            cells += [f"{outcome.latency_s['p95']:.3g}", f"{high:.3g}"]
        print(f"| {case.name} | {case.load:.0%} | {' | '.join(cells)} |")


def simulated_p95(outcome: SimulationOutcome, name: str) -> float:
    return summarise(outcome.snapshot.classes[name]["latency"]).get("p95", float("nan"))


REPLICAS, ANSWER_S, REAL_LOAD = 2, 0.03, 0.9
PATH = "/v1/evaluate"
REAL = {"replica": (), "global": ("--queue", "global")}


def real(rounds: int, requests: int) -> None:
    common = ["--model", "blobnet", "--features", "53", "--replicas", str(REPLICAS), "--backend", "standin"]
    common += ["-B", "max_rows=1", "-B", "alpha=0", "-B", f"beta={ANSWER_S}", "-B", "jitter=1"]
    with contextlib.ExitStack() as stack:
        urls = {name: stack.enter_context(served(*common, *more)) for name, more in REAL.items()}
        found = asyncio.run(_in_turns(urls, rounds, requests))
    print("| queue | answers/s | p50 | p95 | p95 of the high class | refused |\n|---|---:|---:|---:|---:|---:|")
    for name, each in found.items():
        middle = [statistics.median(one.quantile(*of) for one in each) for of in ((0.5,), (0.95,), (0.95, "high"))]
        rate = statistics.median(one.per_s for one in each)
        times = " | ".join(f"{one:.3f}" for one in middle)
        print(f"| {name} | {rate:.1f} | {times} | {sum(one.refused for one in each)} |")


async def _in_turns(urls: Mapping[str, str], rounds: int, requests: int) -> dict[str, list[Served]]:
    row = {"x": [0.0] * 53}
    bodies: list[Body] = [("high" if number % 5 == 0 else "normal", row) for number in range(requests)]
    found: dict[str, list[Served]] = {name: [] for name in urls}
    async with clients_of(urls) as clients:
        for round_ in range(rounds):
            for name, client in clients.items():
                per_s = REAL_LOAD * REPLICAS / ANSWER_S
                found[name].append(await open_load(client, PATH, bodies, per_s, round_))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=40_000, help="of each simulation")
    parser.add_argument("--real", action="store_true", help="the real router before stand-ins, in turns")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.real:
        real(given.rounds, 400)
    else:
        table(given.requests)


if __name__ == "__main__":
    main()
