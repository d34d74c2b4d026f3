"""The processor's way from logits to tokens: compiled kernels, shared out between threads when the work is large."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.text.sampling import cpu_draw
from gpuinfer.text.sampling.cpu_filters import LEAST_BUCKETS, MOST_BUCKETS
from gpuinfer.text.sampling.cpu_values import BLOCK
from gpuinfer.text.sampling.lanes import Lanes
from gpuinfer.text.sampling.slots import Rules, Slots
from gpuinfer.text.sampling.torch_path import Found

NO_MASKS: NDArray[np.int32] = np.zeros((0, 0), np.int32)
NO_ROWS: NDArray[np.int64] = np.zeros(0, np.int64)
NO_RULES = np.zeros(0, np.int8), np.zeros(1, np.int32), np.zeros(0, np.int32)


class Complete:
    """A draw that has been made: see `torch_path.Queued`."""

    ready = True

    def __init__(self, found: Found) -> None:
        self._found = found

    @property
    def tokens(self) -> Tensor:
        return torch.from_numpy(self._found.codes.astype(np.int64))

    def finish(self, kept: NDArray[np.bool_] | None) -> Found:
        return self._found


class CpuPath:
    """Draws and log-probabilities over logits in this machine's memory. One call at a time."""

    def __init__(self, slots: Slots, vocabulary: int, threads: int) -> None:
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
        rules: Rules | None = None,
    ) -> Complete:
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

        self._lanes.share(run, values.size if rules is None else looked_at(values.shape[1], rules))
        wanted = records["logprobs"][slots].astype(np.int64)
        wanting = np.flatnonzero((wanted >= 0) & (tokens >= 0)) if self._slots.with_logprobs else NO_ROWS
        most = np.minimum(wanted[wanting], values.shape[1])
        described = self.logprobs(logits, wanting, tokens[wanting], most) if len(wanting) else None
        return Complete(Found(tokens, processed, wanting, described))

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


def looked_at(vocabulary: int, rules: Rules) -> int:
    """How many logits a draw looks at."""
    few = rules.kinds == cpu_draw.ONLY
    return int(rules.starts[-1]) + vocabulary * int(len(few) - few.sum())


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
