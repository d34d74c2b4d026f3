"""Plans of runs whose every station sleeps, and what is planted into them: causes that are known exactly."""

from __future__ import annotations

import os
import random
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if (here := str(Path(__file__).parent)) not in sys.path:
    sys.path.insert(0, here)  # multiprocessing hands sys.path down: workers and server import `planted` and `sleepers`

from planted import Planted, service_s

from gpuinfer.api import Roofline, Setup
from gpuinfer.config import registry
from gpuinfer.runtime.run import run

STRETCH = float(os.environ.get("DIAGNOSIS_STRETCH", "1"))  # of all times: on a busy machine wakings come late
LASTS_S = 1.3 * STRETCH  # a run, about
BLOCKS = 3  # of each worker, in flight


@dataclass(frozen=True)
class Plan:
    """One run's settings: the workload's options, the backend's and the strategy's."""

    workload: Mapping[str, Any] = field(default_factory=dict)
    backend: Mapping[str, Any] = field(default_factory=lambda: {"in_flight": 2, "threads": 1})
    strategy: Mapping[str, Any] = field(default_factory=dict)
    roofline: bool = True

    def having(self, **options: Any) -> Plan:
        return replace(self, workload={**self.workload, **options})

    def advised(self, command: str) -> Plan:
        """With what a verdict's command adds to the words `run`."""
        plan, words = self, shlex.split(command)[1:]
        for flag, given in zip(words[::2], words[1::2], strict=True):
            key, _, number = given.partition("=")
            value: float = float(number) if key == "max_wait" else int(number or given)
            if flag == "-B":
                plan = replace(plan, backend={**plan.backend, key: value})
            elif flag == "-S":
                plan = replace(plan, strategy={**plan.strategy, key: value})
            else:
                plan = plan.having(**{flag.removeprefix("--").replace("-", "_"): value})
        return plan


def report_of(plan: Plan) -> dict[str, Any]:
    os.environ["OMP_WAIT_POLICY"] = "active"  # of the server and its threads: those without work keep their core
    workload = Planted(**plan.workload)
    spec = workload.model()
    setup = Setup(model=spec, devices=("cpu",), processes=workload.processes)
    backend = registry.load("backends", "central")(setup, **plan.backend)
    strategy = registry.load("strategies", "dynamic")(setup, **plan.strategy)
    named = {
        "workload": "planted", "backend": "central", "strategy": "dynamic",
        "planted": workload.options.model_dump(mode="json"),
        "backends": {"central": backend.options.model_dump()},
        "strategies": {"dynamic": strategy.options.model_dump()},
    }  # fmt: skip
    roofline = roofline_of(plan) if plan.roofline else False
    return run(workload, backend, strategy, settings=named, roofline=roofline, command="run")


def roofline_of(plan: Plan) -> Roofline:
    """Exact, of a model that sleeps."""
    given = Planted(**plan.workload).options
    seconds = service_s(given.knee, given.fixed_s, given.row_s, given.knee)
    lanes = plan.backend["in_flight"]
    return Roofline(lanes * given.knee / seconds, given.knee, f"{lanes} forwards × 1 thread")


# What a seed stands for


def healthy(chance: random.Random) -> Plan:
    """Enough blocks, workers that are quick enough, and a model that two blocks keep at its best."""
    rows, workers = chance.choice([32, 64, 96]), chance.choice([4, 5])
    batch_s, fixed = STRETCH * chance.uniform(0.016, 0.028), chance.uniform(0.55, 0.8)
    capacity = 4 / batch_s  # blocks a second
    search_s = workers / capacity * chance.uniform(0.3, 0.5)
    return Plan(
        {
            "workers": workers, "blocks": BLOCKS, "rows": rows, "search_rows": rows, "search_s": search_s,
            "fixed_s": fixed * batch_s, "row_s": (1 - fixed) * batch_s / (2 * rows), "knee": 2 * rows,
            "rounds": round(LASTS_S * capacity / workers / BLOCKS), "seed": chance.randrange(10**6),
        }
    )  # fmt: skip


def capacity_of(plan: Plan) -> float:
    """Blocks a second that the model can answer."""
    given = plan.workload
    return roofline_of(plan).rows_per_s / given["rows"]


def slow_model(base: Plan, chance: random.Random) -> Plan:
    times = chance.uniform(1.5, 3)
    given = base.workload
    return base.having(fixed_s=given["fixed_s"] * times, row_s=given["row_s"] * times)


