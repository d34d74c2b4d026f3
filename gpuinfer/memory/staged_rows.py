"""A network of rows in stages, tried at numbers of rows that are asked for at once.

They go through as micro-batches, of which a bounded number lies between two stages (`models.stages.pipeline`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.memory.parts import Parts, at_once
from gpuinfer.memory.rows import FLOAT, MOST, TRACED, block_of, seconds_of, sizes_named, warm_up
from gpuinfer.models.footprint import allocations, device_peaks, weight_bytes
from gpuinfer.models.forward import padded
from gpuinfer.models.open_model import CPU_MAX_ROWS, CUDA_MAX_ROWS
from gpuinfer.models.stages.open_staged import Cut, cut_model, in_flight_of, open_staged
from gpuinfer.models.stages.pipeline import ROOM
from gpuinfer.models.stages.stage import mapped
from gpuinfer.models.stages.stage_cuda import BEHIND


@dataclass(frozen=True)
class Looked:
    """One stage, as two small micro-batches have shown it. Bytes."""

    weights: int
    row_in: float  # of what a row brings to it
    row_out: float  # of what it makes of that
    held: Callable[[int], int]  # while a micro-batch of so many rows is computed, what it makes of it included


class StagedRows:
    """Implements `stages.Staged`."""

    timed = True

    def __init__(
        self, spec: ModelSpec, setup: Setup, options: Mapping[str, Any], devices: Sequence[torch.device]
    ) -> None:
        self._spec, self._setup, self._options = spec, setup, dict(options)
        self._devices, self._cuda = devices, devices[0].type == "cuda"
        self.most, self.first = MOST, TRACED[0]
        self.usual = int(options.get("max_rows") or (CUDA_MAX_ROWS if self._cuda else CPU_MAX_ROWS))
        self.places: Sequence[str] = ()
        self._cut: Sequence[tuple[int, int]] = ()
        self._looked: Sequence[Looked] = ()
        self._rows = self._answer = self._in_flight = 0

    def warm_up(self) -> None:
        for device in dict.fromkeys(self._devices):
            warm_up(self._setup, self._options, device)

    def describe(self) -> None:
        if self._looked:
            return
        with sizes_named(self._spec):
            cut = cut_model(self._spec, self._setup, self._tuning())
        given = self._options["split_points"] is not None
        self._split_by = "given" if given else "time"
        self._options["split_points"] = [start for start, _ in cut.split[1:]]  # the same one whenever it is opened
        self.places, self._cut, self._rows = [str(place) for place in cut.places], cut.split, cut.rows
        self._in_flight = in_flight_of(self._tuning(), cut.places)
        self._answer = FLOAT * sum(int(np.prod(shape)) for shape in cut.answer.shapes)
        self._looked = _looked_at(cut, self._spec.inputs)

    def layers(self) -> Sequence[tuple[int, int]]:
        return [(start, stop - 1) for start, stop in self._cut]

    def parts(self, batch: int) -> Sequence[Parts]:
        rows, pieces = min(padded(batch), self._rows), math.ceil(batch / self._rows)
        under_way = 1 if self._alone else self._in_flight * pieces  # micro-batches
        return [self._of_stage(number, batch, rows, under_way) for number in range(len(self._looked))]

    def _of_stage(self, number: int, batch: int, rows: int, under_way: int) -> Parts:
        """Working memory is what it has been given and what waits behind it; in the first stage also the rows that are
        asked for, in the last one their answers.
        """
        one, first, last = self._looked[number], number == 0, number == len(self._looked) - 1
        working = rows * one.row_in * min(under_way, 1 + BEHIND if self._cuda else 1)
        if not last:
            working += rows * one.row_out * min(under_way - 1, ROOM)
        if first:
            working += 0 if self._cuda else rows * one.row_in * min(under_way - 1, ROOM + 1)
            working += self._rows_asked(batch, rows)
        if last:
            working += rows * self._answer if self._cuda else (self._in_flight + 1) * batch * self._answer
        return Parts(0, one.weights, 0, one.held(rows), round(working))

    def _rows_asked(self, batch: int, rows: int) -> int:
        """As they came: on the host all of them, on a CUDA device those of a micro-batch."""
        each = block_of(self._spec, 1).nbytes
        return rows * each if self._cuda else self._in_flight * batch * each

    @property
    def _alone(self) -> bool:
        return bool(self._options["parallel"] == "layers")

    def pages(self, free: int) -> None:
        """Rows keep nothing."""

    def run(self, batch: int) -> float:
        opened = open_staged(self._spec, self._setup, self._tuning())
        try:
            blocks = [block_of(self._spec, batch) for _ in range(self._in_flight)]
            return at_once([partial(seconds_of, opened, block) for block in blocks])
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


def _looked_at(cut: Cut, inputs: int) -> list[Looked]:
    entering = [torch.ones(rows, inputs, dtype=cut.dtype) for rows in TRACED]
    found = []
    with torch.inference_mode():
        for place, (start, stop) in zip(cut.places, cut.split, strict=True):
            stage, entering = _stage(cut.segments[start:stop], place, entering)
            found.append(stage)
    return found


def _stage(segments: Sequence[nn.Module], place: torch.device, entering: Sequence[Any]) -> tuple[Looked, list[Any]]:
    """What a stage takes, and what it makes of a few rows and of more."""
    few, more = TRACED
    own = nn.Sequential(*(copy.deepcopy(segments) if place.type == "cuda" else segments)).to(place)
    there = {rows: mapped(value, lambda tensor: tensor.to(place)) for rows, value in zip(TRACED, entering, strict=True)}
    fresh = {rows: mapped(value, torch.clone) for rows, value in there.items()}  # a stage may write over what it gets

    def call(rows: int) -> Any:
        return own(fresh[rows])

    if place.type == "cuda":
        small, large = (device_peaks(call, place, rows)[0] for rows in TRACED)
        held: Callable[[int], int] = partial(_in_proportion, max(0.0, large - small) / (more - few))
    else:
        held = lru_cache(4096)(allocations(call, few, more).resident_bytes)
    leaving = [own(there[rows]) for rows in TRACED]
    row_in, row_out = _row_bytes(entering[-1]), _row_bytes(leaving[-1])
    return Looked(weight_bytes(own), row_in, row_out, held), leaving


def _in_proportion(each: float, rows: int) -> int:
    return round(each * rows)


def _row_bytes(value: Any) -> float:
    """Of one of the rows in `value`, the larger of the two small batches."""
    sizes: list[int] = []
    mapped(value, lambda tensor: sizes.append(tensor.nbytes) or tensor)  # type: ignore[func-returns-value]
    return sum(sizes) / TRACED[-1]
