"""Keys and values of a model of transformers' in pages of our own kernels, and attention over them in place.

As in `cpu_attention`, whose kernels compute it; here layers differ in heads, sizes and windows, what is attended to
comes from the model's own code, turned as it turns it, and a scale, a soft cap and sinks are the model's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.text.checkpoint.memory_estimate import row_pages
from gpuinfer.text.checkpoint.transformers_trace import AttentionCall
from gpuinfer.text.decoder import cpu_sizes as at
from gpuinfer.text.decoder import traced_kernels as job_at
from gpuinfer.text.decoder.attention_plan import StaleValues, positions_of, segments_of
from gpuinfer.text.decoder.cpu_attention import SPAN
from gpuinfer.text.decoder.cpu_math import TILE
from gpuinfer.text.decoder.cpu_panels import TERMS, CachePool, aligned
from gpuinfer.text.decoder.cpu_plan import AttentionPlan, AttentionPlanner, most_members
from gpuinfer.text.decoder.cpu_product import Kind, product_with
from gpuinfer.text.decoder.openmp import in_torch_threads
from gpuinfer.text.transformer import PAGE, Step

LEAST_ROWS = 64  # of a step for which there is room at first


@dataclass(frozen=True)
class HeadBytes:
    """What one head of one layer takes of a page: `keys` bytes, `whole` with its values, each of `padded` values."""

    padded: int
    keys: int
    whole: int

    @classmethod
    def of(cls, call: AttentionCall, dtype: torch.dtype) -> HeadBytes:
        padded, stored = -(-max(call.key_dim, call.value_dim) // TILE) * TILE, dtype.itemsize
        together = TERMS if stored == 2 else 1
        keys = -(-padded // together) * together * PAGE * stored
        return cls(padded, keys, keys + padded * PAGE * stored)


def panel_page_bytes(calls: Sequence[AttentionCall], dtype: torch.dtype) -> int:
    """What a page of all layers takes."""
    return sum(call.kv_heads * HeadBytes.of(call, dtype).whole for call in calls)


class PanelCache:
    """The pages of all layers, and one more, `spare`, where rows that only pad a batch write.

    `begin` says what a step is; then each layer in turn stores and attends (`attend`). Rows of tokens in any company
    have the same bits.
    """

    def __init__(
        self, calls: Sequence[AttentionCall], pages: int, length: int, dtype: torch.dtype, kind: Kind, threads: int
    ) -> None:
        self.spare, self.columns = pages, row_pages(length)
        self._calls, self._dtype, self._kind, self._threads = calls, dtype, kind, threads
        self._multiplied = np.dtype(np.uint16 if kind in ("amx", "avx512") else np.float32)
        self._pool = CachePool(pages + 1, panel_page_bytes(calls, dtype))
        self._store, self._attend = job_at.compiled_job(job_at.STORES[kind]), job_at.compiled_job(job_at.ATTENDS[kind])
        self._stale = StaleValues()
        groups = {call.heads // call.kv_heads for call in calls}
        self._planners = {group: AttentionPlanner(group) for group in groups}
        self._plans: dict[int, AttentionPlan] = {}
        self._scales = np.zeros((len(calls), 2), np.float32)
        self._jobs = np.zeros((len(calls), job_at.JOB), np.int64)
        offset = 0
        for job, call in zip(self._jobs, calls, strict=True):
            offset = self._describe(job, call, offset)
        self._jobs[:, job_at.SCALE] = self._scales.ctypes.data + np.arange(len(calls)) * self._scales.strides[0]
        self._rows = 0
        self._make_room(LEAST_ROWS)

    def begin(self, step: Step) -> None:
        """What the next calls of `attend` are about; keys and values of `step` go where it says."""
        rows = len(step.tokens)
        if rows > self._rows:
            self._make_room(rows)
        positions = positions_of(step).astype(np.int32)
        owners, sees = segments_of(step).astype(np.int32), positions + np.int32(1)
        clears = self._stale.of(step, positions, sees).astype(np.int32)
        self._numbers[:4, :rows] = positions, sees, owners, clears
        self._pages = np.ascontiguousarray(step.pages, np.int32)
        every = self._numbers[4, :rows]
        self._plans = {group: one.plan(step, every, owners, sees) for group, one in self._planners.items()}
        self._jobs[:, job_at.ROWS] = rows
        self._jobs[:, job_at.SEGMENTS], self._jobs[:, job_at.COLUMNS] = self._pages.shape
        self._jobs[:, job_at.PAGES] = self._pages.ctypes.data
        for job, call in zip(self._jobs, self._calls, strict=True):
            plan = self._plans[call.heads // call.kv_heads]
            job[job_at.PIECES] = plan.pieces.ctypes.data
            job[job_at.MEMBERS], job[job_at.MEMBER_COUNT] = plan.members.ctypes.data, len(plan.members)

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        soft_cap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Mixed values [rows, heads, value_dim] for `queries` [heads, rows, key_dim]: softmax over scores times
        `scale`, with `sinks` [heads] as scores that no value answers to. `keys` and `values` [kv_heads, rows, …].
        """
        job, call = self._jobs[layer], self._calls[layer]
        queries, keys, values = (one if one.stride(2) == 1 else one.contiguous() for one in (queries, keys, values))
        rows = queries.shape[1]
        mixed = torch.empty((rows, call.heads, call.value_dim), dtype=self._dtype)
        self._scales[layer] = scale, soft_cap or 0
        job[job_at.QUERY : job_at.MIXED + 1] = (
            queries.data_ptr(), queries.stride(1), queries.stride(0), keys.data_ptr(), keys.stride(1), keys.stride(0),
            values.data_ptr(), values.stride(1), values.stride(0), mixed.data_ptr(),
        )  # fmt: skip
        threads = min(self._threads, torch.get_num_threads())
        self._run(self._store, job, threads)
        waves = self._plans[call.heads // call.kv_heads].waves
        for first, end in itertools.pairwise(waves):
            job[job_at.FIRST_PIECE], job[job_at.PIECE_COUNT] = first, end - first
            self._run(self._attend, job, threads)
        if sinks is not None:
            peaks = torch.from_numpy(self._peaks)[: rows * call.heads].view(rows, call.heads, 2)
            beside = torch.exp(sinks.float() - peaks[..., 0])
            mixed *= (peaks[..., 1] / (peaks[..., 1] + beside)).to(self._dtype)[..., None]
        return mixed

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `step.Decoder.copy_pages`."""
        self._pool.copy(sources, targets)
        self._stale.copied(targets)

    def give_back(self, pages: Sequence[int]) -> None:
        """See `step.Decoder.give_back`."""
        self._pool.give_back(pages)

    def empty(self) -> None:
        """Forget everything; all of the cache is resident from here on."""
        self._pool.fill()

    def nbytes(self) -> int:
        return self._pool.nbytes

    def _run(self, function: Any, job: NDArray[np.int64], threads: int) -> None:
        job[at.NEXT] = job[job_at.JOINED] = 0
        in_torch_threads(function, job.ctypes.data, threads)

    def _describe(self, job: NDArray[np.int64], call: AttentionCall, offset: int) -> int:
        """Write down a layer that lies so many bytes behind the beginning of a page; where the next one lies."""
        head, stored = HeadBytes.of(call, self._dtype), self._dtype.itemsize
        sizes = job[job_at.CONTROL : job_at.ADDRESSES]
        sizes[at.HEADS], sizes[at.KV_HEADS], sizes[at.PADDED_DIM] = call.heads, call.kv_heads, head.padded
        sizes[at.HEAD_DIM] = call.value_dim  # of what is mixed
        sizes[at.PAIR], sizes[at.STORED] = (2 if stored == 2 else 1), stored
        sizes[at.MULTIPLIED] = self._multiplied.itemsize
        sizes[at.PAGE_BYTES], sizes[at.HEAD_BYTES], sizes[at.KEY_BYTES] = self._pool.page_bytes, head.whole, head.keys
        job[job_at.ADDRESSES + at.PRODUCT], job[job_at.ADDRESSES + at.POOL] = (
            product_with(self._kind).address,
            self._pool.address + offset,
        )
        job[job_at.KEY_DIM], job[job_at.VALUE_DIM], job[job_at.WINDOW] = call.key_dim, call.value_dim, call.window or 0
        job[job_at.THREADS] = self._threads
        group = call.heads // call.kv_heads
        job[job_at.TOGETHER] = most_members(group) * group
        return offset + call.kv_heads * head.whole

    def _make_room(self, rows: int) -> None:
        """Scratch for so many rows."""
        self._rows = rows = 1 << (rows - 1).bit_length()
        heads = max(call.heads for call in self._calls)
        padded = max(HeadBytes.of(call, self._dtype).padded for call in self._calls)
        together, threads = int(self._jobs[:, job_at.TOGETHER].max()), self._threads
        self._numbers = np.zeros((5, rows), np.int32)
        self._numbers[4] = np.arange(rows)
        lines = self._numbers.ctypes.data + np.arange(5) * self._numbers.strides[0]
        self._jobs[:, job_at.POSITIONS : job_at.EVERY + 1] = lines
        self._peaks = aligned((rows * heads, 2), np.float32)
        self._scratch = {
            job_at.QUERIES: aligned((rows, heads * padded), self._multiplied),
            job_at.STATE: aligned((rows * heads, padded), np.float32),
            job_at.PEAKS: self._peaks,
            job_at.ROOM: aligned((threads, padded), np.float32),
            job_at.GATHERED: aligned((threads, together * padded), self._multiplied),
            job_at.SCORES: aligned((threads, together * SPAN), np.float32),
            job_at.WEIGHTS: aligned((threads, together * SPAN), self._multiplied),
            job_at.TOPS: aligned((threads, 2 * together), np.float32),
            job_at.PART: aligned((threads, together * padded), np.float32),
            job_at.MORE: aligned((threads, together * padded), np.float32),
        }
        for place, array in self._scratch.items():
            self._jobs[:, place] = array.ctypes.data
