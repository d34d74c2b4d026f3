"""Client processes that ask as fast as they are answered, and how many rows they got between two moments."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawArray, RawValue
from typing import Any

START_S = 300.0  # for all of them to be there
WARM_S = 1.0  # that does not count
END_S = 10.0

SPAWN = multiprocessing.get_context("spawn")


class Board:
    """What the processes share: the start, the end, and a cell for each one's rows, which it alone writes."""

    def __init__(self, size: int) -> None:
        self.gate = SPAWN.Barrier(size + 1, timeout=START_S)
        self.rows = RawArray("q", size)
        self.stop = RawValue("b", 0)


@dataclass(frozen=True)
class Measured:
    """What was seen between two moments."""

    rows_per_s: float
    before: Any  # what `look` saw at the first
    after: Any  # and at the second


def measure(
    work: Callable[..., None],
    arguments: Sequence[tuple[Any, ...]],
    seconds: float,
    look: Callable[[], Any] = lambda: None,
) -> Measured:
    """Run `work(board, number, *arguments[number])` in a process for each entry, all at once.

    Each passes `board.gate` when it is ready, adds what it gets to `board.rows[number]`, and returns soon after
    `board.stop` is set. Raises `threading.BrokenBarrierError` when one of them never gets ready.
    """
    board = Board(len(arguments))
    crew = [
        SPAWN.Process(target=work, args=(board, number, *given), daemon=True) for number, given in enumerate(arguments)
    ]
    try:
        for process in crew:
            process.start()
        board.gate.wait()
        time.sleep(WARM_S)
        before, rows, started = look(), sum(board.rows), time.perf_counter()
        time.sleep(seconds)
        after, got, taken = look(), sum(board.rows) - rows, time.perf_counter() - started
    finally:
        board.stop.value = 1
        until = time.monotonic() + END_S
        for process in crew:
            process.join(max(0.0, until - time.monotonic()))
            process.kill()
    return Measured(got / taken, before, after)
