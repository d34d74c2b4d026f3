"""A network of rows, whole or in stages, tried at numbers of rows that go through it at once.

In stages they go as micro-batches, of which a bounded number lies between two stages.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.lab.memory.batch_trials import MemoryParts, StageParts, Stopwatch, at_once
from gpuinfer.lab.network_options import sizes_named
from gpuinfer.models.footprint import (
    FORWARDS,
    Activations,
    activations,
    bytes_of_a_row,
    device_peaks,
    weight_bytes,
)
from gpuinfer.models.forward_cpu import CHUNK_ROWS, padded
from gpuinfer.models.model_options import stage_shares
from gpuinfer.models.open_model import CPU_MAX_ROWS, CUDA_MAX_ROWS, Opened, open_model
from gpuinfer.models.pipeline.open_pipeline import cut_model, in_flight_of, open_staged
from gpuinfer.models.pipeline.schedule import ROOM
from gpuinfer.models.pipeline.stage import BEHIND, mapped
from gpuinfer.models.row_format import row_dtype, row_shape

MOST = 1 << 30  # rows: what is larger is a mistake
TRACED = (128, 512)  # batch sizes that are looked at with every allocation noted
FLOAT = 4  # bytes of an answer's number
WARM_UP = ModelSpec("blobnet-small", inputs=64, arguments={"actions": 8, "seats": 2})


class RowsSubject:
    """Implements `MemorySubject`."""

    timed = True

    def __init__(
        self, spec: ModelSpec, setup: Setup, options: Mapping[str, Any], device: torch.device, copies: int
    ) -> None:
        self._spec, self._setup, self._options, self._device = spec, setup, dict(options), device
        self._copies = copies
        self.most, self.first = MOST, TRACED[0]
        self.process = self._weights = 0
        self._activations = Activations()
        self._on_device = 0.0  # bytes of a row on a CUDA device, features and answers among them
        self._answer = 0  # bytes of one row's
        cuda = device.type == "cuda"
        self._forwards = int(options.get("in_flight") or (2 if cuda else 1))  # each with memory of its own
        self.usual = int(options.get("max_rows") or (CUDA_MAX_ROWS if cuda else CHUNK_ROWS))

    def warm_up(self) -> None:
        warm_up_rows(self._setup, self._options, self._device)

    def describe(self) -> None:
        opened = self._opened(TRACED[-1])
        module: Any = opened.forward.module  # type: ignore[attr-defined]  # of both kinds of forward
        self._weights = weight_bytes(module)
        self._answer = FLOAT * sum(int(np.prod(shape)) for shape in opened.answer.shapes)
        if self._device.type == "cuda":
            self._on_device = bytes_of_a_row(partial(self._eager, opened), self._device, *TRACED)
        else:
            fresh = {rows: self._opened(rows) for rows in TRACED}  # each with buffers for as many rows
            self._activations = activations(lambda rows: fresh[rows].forward([self._block(rows)]), *TRACED)

    def parts(self, batch: int) -> MemoryParts:
        at_once = min(batch, int(self._options.get("chunk_rows") or batch))
        rows_in, answers = self._block(1).nbytes, self._answer
        if self._device.type == "cuda":
            working = self._forwards * at_once * (rows_in + answers)
            activations = round(self._forwards * at_once * max(0.0, self._on_device - rows_in - answers))
        else:
            working = batch * (rows_in + answers)
            held = self._activations.resident_bytes(at_once)  # the answers to what goes at once among them
            activations = max(0, held - at_once * answers)
        return MemoryParts(self.process, self._weights, 0, activations, working)

    def pages(self, free: int) -> None:
        """Rows keep nothing."""

    def run(self, batch: int) -> float:
        return at_once(
            [partial(seconds_of_block, self._opened(batch), self._block(batch)) for _ in range(self._copies)]
        )

    def stages(self, batch: int) -> Sequence[StageParts]:
        return ()

    def facts(self) -> Mapping[str, Any]:
        said = {name: self._spec.arguments[name] for name in ("actions", "seats") if name in self._spec.arguments}
        return {"features": self._spec.inputs, **said, "forwards": self._forwards}

    def _opened(self, rows: int) -> Opened:
        with sizes_named(self._spec):
            return open_model(self._spec, self._setup, forward_tuning(self._options, rows))

    def _block(self, rows: int) -> np.ndarray[Any, Any]:
        return block_of(self._spec, rows)

    def _eager(self, opened: Opened, rows: int) -> Any:
        """One forward outside of graphs, whose memory was taken when they were captured."""
        forward: Any = opened.forward
        with torch.inference_mode():
            return forward._forward(torch.from_numpy(self._block(rows)).to(self._device))


def warm_up_rows(setup: Setup, options: Mapping[str, Any], device: torch.device) -> None:
    """A small network answers some rows there, and is looked at as others are."""
    small = replace(setup, model=WARM_UP, devices=(str(device),))
    opened = open_model(WARM_UP, small, forward_tuning(options, TRACED[0]))

    def call(rows: int) -> Any:
        return opened.forward([np.ones((rows, WARM_UP.inputs), np.float32)])

    call(TRACED[0]) if device.type == "cuda" else activations(call, *TRACED)


def forward_tuning(options: Mapping[str, Any], rows: int) -> Any:
    """For so many rows in one piece, unless the options put fewer through at once."""
    at_once = int(options.get("chunk_rows") or rows)
    return SimpleNamespace(**{**options, "max_rows": rows, "chunk_rows": min(rows, at_once)})


def block_of(spec: ModelSpec, rows: int) -> np.ndarray[Any, Any]:
    """So many rows as they come to this model."""
    return np.ones((rows, *row_shape(spec)), row_dtype(spec))


def seconds_of_block(opened: Opened, block: np.ndarray[Any, Any]) -> float:
    """Of the shortest of several forwards."""
    seconds = []
    for _ in range(FORWARDS):
        watch = Stopwatch()
        opened.forward([block])
        seconds.append(watch.seconds())
    return min(seconds)


@dataclass(frozen=True)
class StageEstimate:
    """One stage, as two small micro-batches have shown it. Bytes."""

    weights: int
    row_in: float  # of what a row brings to it
    row_out: float  # of what it makes of that
    held: Callable[[int], int]  # while a micro-batch of so many rows is computed, what it makes of it included


class StagedRows:
    """The stages of `StagesHere`; a batch counts what a run asks for at once."""

    timed = True

    def __init__(
        self, spec: ModelSpec, setup: Setup, options: Mapping[str, Any], devices: Sequence[torch.device]
    ) -> None:
        self._spec, self._setup, self._options = spec, setup, dict(options)
        self._devices, self._cuda = devices, devices[0].type == "cuda"
        self.most, self.first = MOST, TRACED[0]
        self.usual = int(options.get("max_rows") or (CUDA_MAX_ROWS if self._cuda else CPU_MAX_ROWS))
        self._places: Sequence[str] = ()
        self._cut: Sequence[tuple[int, int]] = ()
        self._looked: Sequence[StageEstimate] = ()
        self._rows = self._answer = self._in_flight = 0

    def warm_up(self) -> None:
        for device in dict.fromkeys(self._devices):
            warm_up_rows(self._setup, self._options, device)

    def describe(self) -> None:
        if self._looked:
            return
        with sizes_named(self._spec):
            cut = cut_model(self._spec, self._setup, self._tuning())
        configured = self._options["split_points"] is not None or stage_shares(self._options["stages"]) is not None
        self._split_by = "given" if configured else "time"
        if stage_shares(self._options["stages"]) is None:
            self._options["split_points"] = [start for start, _ in cut.split[1:]]  # the same one whenever it is opened
        self._places, self._cut, self._rows = [str(place) for place in cut.places], cut.split, cut.rows
        self._in_flight = in_flight_of(self._tuning(), cut.places)
        self._answer = FLOAT * sum(int(np.prod(shape)) for shape in cut.answer.shapes)
        entering: Sequence[Any] = [torch.ones(rows, self._spec.inputs, dtype=cut.dtype) for rows in TRACED]
        looked = []
        with torch.inference_mode():
            for place, (start, stop) in zip(cut.places, cut.split, strict=True):
                stage, entering = _stage(cut.segments[start:stop], place, entering)
                looked.append(stage)
        self._looked = looked

    def stages(self, batch: int) -> Sequence[StageParts]:
        rows, pieces = min(padded(batch), self._rows), math.ceil(batch / self._rows)
        under_way = 1 if self._options["parallel"] == "layers" else self._in_flight * pieces  # micro-batches
        return [
            StageParts(number, place, (start, stop - 1), self._of_stage(number, batch, rows, under_way))
            for number, (place, (start, stop)) in enumerate(zip(self._places, self._cut, strict=True))
        ]

    def _of_stage(self, number: int, batch: int, rows: int, under_way: int) -> MemoryParts:
        """Working memory is what it has been given and what waits behind it; in the first stage also the rows that are
        asked for, in the last one their answers.
        """
        one, first, last = self._looked[number], number == 0, number == len(self._looked) - 1
        working = rows * one.row_in * min(under_way, 1 + BEHIND if self._cuda else 1)
        if not last:
            working += rows * one.row_out * min(under_way - 1, ROOM)
        if first:
            each = block_of(self._spec, 1).nbytes  # as they came: on a CUDA device those of a micro-batch
            working += 0 if self._cuda else rows * one.row_in * min(under_way - 1, ROOM + 1)
            working += rows * each if self._cuda else self._in_flight * batch * each
        if last:
            working += rows * self._answer if self._cuda else (self._in_flight + 1) * batch * self._answer
        return MemoryParts(0, one.weights, 0, one.held(rows), round(working))

    def pages(self, free: int) -> None:
        """Rows keep nothing."""

    def run(self, batch: int) -> float:
        opened = open_staged(self._spec, self._setup, self._tuning())
        try:
            blocks = [block_of(self._spec, batch) for _ in range(self._in_flight)]
            return at_once([partial(seconds_of_block, opened, block) for block in blocks])
        finally:
            opened.close()

    def facts(self) -> Mapping[str, Any]:
        return {
            "features": self._spec.inputs,
            "parallel": self._options["parallel"],
            "stages": len(self._looked),
            "split": self._split_by,
            "micro_batch_rows": self._rows,
            "forwards": self._in_flight,
        }

    def _tuning(self) -> Any:
        return SimpleNamespace(**self._options)


def _stage(
    segments: Sequence[nn.Module], place: torch.device, entering: Sequence[Any]
) -> tuple[StageEstimate, list[Any]]:
    """What a stage takes, and what it makes of a few rows and of more."""
    few, more = TRACED
    own = nn.Sequential(*(copy.deepcopy(segments) if place.type == "cuda" else segments)).to(place)
    there = {rows: mapped(value, lambda tensor: tensor.to(place)) for rows, value in zip(TRACED, entering, strict=True)}
    fresh = {rows: mapped(value, torch.clone) for rows, value in there.items()}  # a stage may write over what it gets

    def call(rows: int) -> Any:
        return own(fresh[rows])

    if place.type == "cuda":
        small, large = (device_peaks(call, place, rows)[0] for rows in TRACED)
        each = max(0.0, large - small) / (more - few)
        held: Callable[[int], int] = lambda rows: round(each * rows)  # noqa: E731
    else:
        held = activations(call, few, more).resident_bytes
    leaving = [own(there[rows]) for rows in TRACED]
    row_in, row_out = _row_bytes(entering[-1]), _row_bytes(leaving[-1])
    return StageEstimate(weight_bytes(own), row_in, row_out, held), leaving


def _row_bytes(value: Any) -> float:
    """Of one of the rows in `value`, the larger of the two small batches."""
    sizes: list[int] = []
    mapped(value, lambda tensor: sizes.append(tensor.nbytes) or tensor)  # type: ignore[func-returns-value]
    return sum(sizes) / TRACED[-1]
