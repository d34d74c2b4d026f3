"""One stage of a model: some of its layers, on cores of their own or on a CUDA device with a stream of its own.

On CUDA the host does not wait between stages: the next stage is given launched values, and its stream waits for their
event. The thread stays one micro-batch behind its device, which so always has work.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from gpuinfer.api import Lane
from gpuinfer.models.cuda_graphs import new_stream, wait_for_device


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `change` applied to each tensor in its tuples, lists and dicts."""
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
    """`segments`, called in turn with `threads` threads on `cores` (None: wherever the system puts them). `name` is for
    people: "layers 0 to 3 on cuda:0". All methods are called in the stage's thread.
    """

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
        """Wraps all work of the stage's thread: sets device, cores, number of threads."""
        settle_on(self.threads, self.cores)
        with self._mode():
            yield

    def compute(self, value: Any, lane: Lane) -> Any:
        """From the previous stage's value to the next stage's; enters the lane's stations."""
        lane.enter("forward")
        for segment in self.segments:
            value = segment(value)
        return value

    def settle(self) -> None:
        """No micro-batch is waiting: wait for what was launched. A CPU has finished when its thread has."""


def settle_on(threads: int, cores: Collection[int] | None) -> None:
    """Set the threads that the calling thread computes with, and, where the system allows, their cores.

    Torch's threads run on the cores of the thread that calls them. A thread takes its number over when it first
    computes; the setting also applies to threads that begin later, so no other may begin meanwhile.
    """
    if cores is not None and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # a control group that has changed: the system chooses
            os.sched_setaffinity(0, cores)  # of this thread alone
    torch.get_num_threads()
    torch.set_num_threads(threads)


BEHIND = 1  # micro-batches that a device may still be at when the next is launched


class LaunchedValues:
    """A value on `stream`'s device, ready once `event` has passed. Copies for other devices are made on the stream
    `away`.
    """

    def __init__(self, value: Any, stream: torch.cuda.Stream, event: torch.cuda.Event, away: torch.cuda.Stream) -> None:
        self._value, self._stream, self._event, self._away = value, stream, event, away

    def for_stream(self, stream: torch.cuda.Stream) -> Any:
        """The value on that stream's device, in the stream's order. `stream` is the current one there: torch makes it
        wait for copies from another device.
        """
        if stream.device == self._stream.device:
            stream.wait_event(self._event)
            return mapped(self._value, lambda tensor: _used_on(tensor, stream))
        with torch.cuda.stream(self._away):
            self._away.wait_event(self._event)
            mapped(self._value, lambda tensor: _used_on(tensor, self._away))
            return mapped(self._value, lambda tensor: tensor.to(stream.device, non_blocking=True))


def _used_on(tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
    """Keep the value's memory from being reused before that stream is done with it."""
    tensor.record_stream(stream)
    return tensor


class CudaStage:
    """`segments`, called in turn on `device`. The first stage has `enter` (`staged_forward.ToCuda`), the last `leave`
    (`staged_forward.from_cuda`).
    """

    def __init__(
        self,
        name: str,
        segments: Sequence[Segment],
        device: torch.device,
        enter: Callable[[Any], Any] | None = None,
        leave: Callable[[Any], Any] | None = None,
        mode: Mode = torch.inference_mode,
    ) -> None:
        self._mode = mode
        self.name, self.segments, self.device = name, segments, device
        self._enter, self._leave = enter, leave
        self.threads = 1
        self._stream = new_stream(device)
        self._away = new_stream(device)  # so that the next one goes on meanwhile
        self._behind: deque[torch.cuda.Event] = deque()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        wait_for_device(self.device)  # weights were put there on another stream
        with self._mode(), torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def compute(self, value: Any, lane: Lane) -> Any:
        lane.enter("transfer")
        value = self._enter(value) if self._enter is not None else value.for_stream(self._stream)
        lane.enter("forward")
        for segment in self.segments:
            value = segment(value)
        if self._leave is not None:
            value = self._leave(value)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # its waiter sleeps
        event.record(self._stream)
        self._behind.append(event)
        self._wait(0 if self._leave is not None else BEHIND)
        return value if self._leave is not None else LaunchedValues(value, self._stream, event, self._away)

    def settle(self) -> None:
        self._wait(0)

    def _wait(self, behind: int) -> None:
        while len(self._behind) > behind:
            self._behind.popleft().synchronize()
