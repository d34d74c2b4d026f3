"""What the engine itself costs: requests a second with a backend that does nothing, and the round trip of one block.

    python benchmarks/engine.py [--requests N] [--repeats N]

Engine, strategy and clients share one core. A client submits, waits for its answer, and submits again.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence

from gpuinfer.api import Backend, Limits, Request, Result
from gpuinfer.engine import Engine
from gpuinfer.strategies.dynamic import Dynamic


class Null(Backend):
    """Answers at once, with nothing."""

    limits = Limits(max_rows=4096)

    async def infer(self, batch: Sequence[Request]) -> Sequence[Result]:
        return [None] * len(batch)


async def client(engine: Engine, requests: int, rows: int) -> None:
    for _ in range(requests):
        await engine.submit(None, rows=rows)


async def seconds(clients: int, requests: int, rows: int = 1) -> float:
    """How long `requests` requests take that `clients` clients share."""
    engine = Engine(Null(), Dynamic())
    await engine.start()
    started = time.perf_counter()
    await asyncio.gather(*(client(engine, requests // clients, rows) for _ in range(clients)))
    taken = time.perf_counter() - started
    await engine.close()
    return taken


async def loop_turns(turns: int) -> float:
    """How long the same number of bare loop turns takes: what no engine on this event loop can go below."""
    started = time.perf_counter()
    for _ in range(turns):
        await asyncio.sleep(0)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    for clients in (1, 64, 1024):
        requests = arguments.requests // (10 if clients == 1 else 1)
        taken = [asyncio.run(seconds(clients, requests)) for _ in range(arguments.repeats)]
        print(f"{clients:5d} clients: {requests / statistics.median(taken):10,.0f} requests/s")
    blocks = arguments.requests // 10
    taken = [asyncio.run(seconds(1, blocks, rows=4096)) for _ in range(arguments.repeats)]
    turn = asyncio.run(loop_turns(blocks)) / blocks
    print(f"block of 4,096 rows: {statistics.median(taken) / blocks * 1e6:.1f} µs a round trip")
    print(f"(one bare turn of the event loop: {turn * 1e6:.1f} µs)")


if __name__ == "__main__":
    main()
