"""One model for a program of several processes: it runs in a server process, and the others ask it.

    python examples/central_client.py

Whatever the workers do between their requests, the server makes batches of what they have waiting.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np

import gpuinfer

FEATURES, ROWS, ROUNDS, WORKERS = 32, 512, 20, 3


def network(features: int) -> Any:
    """The model. Only the server calls this: workers that never import torch start in a fraction of the time."""
    from torch import nn

    return nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 1))


def work(client: Any, number: int) -> None:
    """One worker process: looks for the row that the model rates highest."""
    random = np.random.default_rng(number)
    with client:
        first = client.evaluate(random.random((1, FEATURES), np.float32))  # waits for the answer
        best = max(float(first.max()), overlapped(client, random))
    print(f"worker {number}: {1 + ROUNDS * ROWS:,} rows asked for, the best is rated {best:.3f}")


def overlapped(client: Any, random: np.random.Generator) -> float:
    """Two blocks of shared memory take turns: one is filled while the model has the other."""
    blocks = [client.block(ROWS), client.block(ROWS)]
    best, pending = -np.inf, None
    for turn in range(ROUNDS):
        rows = blocks[turn % 2]
        random.random(out=rows, dtype=np.float32)
        sent = client.submit(rows)  # goes on at once
        if pending is not None:
            best = max(best, pending.result().max())
        pending = sent
    return float(max(best, pending.result().max()))


def main() -> None:
    context = multiprocessing.get_context("spawn")
    with gpuinfer.CentralServer(network, inputs=FEATURES) as server:
        workers = [context.Process(target=work, args=(server.client(), number)) for number in range(WORKERS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        stats = server.close()  # prints what the server has seen, and returns it
    print(f"{WORKERS} workers, {stats.requests} requests, {stats.rows:,} rows, one model")


if __name__ == "__main__":
    main()
