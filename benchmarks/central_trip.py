"""The round trip of a block that lies in shared memory, beside a bare notification and a pickled array.

Three ways there and back, in turns from one process, each to a process of its own that does nothing else:
a block of 512 rows × 256 float32 through `client.evaluate` and a model that adds each row up; one byte over a socket
pair, blocking, without spinning; the same array through a `multiprocessing.Queue`, with its sums through another.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from crew import SPAWN, START_S

import gpuinfer

ROWS, FEATURES = 512, 256
TURN = 200  # round trips of one kind before the next kind's turn


def row_sum() -> Any:
    """The model: one float a row."""
    import torch

    class RowSum(torch.nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows.sum(1)

    return RowSum()


def echo(end: Any) -> None:
    while byte := end.recv(1):
        end.send(byte)


def add_up(there: Any, back: Any) -> None:
    while (rows := there.get()) is not None:
        back.put(rows.sum(1))


class Ways:
    """The three ways, as functions that go there and back once. Use it in a `with` block."""

    def __init__(self) -> None:
        import socket

        self._server = gpuinfer.CentralServer(row_sum, inputs=FEATURES)
        self._end, theirs = socket.socketpair()
        self._there, self._back = SPAWN.Queue(), SPAWN.Queue()
        self._others = [
            SPAWN.Process(target=echo, args=(theirs,), daemon=True),
            SPAWN.Process(target=add_up, args=(self._there, self._back), daemon=True),
        ]

    def __enter__(self) -> dict[str, Callable[[], Any]]:
        self._server.start()
        for process in self._others:
            process.start()
        rows = np.random.default_rng(0).random((ROWS, FEATURES), np.float32)
        self._client = client = self._server.client()
        block = client.block(ROWS)
        block[:] = rows
        np.testing.assert_allclose(client.evaluate(block), rows.sum(1), rtol=1e-5)

        def notify() -> None:
            self._end.send(b"!")
            self._end.recv(1)

        def pickled() -> None:
            self._there.put(rows)
            self._back.get(timeout=START_S)

        return {"block": lambda: client.evaluate(block), "notification": notify, "pickled": pickled}

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._server.close(quiet=True)
        for process in self._others:
            process.kill()
            process.join()


def times(way: Callable[[], Any], trips: int) -> list[float]:
    """Seconds of each of so many round trips."""
    taken = []
    for _ in range(trips):
        started = time.perf_counter()
        way()
        taken.append(time.perf_counter() - started)
    return taken


def once(seconds: float) -> dict[str, float]:
    """One round: turn by turn for so many seconds; medians."""
    with Ways() as ways:
        for way in ways.values():
            times(way, TURN)
        taken: dict[str, list[float]] = {name: [] for name in ways}
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for name, way in ways.items():
                taken[name] += times(way, TURN)
    p50 = {name: statistics.median(each) for name, each in taken.items()}
    return {
        "block ÷ notification": p50["block"] / p50["notification"],
        "block ÷ pickled": p50["block"] / p50["pickled"],
        **{f"{name} µs": median * 1e6 for name, median in p50.items()},
    }


if __name__ == "__main__":
    for name, figure in once(5.0).items():
        print(f"{name}: {figure:,.3f}")
