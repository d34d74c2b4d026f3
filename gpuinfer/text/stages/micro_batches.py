"""A step as several smaller ones, which go through the stages one behind the other.

They go through each stage in their order: so a long prompt may be cut too, as a later part finds the keys and values of
an earlier one in the cache. Where tokens see what comes after them, a segment stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.text.step import Step

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens and segments of a step; arrays that steps of the same rows have in common."""

    tokens: Range
    segments: Range
    skipped: int  # tokens of the first of these segments that are in an earlier piece
    pages: NDArray[np.int32]
    lengths: NDArray[np.int32]
    adapters: NDArray[np.int32] | None


class Cutter:
    """Cuts steps into micro-batches of about `rows` tokens; None: into `most`, or fewer where each would have fewer
    than `least` tokens.

    Steps of the same rows, by the identity of their arrays, give micro-batches of the same arrays, as decoders expect.
    """

    def __init__(self, rows: int | None, least: int, most: int) -> None:
        self._rows, self._least, self._most = rows, least, most
        self._known: tuple[Any, Any, Any, bool] | None = None
        self._pieces: list[_Piece] = []

    def cut(self, step: Step) -> list[Step]:
        """Their wanted tokens, one behind the other, are those of the step. They hold on to none of its arrays that
        change from step to step.
        """
        count = self.count(len(step.tokens))
        known = step.pages, step.lengths, step.adapters, step.sees is None
        same = self._known is not None and all(a is b for a, b in zip(known, self._known, strict=True))
        if not same:
            self._pieces, self._known = _pieces(step, count), known
        return [_part(step, piece) for piece in self._pieces]

    def count(self, tokens: int) -> int:
        """Into how many a step of so many is cut, of models whose tokens see only what comes before them."""
        if self._rows is not None:
            return math.ceil(tokens / self._rows)
        return max(1, min(self._most, tokens // self._least))


def _pieces(step: Step, count: int) -> list[_Piece]:
    ends = np.cumsum(step.lengths, dtype=np.int64)
    found = []
    for first, last in _ranges(step, ends, count):
        one, other = np.searchsorted(ends, [first, last - 1], "right").tolist()
        segments = slice(one, other + 1)
        lengths = step.lengths[segments].copy()
        skipped = first - int(ends[one] - step.lengths[one])
        lengths[-1] -= ends[other] - last
        lengths[0] -= skipped
        adapters = None if step.adapters is None else step.adapters[segments].copy()
        found.append(_Piece((first, last), (one, other + 1), skipped, step.pages[segments].copy(), lengths, adapters))
    return found


def _ranges(step: Step, ends: NDArray[np.int64], count: int) -> Sequence[Range]:
    """Tokens of each piece, about as many in each."""
    total = len(step.tokens)
    places = {round(total * number / count) for number in range(1, count)}
    if step.sees is not None:  # whole segments
        places = {int(ends[np.searchsorted(ends, place)]) for place in places}
    bounds = sorted({0, *places, total})
    return list(pairwise(bounds))


def _part(step: Step, piece: _Piece) -> Step:
    (first, last), (one, other) = piece.tokens, piece.segments
    starts = step.starts[one:other].copy()
    starts[0] += piece.skipped
    low, high = np.searchsorted(step.wanted, [first, last]).tolist()
    return Step(
        step.tokens[first:last].copy(),
        piece.pages,
        starts,
        piece.lengths,
        step.wanted[low:high] - np.int32(first),
        piece.adapters,
        None if step.sees is None else step.sees[first:last].copy(),
        _vectors(step, first, last),
    )


def _vectors(step: Step, first: int, last: int) -> Any:
    if step.vectors is None:
        return None
    low, high = np.searchsorted(step.vectors.places, [first, last]).tolist()
    if low == high:
        return None
    places = step.vectors.places[low:high] - np.int32(first)
    return replace(step.vectors, places=places, values=step.vectors.values[low:high])
