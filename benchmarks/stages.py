"""A model in stages against what it could be: the ideal of a pipeline, and whole models on the same cores.

    python benchmarks/stages.py [--case sleeping|blobnet] [--repeats N] [--seconds S] [--first] [--json FILE]

*sleeping*: a Sequential of 4 modules that sleep 5 ms, 16 micro-batches of one batch in flight. The time is held against
the ideal, in which m micro-batches over s stages take m + s - 1 steps of one stage; a step is what a stage was seen to
take in the same repeat (a system sleeps a little longer than it is told to). On a machine that others keep busy threads
wait to be woken: `--first` has this case's threads go first (SCHED_FIFO, which root may; they mostly sleep).

*blobnet*: rows per second of the network cut by `auto` into two stages of one core each, against two whole ones of one
core each (parallel=data, two forwards at once), both with blocks enough in flight, in turns. Machines are shared: the
ratio is taken within each pair of turns, and the median over the pairs is the figure. Beside it the same by processor
time, rows per second that the process ran on a core, which neighbours do not touch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch import nn

from gpuinfer.api import BackendContext, Limits, ModelSpec, Request, Setup
from gpuinfer.backends.inprocess import InProcess

STAGES, SLEEP_S, MICRO_BATCHES = 4, 0.005, 16
BLOCK_ROWS = 1024
BLOCKS = 4  # in flight
CORES = 2
BLOBNET = ModelSpec("blobnet", None, 300, "uint8", {"actions": 20, "seats": 4})


class Sleeps(nn.Module):
    """Takes as long whatever it is given, and notes how long that was."""

    slept: list[float] = []  # noqa: RUF012  of all of them

    def forward(self, x):  # type: ignore[no-untyped-def]
        started = time.perf_counter()
        time.sleep(SLEEP_S)
        self.slept.append(time.perf_counter() - started)
        return x


def sleeping_model() -> nn.Module:
    return nn.Sequential(*(Sleeps() for _ in range(STAGES)))


async def opened(spec: ModelSpec, **options: object) -> InProcess:
    backend = InProcess(Setup(spec, devices=("cpu",)), **options)
    await backend.start(BackendContext())
    return backend


async def sleeping(repeats: int) -> dict[str, object]:
    """Of the ideal, in each repeat."""
    spec = ModelSpec("stages:sleeping_model", None, 2)
    backend = await opened(spec, parallel="pipeline", stages=STAGES, micro_batch_rows=1)
    batch = [Request(np.ones((MICRO_BATCHES, 2), np.float32), MICRO_BATCHES)]
    shares = []
    for _ in range(repeats):
        Sleeps.slept.clear()
        started = time.perf_counter()
        await backend.infer(batch)
        taken = time.perf_counter() - started
        shares.append((MICRO_BATCHES + STAGES - 1) * statistics.median(Sleeps.slept) / taken)
    await backend.close()
    return {"case": "sleeping", "of_the_ideal": statistics.median(shares), "all": shares}


async def rate(backend: InProcess, seconds: float) -> tuple[float, float]:
    """Rows per second of the clock, and of processor time."""
    blocks = [
        np.random.default_rng(seed).integers(0, 2, (BLOCK_ROWS, BLOBNET.inputs), np.uint8) for seed in range(BLOCKS)
    ]
    until, rows = 0.0, 0
    limits: Limits = backend.limits
    lanes = asyncio.Semaphore(limits.in_flight)

    async def ask(block: np.ndarray) -> None:  # type: ignore[type-arg]
        nonlocal rows
        while time.perf_counter() < until:
            async with lanes:
                await backend.infer([Request(block, BLOCK_ROWS)])
            rows += BLOCK_ROWS

    until = time.perf_counter() + seconds / 4
    await asyncio.gather(*map(ask, blocks))  # warm
    rows, started, ran = 0, time.perf_counter(), time.process_time()
    until = started + seconds
    await asyncio.gather(*map(ask, blocks))
    return rows / (time.perf_counter() - started), rows / (time.process_time() - ran)


async def blobnet(repeats: int, seconds: float) -> dict[str, object]:
    """The pipeline by whole models on the same cores, pair by pair."""
    whole = await opened(BLOBNET, threads=1, in_flight=CORES)
    cut = await opened(BLOBNET, parallel="pipeline", stages=CORES, threads=1)
    layers = [stage["layers"] for stage in cut.device()["parallel"]["stages"]]
    ratios, by_processor, rates = [], [], []
    for repeat in range(repeats):
        order = (whole, cut) if repeat % 2 == 0 else (cut, whole)
        found = {id(backend): await rate(backend, seconds) for backend in order}
        (data, data_cpu), (staged, staged_cpu) = found[id(whole)], found[id(cut)]
        ratios.append(staged / data)
        by_processor.append(staged_cpu / data_cpu)
        rates.append((data, staged))
    counts = cut.device()["stages"]
    await whole.close()
    await cut.close()
    return {
        "case": "blobnet",
        "of_data_parallel": statistics.median(ratios),
        "by_processor_time": statistics.median(by_processor),
        "all": ratios,
        "rows_per_s": rates,
        "layers": layers,
        "micro_batches": counts["micro_batches"],
    }


@contextlib.contextmanager
def going_first(wanted: bool) -> Iterator[None]:
    """Threads that begin in here run as soon as they can."""
    if wanted:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    yield
    if wanted:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=["sleeping", "blobnet"])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn")
    parser.add_argument("--first", action="store_true", help="of sleeping: before all other programs")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    sys.modules["stages"] = sys.modules["__main__"]  # so that the model of this file is found by its name
    cases = given.case or ["sleeping", "blobnet"]
    found = []
    for case in cases:
        once = sleeping(given.repeats) if case == "sleeping" else blobnet(given.repeats, given.seconds)
        with going_first(given.first and case == "sleeping"):
            found.append(asyncio.run(once))
        print(json.dumps(found[-1], indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
