"""Data parallel against load balancing: one process over N devices, or N replicas behind the router.

    python benchmarks/data_parallel.py [--requests N] [--real] [--rounds N]

On the virtual clock of `gpuinfer simulate`: one engine whose lanes are the slots, or batches, of four devices, against
four replicas, whose requests wait there or in the router. Autoregressive: 8 slots a device, answers of very different
length. Diffusion: a batch of up to 8 rows a device, all of them finished together. Networks of rows: batches of 64.

`--real`: two devices that are the CPU's cores (`--device cpu,cpu`), against `--replicas 2`, with the built-in models
`tiny` and `tiny-llada`: clients that ask again as soon as they are answered, in turns. Machines are shared: the ratio
is taken within each pair of turns, and the median over the pairs is the figure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from fleet_turns import Body, Served, clients_of, closed_load, served

from gpuinfer.api import Limits
from gpuinfer.backends.service_model import ServiceModel
from gpuinfer.lab.simulate import Poisson, SimulationOutcome, simulate
from gpuinfer.lab.simulate.simulated_router import RoutingSetup
from gpuinfer.strategies.dynamic import Dynamic

DEVICES = 4
SEED = 1


class Case(NamedTuple):
    """What one device does. `limits`: its own."""

    service: ServiceModel
    limits: Limits


CASES = {
    "autoregressive": Case(ServiceModel(0.0, 1.0, jitter=1.0), Limits(1, 8)),
    "diffusion": Case(ServiceModel(0.25, 1.0), Limits(8, 1)),
    "rows": Case(ServiceModel(50e-6, 2e-3), Limits(64, 1)),
}
LOADS = (0.5, 0.8, 0.95)
ARRANGEMENTS = {
    "data parallel": (1, RoutingSetup()),
    "replicas": (DEVICES, RoutingSetup()),
    "replicas, global": (DEVICES, RoutingSetup(queue="global")),
}


def simulated(case: Case, arrangement: str, load: float, requests: int) -> SimulationOutcome:
    replicas, routing = ARRANGEMENTS[arrangement]
    limits = case.limits
    lanes = limits.in_flight * DEVICES // replicas
    capacity = case.service.capacity(limits.max_rows) * limits.in_flight * DEVICES
    return simulate(
        Poisson(load * capacity),
        case.service,
        Dynamic,
        Limits(limits.max_rows, lanes),
        replicas=replicas,
        routing=routing,
        requests=requests,
        seed=SEED,
    )


def table(requests: int) -> None:
    columns = [f"{name}: {what}" for name in ARRANGEMENTS for what in ("p50", "p95", "batch")]
    print(f"| | load | {' | '.join(columns)} |")
    print(f"|---|{'---:|' * (len(columns) + 1)}")
    for kind, case in CASES.items():
        for load in LOADS:
            cells = []
            for name in ARRANGEMENTS:
                outcome = simulated(case, name, load, requests)
                times = outcome.latency_s
                cells += [f"{times['p50']:.3g}", f"{times['p95']:.3g}", f"{outcome.mean_batch_rows:.1f}"]
            print(f"| {kind} | {load:.0%} | {' | '.join(cells)} |")


PATH, SLOTS, CLIENTS = "/v1/completions", 4, 16
REAL = {
    "data parallel": ("--device", "cpu,cpu"),
    "replicas": ("--replicas", "2"),
    "replicas, global": ("--replicas", "2", "--queue", "global"),
}
MODELS = {"autoregressive": "tiny", "diffusion": "tiny-llada"}


def real(rounds: int) -> None:
    print("| | arrangement | answers/s | to data parallel | p50 | p95 |\n|---|---|---:|---:|---:|---:|")
    for kind, model in MODELS.items():
        common = ["--model", model, "-B", f"slots={SLOTS}", "-B", "threads=1"]
        with contextlib.ExitStack() as stack:
            urls = {name: stack.enter_context(served(*common, *more)) for name, more in REAL.items()}
            found = asyncio.run(_in_turns(urls, rounds))
        first = next(iter(found.values()))
        for name, each in found.items():
            rate = statistics.median(one.per_s for one in each)
            ratio = statistics.median(one.per_s / other.per_s for one, other in zip(each, first, strict=True))
            times = " | ".join(f"{statistics.median(one.quantile(share) for one in each):.3f}" for share in (0.5, 0.95))
            print(f"| {kind} | {name} | {rate:.1f} | {ratio:.2f} | {times} |", flush=True)


async def _in_turns(urls: Mapping[str, str], rounds: int) -> dict[str, list[Served]]:
    found: dict[str, list[Served]] = {name: [] for name in urls}
    async with clients_of(urls) as clients:
        for round_ in range(rounds + 1):
            for name, client in clients.items():
                served_ = await closed_load(client, PATH, _bodies(round_), CLIENTS)
                if round_:  # the first is not counted: kernels are compiled, memory is touched for the first time
                    found[name].append(served_)
    return found


def _bodies(round_: int) -> list[Body]:
    """Prompts of one round, the same for each server: some answers are eight times as long as others."""
    lengths = (16, 16, 32, 128)
    return [
        ("normal", {"prompt": f"question {round_}.{number}", "seed": number, "max_tokens": lengths[number % 4]})
        for number in range(64)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=40_000, help="of each simulation")
    parser.add_argument("--real", action="store_true", help="real servers on the CPU, in turns")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    if given.real:
        real(given.rounds)
    else:
        table(given.requests)


if __name__ == "__main__":
    main()
