"""A network of rows, tried at numbers of rows that go through it at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import UsageError
from gpuinfer.memory.asked import SIZES
from gpuinfer.memory.parts import Parts, Stopwatch, at_once
from gpuinfer.models.footprint import FORWARDS, Allocations, allocations, device_peak_bytes, traced, weight_bytes
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
        self._on_device = 0.0  # bytes of a row on a CUDA device
        self._answer = 0  # bytes of one row's
        cuda = device.type == "cuda"
        self._forwards = int(options.get("in_flight") or (2 if cuda else 1))  # each with memory of its own
        self.usual = int(options.get("max_rows") or (CUDA_MAX_ROWS if cuda else CHUNK_ROWS))

    def warm_up(self) -> None:
        opened = open_model(WARM_UP, replace(self._setup, model=WARM_UP), self._tuning(TRACED[0]))

        def call(rows: int) -> Any:
            return opened.forward([np.ones((rows, WARM_UP.inputs), np.float32)])

        call(TRACED[0]) if self._device.type == "cuda" else allocations(call, *TRACED)

    def describe(self) -> None:
        opened = self._opened(TRACED[-1])
        module: Any = opened.forward.module  # type: ignore[attr-defined]  # of both kinds of forward
        self._weights = weight_bytes(module)
        self._answer = FLOAT * sum(int(np.prod(shape)) for shape in opened.answer.shapes)
        if self._device.type == "cuda":
            few, more = (device_peak_bytes(self._eager(opened, rows), self._device) for rows in TRACED)
            self._on_device = (more - few) / (TRACED[1] - TRACED[0])
        else:
            self._building = traced(lambda: self._opened(TRACED[-1]))
            fresh = {rows: self._opened(rows) for rows in TRACED}  # each with buffers for as many rows
            self._allocations = allocations(lambda rows: fresh[rows].forward([self._block(rows)]), *TRACED)

    def parts(self, batch: int) -> Parts:
        at_once = min(batch, int(self._options.get("chunk_rows") or batch))
        rows_in, answers = self._block(1).nbytes, self._answer
        if self._device.type != "cuda":
            return self._resident(batch, at_once, rows_in)
        activations = round(self._forwards * at_once * max(0.0, self._on_device - answers))
        return Parts(self.process, self._weights, 0, activations, self._forwards * at_once * (rows_in + answers))

    def _resident(self, batch: int, at_once: int, rows_in: int) -> Parts:
        held = self._held(at_once)  # the answers to what goes at once among them
        answers = batch * self._answer
        activations = max(0, held - at_once * self._answer)
        return Parts(self.process, self._weights, 0, activations, answers + batch * rows_in)

    @lru_cache(4096)  # noqa: B019 (there is one of it in a process)
    def _held(self, rows: int) -> int:
        return self._allocations.resident_bytes(rows, self._building)

    def run(self, batch: int) -> float:
        return at_once([partial(self._seconds, self._opened(batch), self._block(batch)) for _ in range(self._copies)])

    @staticmethod
    def _seconds(opened: Opened, block: np.ndarray[Any, Any]) -> float:
        seconds = []
        for _ in range(FORWARDS):
            watch = Stopwatch()
            opened.forward([block])
            seconds.append(watch.seconds())
        return min(seconds)

    def facts(self) -> Mapping[str, Any]:
        said = {name: self._spec.arguments[name] for name in ("actions", "seats") if name in self._spec.arguments}
        return {"features": self._spec.inputs, **said, "forwards": self._forwards}

    def _opened(self, rows: int) -> Opened:
        try:
            return open_model(self._spec, self._setup, self._tuning(rows))
        except FactoryWants as error:
            if not set(error.names) <= set(SIZES):
                raise
            cure = " and ".join(f"--{name} N" for name in error.names)
            wanted = " and ".join(error.names)
            raise UsageError(f"{called(self._spec.name)}: the factory needs {wanted}. Give {cure}.") from error

    def _tuning(self, rows: int) -> Any:
        at_once = int(self._options.get("chunk_rows") or rows)
        return SimpleNamespace(**{**self._options, "max_rows": rows, "chunk_rows": min(rows, at_once)})

    def _block(self, rows: int) -> np.ndarray[Any, Any]:
        return np.ones((rows, *row_shape(self._spec)), row_dtype(self._spec))

    def _eager(self, opened: Opened, rows: int) -> Any:
        """One forward outside of graphs, whose memory was taken when they were captured."""
        forward: Any = opened.forward
        inputs = torch.from_numpy(self._block(rows)).to(self._device)

        def call() -> Any:
            with torch.inference_mode():
                return forward._forward(inputs)

        return call
