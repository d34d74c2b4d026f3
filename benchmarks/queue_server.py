"""The peer: one leaf a message. W processes with one row outstanding each, one server, pickled queues.

    python benchmarks/queue_server.py [W] [SECONDS]      prints rows/s and the mean batch

The server collects rows until it has 512, or for 10 ms from the first one on, runs the network once with all cores and
puts each answer into its asker's queue. Rows and answers are NumPy arrays: torch tensors through the same queues are
slower still. The network is the one that our own server runs, in its fastest form.
"""

from __future__ import annotations

import queue
import sys
import time
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np
from crew import SPAWN, START_S, Board, Measured, measure

from gpuinfer.api import ModelSpec

MAX_BATCH = 512  # rows
WAIT_S = 0.010  # from a batch's first row on
PATIENCE_S = 60.0  # for one answer: the server has died

BLOBNET = ModelSpec("blobnet", inputs=256, arguments={"actions": 53, "seats": 4})


def serve(spec: ModelSpec, requests: Any, replies: Any, counts: Any) -> None:
    """The server process. `counts`: batches, rows. It is killed in the end."""
    import torch

    from gpuinfer.models.load import build

    module = build(spec, device=torch.device("cpu"), dtype=torch.float32, seed=0)
    with torch.inference_mode():
        while True:
            batch = gather(requests)
            logits, values = module(torch.from_numpy(np.stack([row for _, row in batch])))
            for (asker, _), answer in zip(batch, zip(logits.numpy(), values.numpy(), strict=True), strict=True):
                replies[asker].put(answer)
            counts[0] += 1
            counts[1] += len(batch)


def gather(requests: Any) -> list[tuple[int, np.ndarray]]:
    """The next batch: (who asks, its row)."""
    batch = [requests.get()]
    until = time.perf_counter() + WAIT_S
    while len(batch) < MAX_BATCH and (left := until - time.perf_counter()) > 0:
        try:
            batch.append(requests.get(timeout=left))
        except queue.Empty:
            break
    return batch


def ask(board: Board, number: int, requests: Any, reply: Any, features: int) -> None:
    """One client process."""
    row = some_rows(1, features)[0]
    board.gate.wait()
    while not board.stop.value:
        requests.put((number, row))
        reply.get(timeout=PATIENCE_S)
        board.rows[number] += 1


def some_rows(rows: int, features: int, seed: int = 0) -> np.ndarray:
    """Rows as card games have them: zeros and ones, float32."""
    return np.random.default_rng(seed).integers(0, 2, (rows, features)).astype(np.float32)


def run(clients: int, seconds: float, spec: ModelSpec = BLOBNET) -> tuple[float, float]:
    """Rows a second that all clients get together, and the mean batch."""
    requests, replies = SPAWN.Queue(), [SPAWN.Queue() for _ in range(clients)]
    counts = RawArray("q", 2)
    server = SPAWN.Process(target=serve, args=(spec, requests, replies, counts), daemon=True)
    server.start()
    try:
        requests.put((0, some_rows(1, spec.inputs)[0]))
        replies[0].get(timeout=START_S)  # the network has been built
        crew = [(requests, reply, spec.inputs) for reply in replies]
        seen: Measured = measure(ask, crew, seconds, look=lambda: tuple(counts))
    finally:
        server.kill()
        server.join()
    batches, rows = (late - early for early, late in zip(seen.before, seen.after, strict=True))
    return seen.rows_per_s, rows / max(1, batches)


if __name__ == "__main__":
    rate, batch = run(int(sys.argv[1]) if len(sys.argv) > 1 else 32, float(sys.argv[2]) if len(sys.argv) > 2 else 8.0)
    print(f"{rate:,.0f} rows/s, mean batch {batch:.1f}")
