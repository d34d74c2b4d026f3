"""Data parallel over several devices: what two of them reach of twice one, and with a slow one of the sum of both.

    python benchmarks/devices.py [--seconds S] [--clients N]

The devices are stand-ins whose batches of 64 rows take 20 ms, on the real engine and its loop; requests have 16
rows. Every arrangement is run three times in turn, and its best is taken: another program can only make it slower.
"""

from __future__ import annotations

import argparse
import asyncio

from gpuinfer.backends.standin import StandIn
from gpuinfer.engine.engine import Engine
from gpuinfer.host.event_loop import run
from gpuinfer.strategies.adaptive import Adaptive
from gpuinfer.strategies.dynamic import Dynamic

BATCH_S, ROWS, BLOCK, TIMES = 0.02, 64, 16, 3
ARRANGEMENTS = {"one": {}, "two": {"devices": 2}, "two, one 3x slower": {"devices": 2, "slow": 3.0}}
STRATEGIES = {"dynamic": Dynamic, "adaptive": Adaptive}


async def rows_per_s(strategy: str, seconds: float, clients: int, **options: float) -> tuple[float, float]:
    """Rows per second of callers that ask again as soon as they are answered, and rows in a batch."""
    engine = Engine(StandIn(alpha=0.0, beta=BATCH_S, max_rows=ROWS, **options), STRATEGIES[strategy]())
    await engine.start()
    loop, rows = asyncio.get_running_loop(), 0
    begin, end = loop.time() + seconds / 4, loop.time() + seconds

    async def client(name: int) -> None:
        nonlocal rows
        engine.join(name)
        while loop.time() < end:
            await engine.submit("payload", rows=BLOCK, client=name)
            rows += BLOCK * (begin <= loop.time() < end)

    await asyncio.gather(*map(client, range(clients)))
    batches = engine.snapshot().batches
    await engine.close()
    mean = sum(size * count for size, count in batches.items()) / sum(batches.values())
    return rows / (end - begin), mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each run")
    parser.add_argument("--clients", type=int, default=32)
    given = parser.parse_args()
    for strategy in STRATEGIES:
        best = dict.fromkeys(ARRANGEMENTS, (0.0, 0.0))
        for _ in range(TIMES):
            for name, options in ARRANGEMENTS.items():
                best[name] = max(best[name], run(rows_per_s(strategy, given.seconds, given.clients, **options)))
        one = best["one"][0]
        for name, of in (("two", 2 * one), ("two, one 3x slower", one + one / 3)):
            rate, rows = best[name]
            print(f"{strategy:9} {name:19} {rate:7.0f} rows/s, {rate / one:.3f} x one, {rate / of:.3f} of the sum, "
                  f"{rows:.1f} rows a batch (one: {one:.0f}, {best['one'][1]:.1f})")  # fmt: skip


if __name__ == "__main__":
    main()