def slow_search(base: Plan, chance: random.Random) -> Plan:
    return base.having(search_s=base.workload["workers"] / capacity_of(base) * chance.uniform(1.4, 2.5))


def slow_transfer(base: Plan, chance: random.Random) -> Plan:
    given = base.workload
    return base.having(transfer_s=(given["fixed_s"] + given["row_s"] * given["knee"]) * chance.uniform(1.3, 2.5))


def one_row_each(base: Plan, chance: random.Random) -> Plan:
    """32 clients with a row each, that think for no time."""
    rounds = round(LASTS_S / base.workload["fixed_s"])
    return base.having(rows=1, search_s=0.0, workers=4, blocks=chance.choice([4, 8]), rounds=rounds)


def long_timer(base: Plan, chance: random.Random) -> Plan:
    return replace(base, strategy={"max_wait": base.workload["search_s"] * chance.uniform(1.0, 2.0)})


def small_cap(base: Plan, chance: random.Random) -> Plan:
    if chance.random() < 0.5:
        return replace(base, strategy={"max_rows": base.workload["rows"]})
    return replace(base, backend={**base.backend, "max_rows": base.workload["rows"]})


def slow_worker(base: Plan, chance: random.Random) -> Plan:
    alone = base.workload["workers"] / capacity_of(base) / base.workload["search_s"]  # as slow as the model for all
    return base.having(slow=alone * chance.uniform(1.5, 2.5))


def many_threads(base: Plan, chance: random.Random) -> Plan:
    return replace(base, backend={**base.backend, "threads": chance.choice([6, 8])})


def starved(base: Plan, chance: random.Random) -> Plan:
    offered, given = capacity_of(base) * chance.uniform(0.2, 0.6), base.workload
    return base.having(offered=offered, rounds=round(LASTS_S * offered / given["workers"] / given["blocks"]))


def patient(base: Plan, chance: random.Random) -> Plan:
    """For the timer: searches that take long and as long as they like, and a model that is quick with any batch."""
    search_s, uneven = STRETCH * chance.uniform(0.03, 0.05), chance.choice([0.5, 0.8])
    quick = {"fixed_s": 0.003 * STRETCH, "row_s": 1e-5 * STRETCH, "knee": 1024}
    rounds = round(LASTS_S / search_s)
    return base.having(workers=6, blocks=1, search_s=search_s, uneven=uneven, rounds=rounds, **quick)


def computing(base: Plan, chance: random.Random) -> Plan:
    """For the threads: a model that computes."""
    few = {"workers": 2, "blocks": 2, "rows": 256, "search_rows": 256, "search_s": 0.001, "rounds": 60}
    return replace(base.having(model="sleepers:Burner", **few), roofline=False)


@dataclass(frozen=True)
class Plant:
    """What is planted into which base, and the class that it makes."""

    expected: str
    plant: Callable[[Plan, random.Random], Plan]
    base: Callable[[Plan, random.Random], Plan] = lambda base, chance: base
    base_is_healthy: bool = True
    cure: Callable[[Plan, Mapping[str, Any], Plan], Plan | None] = lambda plan, told, base: (
        plan.advised(told["command"]) if told["command"] else None
    )


def rows_advised(advice: str) -> int:
    found = re.search(r"([\d,]+) in each request", advice)
    return int(found[1].replace(",", "")) if found else 1


def larger(plan: Plan, told: Mapping[str, Any], base: Plan) -> Plan:
    return plan.having(rows=rows_advised(told["advice"]))


def nothing(plan: Plan, told: Mapping[str, Any], base: Plan) -> None:
    return None


PLANTS = {
    "slow model": Plant("device-saturated", slow_model, cure=nothing),
    "slow search": Plant("search-bound", slow_search),
    "slow transfer": Plant("transfer-bound", slow_transfer),
    "one row each": Plant("too few rows outstanding", one_row_each, cure=larger),
    "long timer": Plant("timer-bound", long_timer, patient, False),
    "small cap": Plant("batch cap too small", small_cap),
    "slow worker": Plant("imbalance between workers", slow_worker, cure=lambda plan, told, base: base),
    "oversubscribed threads": Plant("oversubscribed CPUs", many_threads, computing, False),
    "starved arrivals": Plant("arrival-bound", starved, cure=nothing),
}
