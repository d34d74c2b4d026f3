"""Many client processes: blocks and single rows through our server, and the same network behind pickled queues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crew import Board, Measured, measure
from queue_server import BLOBNET, run, some_rows

import gpuinfer
from gpuinfer.stats import Snapshot, since

CLIENTS = 32
BLOCK = 128  # rows: what a self-play process with a few dozen games sends
BY_TIMER = ("waited", "gain")  # a wait that was set, and one that was learnt: both ended because it was over


def ask_blocks(board: Board, number: int, client: Any) -> None:
    """One client process: two blocks of shared memory take turns, as in self-play."""
    with client:
        blocks = [client.block(BLOCK), client.block(BLOCK)]
        for block in blocks:
            block[:] = some_rows(BLOCK, BLOBNET.inputs, seed=number)
        board.gate.wait()
        pending, turn = client.submit(blocks[0]), 1
        while not board.stop.value:
            sent = client.submit(blocks[turn % 2])
            pending.result()
            board.rows[number] += BLOCK
            pending, turn = sent, turn + 1
        pending.result()


def ask_rows(board: Board, number: int, client: Any) -> None:
    """One client process: one row, its answer, the next."""
    row = some_rows(1, BLOBNET.inputs, seed=number)
    with client:
        client.evaluate(row)
        board.gate.wait()
        while not board.stop.value:
            client.evaluate(row)
            board.rows[number] += 1


def through_server(work: Callable[..., None], seconds: float) -> tuple[Measured, Snapshot, int]:
    """What the clients got, what the server counted meanwhile, and how many forwards it runs at once."""
    with gpuinfer.CentralServer(BLOBNET) as server:
        crew = [(server.client(),) for _ in range(CLIENTS)]
        seen = measure(work, crew, seconds, look=server.stats)
        server.close(quiet=True)
        return seen, since(seen.after, seen.before), server.limits.in_flight


def mean_batch(counted: Snapshot) -> float:
    batches = sum(counted.batches.values())
    return sum(rows * count for rows, count in counted.batches.items()) / max(1, batches)


def once(seconds: float) -> dict[str, float]:
    """One round: the three of them, one after the other."""
    queue_rate, _ = run(CLIENTS, seconds)
    blocks, _, _ = through_server(ask_blocks, seconds)
    rows, counted, forwards = through_server(ask_rows, seconds)
    return {
        "blocks ÷ queue": blocks.rows_per_s / queue_rate,
        "rows ÷ queue": rows.rows_per_s / queue_rate,
        "rows a batch × forwards": mean_batch(counted) * forwards,
        "by a timer": sum(counted.reasons.get(reason, 0) for reason in BY_TIMER),
        "queue rows/s": queue_rate,
        "blocks rows/s": blocks.rows_per_s,
        "rows rows/s": rows.rows_per_s,
    }


if __name__ == "__main__":
    for name, figure in once(3.0).items():
        print(f"{name}: {figure:,.2f}")
