"""What the engine itself costs: requests a second with a backend that does nothing, and the round trip of one block.

    python benchmarks/engine.py [--requests N] [--repeats N] [--strategy NAME[,NAME]] [-S key=value]

Engine, strategy and clients share one core. A client submits, waits for its answer, and submits again. Several
strategies are measured in turn. `--plain-loop` runs on asyncio's own event loop instead of the precise one.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Sequence

from gpuinfer.api import Backend, Limits, Request, Result, Strategy
from gpuinfer.config import registry
from gpuinfer.config.options import GivenValue, check
from gpuinfer.engine.engine import Engine
from gpuinfer.host import event_loop


class Null(Backend):
    """Answers at once, with nothing."""

    limits = Limits(max_rows=4096)

    async def infer(self, batch: Sequence[Request]) -> Sequence[Result]:
        return [None] * len(batch)


async def client(engine: Engine, requests: int, rows: int) -> None:
    for _ in range(requests):
        await engine.submit(None, rows=rows)


async def seconds(strategy: Strategy, clients: int, requests: int, rows: int = 1) -> float:
    """How long `requests` requests take that `clients` clients share."""
    engine = Engine(Null(), strategy)
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


def maker(name: str, words: Sequence[str]) -> Callable[[], Strategy]:
    """Builds a strategy by its registered name, with options as `-S` takes them."""
    plugin = registry.load("strategies", name)
    given = {key: GivenValue(value, f"-S {key}") for key, _, value in (word.partition("=") for word in words)}
    options = check(plugin.Options, given, f"strategy '{name}'")
    return lambda: plugin(None, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--strategy", default="dynamic")
    parser.add_argument("-S", dest="options", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--plain-loop", action="store_true")
    arguments = parser.parse_args()
    run = asyncio.run if arguments.plain_loop else event_loop.run
    makers = {name: maker(name, arguments.options) for name in arguments.strategy.split(",")}
    for clients in (1, 64, 1024):
        requests = arguments.requests // (10 if clients == 1 else 1)
        taken: dict[str, list[float]] = {name: [] for name in makers}
        for _ in range(arguments.repeats):
            for name, make in makers.items():
                taken[name].append(run(seconds(make(), clients, requests)))
        for name, each in taken.items():
            print(f"{name}, {clients:5d} clients: {requests / statistics.median(each):10,.0f} requests/s")
    blocks = arguments.requests // 10
    for name, make in makers.items():
        each = [run(seconds(make(), 1, blocks, rows=4096)) for _ in range(arguments.repeats)]
        print(f"{name}, block of 4,096 rows: {statistics.median(each) / blocks * 1e6:.1f} µs a round trip")
    turn = run(loop_turns(blocks)) / blocks
    print(f"(one bare turn of the event loop: {turn * 1e6:.1f} µs)")


if __name__ == "__main__":
    main()
