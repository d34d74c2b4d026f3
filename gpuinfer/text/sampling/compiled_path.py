"""The processor's way from logits to tokens: compiled kernels, whose rows are shared out between threads when there is
enough work.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.text.sampling import cpu_draw
from gpuinfer.text.sampling.cpu_values import BLOCK, LEAST_BUCKETS, MOST_BUCKETS
from gpuinfer.text.sampling.slot_settings import SamplingSlots, TokenRules
from gpuinfer.text.sampling.torch_path import DrawFindings

LARGE = 200_000  # logits in a call from which on another thread pays: waking it costs as much as some ten thousand


class Lanes:
    """`threads` of them, the caller's among them. They are started with the first large call; one call at a time."""

    def __init__(self, threads: int, name: str) -> None:
        self.threads = max(1, threads)
        self._name = name
        self._pool: ThreadPoolExecutor | None = None

    def share(self, run: Callable[[int, int], None], size: int) -> None:
        """Call `run(lane, lanes)` for all lanes, the first in this thread. `size`: logits that are looked at."""
        lanes = self.threads if size >= LARGE else 1
        if lanes == 1:
            run(0, 1)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads - 1, self._name)
        others = [self._pool.submit(run, lane, lanes) for lane in range(1, lanes)]
        run(0, lanes)
        for other in others:
            other.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


NO_MASKS: NDArray[np.int32] = np.zeros((0, 0), np.int32)
NO_ROWS: NDArray[np.int64] = np.zeros(0, np.int64)
NO_RULES = np.zeros(0, np.int8), np.zeros(1, np.int32), np.zeros(0, np.int32)


class CompleteDraw:
    """A draw that has been made: see `torch_path.QueuedDraw`."""

    ready = True

    def __init__(self, found: DrawFindings) -> None:
        self._found = found

    @property
    def tokens(self) -> Tensor:
        return torch.from_numpy(self._found.codes.astype(np.int64))

    def finish(self, kept: NDArray[np.bool_] | None) -> DrawFindings:
        return self._found


class CpuPath:
    """Draws and log-probabilities over logits in this machine's memory. One call at a time."""

    def __init__(self, slots: SamplingSlots, vocabulary: int, threads: int) -> None:
        self._slots, self._lanes = slots, Lanes(threads, "sampling")
        self._work = [scratch(vocabulary) for _ in range(self._lanes.threads)]
        self._edited = [np.zeros(vocabulary, np.float32) for _ in range(self._lanes.threads)]
        self._few = [np.zeros(vocabulary, np.float32) for _ in range(self._lanes.threads)]

    def begin(
        self,
        logits: Tensor,
        slots: NDArray[np.int32],
        masks: NDArray[np.int32] | None,
        processes: bool,
        rules: TokenRules | None = None,
    ) -> CompleteDraw:
        """Draw a token for each row; noted in the slots."""
        tokens, processed = np.empty(len(slots), np.int32), np.zeros(len(slots) if processes else 0)
        values = as_rows(logits)
        given = NO_MASKS if masks is None else masks
        ruled = NO_RULES if rules is None else (rules.kinds, rules.starts, rules.ids)
        records, lists = self._slots.records, self._slots.lists()

        def run(lane: int, lanes: int) -> None:
            cpu_draw.draw_rows(
                lane,
                lanes,
                values,
                slots,
                given,
                ruled,
                records,
                lists,
                self._edited[lane],
                self._few[lane],
                self._work[lane],
                tokens,
                processed,
            )

        looked_at = values.size
        if rules is not None:
            few = int((rules.kinds == cpu_draw.ONLY).sum())
            looked_at = int(rules.starts[-1]) + values.shape[1] * (len(rules.kinds) - few)
        self._lanes.share(run, looked_at)
        wanted = records["logprobs"][slots].astype(np.int64)
        wanting = np.flatnonzero((wanted >= 0) & (tokens >= 0)) if self._slots.with_logprobs else NO_ROWS
        most = np.minimum(wanted[wanting], values.shape[1])
        described = self.logprobs(logits, wanting, tokens[wanting], most) if len(wanting) else None
        return CompleteDraw(DrawFindings(tokens, processed, wanting, described))

    def logprobs(
        self, logits: Tensor, rows: NDArray[np.int64], chosen: NDArray[np.int32], wanted: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int32]]:
        """Ranks, log-probabilities and likeliest tokens: see `cpu_logprobs.logprob_rows`."""
        most = int(wanted.max(initial=0))
        ranks = np.empty(len(rows), np.int64)
        found, likeliest = np.zeros((len(rows), 1 + most)), np.zeros((len(rows), most), np.int32)
        values = as_rows(logits)

        def run(lane: int, lanes: int) -> None:
            cpu_draw.logprob_rows(lane, lanes, values, rows, chosen, wanted, self._work[lane], ranks, found, likeliest)

        self._lanes.share(run, len(rows) * values.shape[1])
        return ranks, found, likeliest

    def close(self) -> None:
        self._lanes.close()


def scratch(vocabulary: int) -> tuple[NDArray[Any], ...]:
    """One lane's work space: tops, orders, counts, masses, buckets, weights, sums."""
    blocks = -(-vocabulary // BLOCK)
    buckets = min(max(vocabulary // 8, LEAST_BUCKETS), MOST_BUCKETS)
    return (
        np.zeros(blocks, np.int32),
        np.zeros(vocabulary, np.int64),
        np.zeros(buckets, np.int64),
        np.zeros(buckets, np.int64),
        np.zeros(BLOCK, np.int32),
        np.zeros(BLOCK, np.int64),
        np.zeros(blocks, np.int64),
    )


def as_rows(logits: Tensor) -> NDArray[np.float32]:
    """The logits as a contiguous, writable array: one kind of array, for which kernels are compiled once."""
    rows: NDArray[np.float32] = logits.detach().float().contiguous().numpy()
    return rows
