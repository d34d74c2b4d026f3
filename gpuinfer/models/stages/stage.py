"""One stage of a model on a CPU: some of its layers, on cores of their own where there are enough."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpuinfer.api import Lane
from gpuinfer.models.staging import Block

Load = Callable[[Sequence[Block], int], Any]
"""Rows that lie in these blocks, made up to so many with zeros, as the model's features [rows, inputs]."""


class Rows:
    """What the first stage takes: `rows` rows that lie in `pieces`, which go through as `shape` rows."""

    __slots__ = ("pieces", "rows", "shape")

    def __init__(self, pieces: Sequence[Block], rows: int, shape: int) -> None:
        self.pieces, self.rows, self.shape = pieces, rows, shape


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value`, each tensor in its tuples, lists and dicts changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: mapped(part, change) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(mapped(part, change) for part in value)
    return value


class CpuStage:
    """`segments`, called in turn with `threads` threads on `cores` (None: wherever the system puts them).

    The first stage has `load` for rows; the last has `unload`, which makes answers of what its last segment gives.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        name: str,
        segments: Sequence[nn.Module],
        threads: int,
        cores: Collection[int] | None = None,
        load: Load | None = None,
        unload: Callable[[Any], Any] | None = None,
    ) -> None:
        self.name, self.segments, self.threads, self.cores = name, segments, threads, cores
        self._load, self._unload = load, unload

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        settle_on(self.threads, self.cores)
        with torch.inference_mode():
            yield

    def compute(self, value: Any, lane: Lane) -> Any:
        if self._load is not None:
            lane.enter("transfer")
            value = self._load(value.pieces, value.shape)
        lane.enter("forward")
        for segment in self.segments:
            value = segment(value)
        return value if self._unload is None else self._unload(value)

    def settle(self) -> None:
        """A processor has nothing under way behind its thread's back."""


def settle_on(threads: int, cores: Collection[int] | None) -> None:
    """The calling thread computes with so many threads from now on, on these cores where the system lets it choose.

    Torch's threads of a calling thread run where that one may. A thread takes its number over as it first asks for it;
    what is set here is also told to all that begin later, so nobody else may begin meanwhile.
    """
    if cores is not None and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # a control group that has changed: the system chooses
            os.sched_setaffinity(0, cores)  # of this thread alone
    torch.get_num_threads()
    torch.set_num_threads(threads)
