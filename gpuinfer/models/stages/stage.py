"""One stage of a model on a CPU: some of its layers, on cores of their own where there are enough."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from gpuinfer.api import Lane


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value`, each tensor in its tuples, lists and dicts changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: mapped(part, change) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(mapped(part, change) for part in value)
    return value


Segment = Callable[[Any], Any]
"""A layer, or several: from what the one before it gave to what the one after it takes."""
Mode = Callable[[], AbstractContextManager[Any]]
"""How gradients are off: whoever writes over what a stage gives needs `torch.no_grad`."""


class CpuStage:
    """`segments`, called in turn with `threads` threads on `cores` (None: wherever the system puts them)."""

    device = torch.device("cpu")

    def __init__(
        self,
        name: str,
        segments: Sequence[Segment],
        threads: int,
        cores: Collection[int] | None = None,
        mode: Mode = torch.inference_mode,
    ) -> None:
        self.name, self.segments, self.threads, self.cores = name, segments, threads, cores
        self._mode = mode

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        settle_on(self.threads, self.cores)
        with self._mode():
            yield

    def compute(self, value: Any, lane: Lane) -> Any:
        lane.enter("forward")
        for segment in self.segments:
            value = segment(value)
        return value

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
