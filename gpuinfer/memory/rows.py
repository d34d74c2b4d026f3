"""A network of rows, tried at numbers of rows that go through it at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import UsageError
from gpuinfer.memory.asked import SIZES
from gpuinfer.memory.parts import Parts, StageParts, Stopwatch, at_once
from gpuinfer.models.footprint import FORWARDS, Allocations, allocations, bytes_of_a_row, traced, weight_bytes
from gpuinfer.models.forward import CHUNK_ROWS
from gpuinfer.models.heap import Event
from gpuinfer.models.layouts import row_dtype, row_shape
from gpuinfer.models.load import FactoryWants, called
from gpuinfer.models.open_model import CUDA_MAX_ROWS, Opened, open_model

MOST = 1 << 30  # rows: what is larger is a mistake
TRACED = (128, 512)  # batch sizes that are looked at allocation by allocation
FLOAT = 4  # bytes of an answer's number
WARM_UP = ModelSpec("blobnet-small", inputs=64, arguments={"actions": 8, "seats": 2})


class RowsSubject:
    """Implements `parts.Subject`."""

    timed = True

    def __init__(
        self, spec: ModelSpec, setup: Setup, options: Mapping[str, Any], device: torch.device, copies: int
    ) -> None:
        self._spec, self._setup, self._options, self._device = spec, setup, dict(options), device
        self._copies = copies
        self.most, self.first = MOST, TRACED[0]
        self.process = self._weights = 0
        self._allocations = Allocations([])
        self._building: list[Event] = []
        self._on_device = 0.0  # bytes of a row on a CUDA device, features and answers among them
        self._answer = 0  # bytes of one row's
        cuda = device.type == "cuda"
        self._forwards = int(options.get("in_flight") or (2 if cuda else 1))  # each with memory of its own
        self.usual = int(options.get("max_rows") or (CUDA_MAX_ROWS if cuda else CHUNK_ROWS))

    def warm_up(self) -> None:
        warm_up(self._setup, self._options, self._device)

    def describe(self) -> None:
        opened = self._opened(TRACED[-1])
        module: Any = opened.forward.module  # type: ignore[attr-defined]  # of both kinds of forward
        self._weights = weight_bytes(module)
        self._answer = FLOAT * sum(int(np.prod(shape)) for shape in opened.answer.shapes)
        if self._device.type == "cuda":
            self._on_device = bytes_of_a_row(partial(self._eager, opened), self._device, *TRACED)
        else:
            self._building = traced(lambda: self._opened(TRACED[-1]))
            fresh = {rows: self._opened(rows) for rows in TRACED}  # each with buffers for as many rows
            self._allocations = allocations(lambda rows: fresh[rows].forward([self._block(rows)]), *TRACED)

    def parts(self, batch: int) -> Parts:
        at_once = min(batch, int(self._options.get("chunk_rows") or batch))
        rows_in, answers = self._block(1).nbytes, self._answer
        if self._device.type != "cuda":
            return self._resident(batch, at_once, rows_in)
        activations = round(self._forwards * at_once * max(0.0, self._on_device - rows_in - answers))
        return Parts(self.process, self._weights, 0, activations, self._forwards * at_once * (rows_in + answers))

    def _resident(self, batch: int, at_once: int, rows_in: int) -> Parts:
        held = self._held(at_once)  # the answers to what goes at once among them
        answers = batch * self._answer
        activations = max(0, held - at_once * self._answer)
        return Parts(self.process, self._weights, 0, activations, answers + batch * rows_in)

    @lru_cache(4096)  # noqa: B019 (there is one of it in a process)
    def _held(self, rows: int) -> int:
        return self._allocations.resident_bytes(rows, self._building)

    def pages(self, free: int) -> None:
        """Rows keep nothing."""

    def run(self, batch: int) -> float:
        return at_once([partial(seconds_of, self._opened(batch), self._block(batch)) for _ in range(self._copies)])

    def stages(self, batch: int) -> Sequence[StageParts]:
        return ()

    def facts(self) -> Mapping[str, Any]:
        said = {name: self._spec.arguments[name] for name in ("actions", "seats") if name in self._spec.arguments}
        return {"features": self._spec.inputs, **said, "forwards": self._forwards}

    def _opened(self, rows: int) -> Opened:
        with sizes_named(self._spec):
            return open_model(self._spec, self._setup, tuning_of(self._options, rows))

    def _block(self, rows: int) -> np.ndarray[Any, Any]:
        return block_of(self._spec, rows)

    def _eager(self, opened: Opened, rows: int) -> Any:
        """One forward outside of graphs, whose memory was taken when they were captured."""
        forward: Any = opened.forward
        with torch.inference_mode():
            return forward._forward(torch.from_numpy(self._block(rows)).to(self._device))


def warm_up(setup: Setup, options: Mapping[str, Any], device: torch.device) -> None:
    """A small network answers some rows there, and is looked at as others are."""
    small = replace(setup, model=WARM_UP, devices=(str(device),))
    opened = open_model(WARM_UP, small, tuning_of(options, TRACED[0]))

    def call(rows: int) -> Any:
        return opened.forward([np.ones((rows, WARM_UP.inputs), np.float32)])

    call(TRACED[0]) if device.type == "cuda" else allocations(call, *TRACED)


def tuning_of(options: Mapping[str, Any], rows: int) -> Any:
    """For so many rows in one piece, unless the options put fewer through at once."""
    at_once = int(options.get("chunk_rows") or rows)
    return SimpleNamespace(**{**options, "max_rows": rows, "chunk_rows": min(rows, at_once)})


def block_of(spec: ModelSpec, rows: int) -> np.ndarray[Any, Any]:
    """So many rows as they come to this model."""
    return np.ones((rows, *row_shape(spec)), row_dtype(spec))


def seconds_of(opened: Opened, block: np.ndarray[Any, Any]) -> float:
    """Of the shortest of several forwards."""
    seconds = []
    for _ in range(FORWARDS):
        watch = Stopwatch()
        opened.forward([block])
        seconds.append(watch.seconds())
    return min(seconds)


@contextlib.contextmanager
def sizes_named(spec: ModelSpec) -> Iterator[None]:
    """Where a factory wants to know sizes of rows, the error names the flags."""
    try:
        yield
    except FactoryWants as error:
        if not set(error.names) <= set(SIZES):
            raise
        cure = " and ".join(f"--{name} N" for name in error.names)
        wanted = " and ".join(error.names)
        raise UsageError(f"{called(spec.name)}: the factory needs {wanted}. Give {cure}.") from error
