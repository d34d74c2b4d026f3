"""What `gpuinfer.Batcher` costs: rows a second of many callers, beside the engine alone and beside the model alone.

    python benchmarks/batcher.py [CASE ...] [--requests N] [--repeats N]

Cases: `null` (a function that returns its rows, beside the engine alone and beside the batcher that one writes with
asyncio.Queue and a timer), `net` (the 4.9 M network, 64 and 256 clients, beside the bare model at the same batch),
`images` (a small convolution network on [3, 64, 64]). The cases are run in turn, and medians of the rates are printed.

The bare model is measured twice: in a process of its own, as a script has it without gpuinfer, and in this process,
where gpuinfer has set the allocator to keep what is freed (`models/out_of_memory.keep_freed_memory`), which makes large
batches two to three times as fast. Both call it in a loop, with nothing else going on.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import gpuinfer
from gpuinfer.api import Backend, Limits, Request, Result
from gpuinfer.engine.engine import Engine
from gpuinfer.engine.results import CheckedResult
from gpuinfer.host import event_loop
from gpuinfer.models.out_of_memory import LARGEST_OF_ROWS, keep_freed_memory


class Null(Backend):
    """Answers at once, with nothing."""

    limits = Limits(max_rows=4096)

    async def infer(self, batch: Sequence[Request]) -> Sequence[Result]:
        return [None] * len(batch)


class Stacking(Backend):
    """Does with rows what torch needs at least: joins them, and gives each its row of the answer."""

    limits = Limits(max_rows=4096)

    async def infer(self, batch: Sequence[Request]) -> Sequence[Result]:
        return list(map(CheckedResult, torch.stack([request.payload for request in batch]).unbind(0)))


async def engine_rate(backend: Backend, clients: int, requests: int) -> float:
    engine, row = Engine(backend, gpuinfer.Dynamic()), torch.zeros(1)
    await engine.start()

    async def client() -> None:
        for _ in range(requests // clients):
            await engine.submit(row)

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    taken = time.perf_counter() - began
    await engine.close()
    return requests // clients * clients / taken


def locks_rate(clients: int, requests: int) -> float:
    """Requests a second of threads that wait on a lock each, which another thread opens at once: what no batcher of
    threads can be faster than.
    """
    waiting: deque[threading.Lock] = deque()
    asked, over = threading.Semaphore(0), object()

    def answer() -> None:
        while True:
            asked.acquire()
            while waiting:
                if (lock := waiting.popleft()) is over:
                    return
                lock.release()

    def client() -> None:
        for _ in range(requests // clients):
            lock = threading.Lock()
            lock.acquire()
            waiting.append(lock)
            if len(waiting) == 1:
                asked.release()
            while not lock.acquire(timeout=0.1):
                asked.release()  # it was taken at the same moment as the last

    server = threading.Thread(target=answer)
    server.start()
    running = [threading.Thread(target=client) for _ in range(clients)]
    began = time.perf_counter()
    for one in running:
        one.start()
    for one in running:
        one.join()
    taken = time.perf_counter() - began
    waiting.append(over)  # type: ignore[arg-type]
    asked.release()
    server.join()
    return requests // clients * clients / taken


async def coroutines(model: Any, row: Any, clients: int, requests: int, **options: Any) -> float:
    async with gpuinfer.Batcher(model, example=row, **options) as batcher:
        return await asked_by_coroutines(batcher, row, clients, requests)


async def asked_by_coroutines(ask: Callable[[Any], Any], row: Any, clients: int, requests: int) -> float:
    async def client(count: int) -> None:
        for _ in range(count):
            await ask(row)

    await asyncio.gather(*(client(2) for _ in range(clients)))  # the first of each size is slower
    began = time.perf_counter()
    await asyncio.gather(*(client(requests // clients) for _ in range(clients)))
    return requests // clients * clients / (time.perf_counter() - began)


def threads(model: Any, row: Any, clients: int, requests: int, **options: Any) -> float:
    with gpuinfer.Batcher(model, example=row, **options) as batcher:

        def client(count: int) -> None:
            for _ in range(count):
                batcher.predict(row)

        for count in (2, requests // clients):
            running = [threading.Thread(target=client, args=(count,)) for _ in range(clients)]
            began = time.perf_counter()
            for one in running:
                one.start()
            for one in running:
                one.join()
        return requests // clients * clients / (time.perf_counter() - began)


class ByHand:
    """The batcher that many write: an asyncio.Queue, a batch size and a timer."""

    def __init__(self, model: Callable[[Any], Any], size: int = 64, wait_s: float = 0.005) -> None:
        self._model, self._size, self._wait_s = model, size, wait_s
        self._queue: asyncio.Queue[tuple[Any, asyncio.Future[Any]]] = asyncio.Queue()

    async def __call__(self, row: Any) -> Any:
        future = asyncio.get_running_loop().create_future()
        await self._queue.put((row, future))
        return await future

    async def work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._queue.get()]
            until = loop.time() + self._wait_s
            while len(batch) < self._size and (left := until - loop.time()) > 0:
                try:
                    batch.append(await asyncio.wait_for(self._queue.get(), left))
                except TimeoutError:
                    break
            answers = await asyncio.to_thread(self._answers, [row for row, _ in batch])
            for (_, future), answer in zip(batch, answers, strict=True):
                future.set_result(answer)

    def _answers(self, rows: list[Any]) -> Any:
        with torch.no_grad():
            answer = self._model(torch.stack(rows))
        return (
            list(zip(*(part.unbind(0) for part in answer), strict=True)) if type(answer) is tuple else answer.unbind(0)
        )


async def by_hand(model: Any, row: Any, clients: int, requests: int) -> float:
    batcher = ByHand(model)
    worker = asyncio.create_task(batcher.work())
    rate = await asked_by_coroutines(batcher, row, clients, requests)
    worker.cancel()
    return rate


def bare_elsewhere(case: str, batch: int) -> float:
    """`bare_rate` in a process of its own, which has not loaded gpuinfer's backends."""
    command = [sys.executable, __file__, "--bare", case, str(batch)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def bare_kept(model: nn.Module, row: Any, batch: int) -> float:
    """`bare_rate` with the allocator as gpuinfer sets it."""
    keep_freed_memory(LARGEST_OF_ROWS)
    return bare_rate(model, row, batch)


def bare_rate(model: nn.Module, row: Any, batch: int, seconds: float = 2.0) -> float:
    """Rows a second of the model alone in batches of so many, joined and divided as rows are."""
    model.eval()
    rows, done = [row] * batch, 0
    with torch.no_grad():
        for _ in range(3):
            model(torch.stack(rows))
        began = time.perf_counter()
        while (taken := time.perf_counter() - began) < seconds:
            model(torch.stack(rows))
            done += batch
    return done / taken


class SmallConvolutions(nn.Module):
    """Images [3, 64, 64] to 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Conv2d(32, 32, 3, 2)),
            *(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)  # type: ignore[no-any-return]


def network() -> tuple[nn.Module, torch.Tensor]:
    """The 4.9 M network as a plain module, and a row."""
    from gpuinfer.models.networks import BlobNet

    torch.manual_seed(0)
    net = BlobNet(480, 30, 4)
    row = torch.zeros(480)
    row[:30] = 1
    return net, row


def run_loop(main: Any) -> Any:
    return event_loop.run(main)


def measured(cases: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Each case in turn, so often; the median of each."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            found[name].append(case())
    return {name: statistics.median(rates) for name, rates in found.items()}


def network_cases(case: str, net: nn.Module, row: Any, clients: int, count: int) -> dict[str, Callable[[], float]]:
    """The ways in which so many clients may have a network's answers: name → a measurement."""
    return {
        f"bare model, batches of {clients}, allocator as gpuinfer sets it": lambda: bare_kept(net, row, clients),
        f"bare model, batches of {clients}, in a script of its own": lambda: bare_elsewhere(case, clients),
        f"Batcher, {clients} coroutines": lambda: run_loop(coroutines(net, row, clients, count)),
        f"Batcher, {clients} threads": lambda: threads(net, row, clients, count),
        "asyncio.Queue and a timer": lambda: run_loop(by_hand(net.eval(), row, clients, count)),
    }


MODELS = {"net": network, "images": lambda: (SmallConvolutions(), torch.randn(3, 64, 64))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", nargs="*", default=["null", "net", "images"])
    parser.add_argument("--requests", type=int, default=40_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bare", nargs=2, metavar=("CASE", "BATCH"), help="print the bare model's rows/s, and end")
    given = parser.parse_args()
    if given.bare:
        case, batch = given.bare
        print(bare_rate(*MODELS[case](), int(batch)))
        return
    number = torch.zeros(1)
    if "null" in given.case:
        count = given.requests
        rates = measured(
            {
                "engine alone, 64 coroutines": lambda: run_loop(engine_rate(Null(), 64, count)),
                "engine, rows stacked and unbound": lambda: run_loop(engine_rate(Stacking(), 64, count)),
                "64 threads, a lock each, no work at all": lambda: locks_rate(64, count),
                "Batcher, nn.Identity, 64 coroutines": lambda: run_loop(coroutines(nn.Identity(), number, 64, count)),
                "Batcher, a function that returns its rows, 64 coroutines": lambda: run_loop(
                    coroutines(lambda rows: rows, number, 64, count)
                ),
                "Batcher, nn.Identity, 64 threads": lambda: threads(nn.Identity(), number, 64, count),
                "asyncio.Queue and a timer, 64 coroutines": lambda: run_loop(
                    by_hand(lambda rows: rows, number, 64, count)
                ),
            },
            given.repeats,
        )
        show(rates, next(iter(rates)))
    for case, sizes in (("net", (64, 256)), ("images", (64,))):
        for clients in sizes if case in given.case else ():
            rates = measured(network_cases(case, *MODELS[case](), clients, clients * 100), given.repeats)
            show(rates, next(iter(rates)))


def show(rates: dict[str, float], base: str) -> None:
    for name, rate in rates.items():
        print(f"{name:<60} {rate:>10,.0f} rows/s   {rate / rates[base]:.2f}")
    print()


if __name__ == "__main__":
    main()
