"""Adapters as the compiled step reads them: packed for their products, at places of a table, their rows side by side.

A step's segments are sorted by their adapters, so that the rows of each are one run, and one product for all of them.
The sums of a product depend on a row and a column alone, so that neither the order of rows nor their number shows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.text.decoder import cpu_sizes as at
from gpuinfer.text.decoder.cpu_panels import panels_of
from gpuinfer.text.shape import Shape
from gpuinfer.text.step import Step
from gpuinfer.text.weights import Adapter

RUN = 3  # numbers that say a run: place, first row, row after the last
LEAST_PLACES = 8
NO_RUNS: NDArray[np.int64] = np.zeros((0, RUN), np.int64)
FIRST_PART = {"qkv": at.QKV, "out": at.OUT, "up": at.UP, "down": at.DOWN}


@dataclass(frozen=True)
class PackedAdapter:
    """`table` int64 [layers, PARTS, FACTS]; `kept` is what its addresses point to."""

    table: NDArray[np.int64]
    kept: list[NDArray[Any]]
    rank: int


@dataclass(frozen=True)
class SortedStep:
    """A step whose segments are in the order of their adapters, and `runs` int64 [runs, RUN] of rows that have one.
    `back` [tokens]: where each of the step's tokens is then; None where it has stayed.
    """

    step: Step
    runs: NDArray[np.int64]
    back: NDArray[np.int32] | None = None


def pack(adapter: Adapter, shape: Shape) -> PackedAdapter:
    """In float32, whatever the model computes in: low ranks are little work."""
    table = np.zeros((shape.layers, at.PARTS, at.FACTS), np.int64)
    kept: list[NDArray[Any]] = []
    for number, layer in enumerate(adapter.layers):
        parts = dict(FIRST_PART)
        for low in layer:
            down, up = panels_of(low.down.float()), panels_of(low.up.float())
            kept += [down, up]
            table[number, parts[low.product]] = down.ctypes.data, up.ctypes.data, low.rank, low.first, len(low.up)
            parts[low.product] += 1
    return PackedAdapter(table, kept, adapter.rank)


@dataclass(frozen=True)
class _Order:
    """How the segments of one step are sorted: `order` of segments, `rows` of tokens, and `back` where each of these is
    then. Steps of the same rows have the very same arrays, and are sorted once.
    """

    step: Step
    order: NDArray[np.int64]
    rows: NDArray[np.int64]
    back: NDArray[np.int32]
    runs: NDArray[np.int64]

    def of(self, step: Step) -> bool:
        own = self.step
        return step.adapters is own.adapters and step.lengths is own.lengths and len(step.tokens) == len(own.tokens)

    def applied(self, step: Step) -> Step:
        """The segments in this order; the logits that are asked for stay in theirs."""
        order = self.order
        return replace(
            step,
            tokens=step.tokens[self.rows],
            pages=step.pages[order],
            starts=step.starts[order],
            lengths=step.lengths[order],
            wanted=self.back[step.wanted],
            sees=None if step.sees is None else step.sees[self.rows],
            vectors=None if step.vectors is None else replace(step.vectors, places=self.back[step.vectors.places]),
        )


class LoadedAdapters:
    """The adapters that steps may name, in `tables` [places, layers, PARTS, FACTS]: place 0 has none."""

    def __init__(self, layers: int) -> None:
        self.tables = np.zeros((LEAST_PLACES, layers, at.PARTS, at.FACTS), np.int64)
        self._places: dict[int, int] = {}
        self._kept: dict[int, PackedAdapter] = {}
        self.rank = 0  # the largest until now
        self._order: _Order | None = None  # of the latest step

    def load(self, number: int, packed: PackedAdapter) -> bool:
        """Whether there is more room needed than there was."""
        taken = set(self._places.values())
        places, grows = len(self.tables), packed.rank > self.rank
        place = next((place for place in range(1, places) if place not in taken), places)
        if place == places:
            grows = True
            self.tables = np.concatenate([self.tables, np.zeros_like(self.tables)])
        self.tables[place] = packed.table
        self._places[number], self._kept[number] = place, packed
        self._order = None
        self.rank = max(self.rank, packed.rank)
        return grows

    def unload(self, number: int) -> None:
        place = self._places.pop(number)
        del self._kept[number]
        self.tables[place] = 0

    def sorted(self, step: Step) -> SortedStep:
        """The same step, with the rows of each adapter side by side."""
        if step.adapters is None:
            return SortedStep(step, NO_RUNS)
        order = self._order
        if order is None or not order.of(step):
            order = self._order = self._ordered(step)
        return SortedStep(order.applied(step), order.runs, order.back)

    def _ordered(self, step: Step) -> _Order:
        assert step.adapters is not None
        places = np.array([self._places[number] if number else 0 for number in step.adapters.tolist()])
        order = np.argsort(places, kind="stable")
        places, lengths = places[order], step.lengths[order]
        ends = np.cumsum(lengths, dtype=np.int64)
        last = np.flatnonzero(np.append(places[1:] != places[:-1], True))
        until = ends[last]
        runs = np.stack([places[last], np.concatenate([[0], until[:-1]]), until], axis=1)
        firsts = np.cumsum(step.lengths, dtype=np.int64) - step.lengths
        rows = np.repeat(firsts[order] - (ends - lengths), lengths) + np.arange(len(step.tokens))
        back = np.empty(len(rows), np.int32)
        back[rows] = np.arange(len(rows), dtype=np.int32)
        return _Order(step, order, rows, back, runs[runs[:, 0] > 0])
