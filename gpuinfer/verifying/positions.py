"""Logits at every position of prompt and answer, ours against another decoder's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gpuinfer.text.step import PAGE, Step
from gpuinfer.verifying.asking import Answers, Question
from gpuinfer.verifying.judging import Difference, Divergence, Row
from gpuinfer.verifying.rig import Rig, Tolerance

if TYPE_CHECKING:
    from gpuinfer.text.step import Decoder

PIECE_BYTES = 32 << 20  # of logits at once

Tokens = NDArray[np.int32]
Pieces = Iterator[NDArray[np.float32]]  # [positions, vocabulary], one after another


def against(
    rig: Rig,
    name: str,
    reference: Answers,
    other: Callable[[Tokens], Pieces],
    sides: tuple[str, str],
    tolerance: Tolerance,
) -> Difference:
    """Every prompt with its answer goes through both decoders. Greedy tokens are the same at every position, or
    their logits tie; all logits are within the tolerance.
    """
    finding = Difference(name, unit="positions")
    for ask, tokens in sequences(rig, reference):
        start = 0
        for ours, theirs in _paired(logits(rig.decoder, tokens), other(tokens)):
            finding.compared += len(ours)
            found = _compared(ours, theirs, start, sides, tolerance, finding)
            finding.divergences += [
                Divergence(ask.item.text, ask.number, 0, position, pair, values, tie, why)
                for position, pair, values, tie, why in found
            ]
            start += len(ours)
    faults = [one for one in finding.divergences if not one.tie]
    if faults:
        finding.status, finding.why = "fails", faults[0].why
    return finding


def sequences(rig: Rig, reference: Answers) -> Iterator[tuple[Question, Tokens]]:
    """Every prompt with its answer, but for the answer's last token, after which nothing came."""
    for ask, (answer,) in zip(reference.route.asks[: len(rig.items)], reference.tokens, strict=False):
        yield ask, np.concatenate([ask.item.tokens, np.array(answer[:-1], np.int32)])


def logits(decoder: Decoder, tokens: Tokens) -> Pieces:
    """Those of every position, computed in the first pages."""
    size, masking = piece(decoder.shape.vocabulary), decoder.shape.masking
    pages = np.arange(-(-len(tokens) // PAGE), dtype=np.int32)[None]
    if masking is not None:
        yield from _of_canvas(decoder, tokens, pages, masking.block, size)
        return
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        begin, count = np.array([start], np.int32), np.array([len(part)], np.int32)
        step = Step(part, pages, begin, count, np.arange(len(part), dtype=np.int32))
        yield decoder.forward(step).float().cpu().numpy().copy()


def _of_canvas(decoder: Decoder, tokens: Tokens, pages: Tokens, block: int | None, size: int) -> Pieces:
    """Where tokens see those after them all go through together, for each piece of the logits anew."""
    count, zero = len(tokens), np.zeros(1, np.int32)
    places = np.arange(count, dtype=np.int32)
    sees = np.full(count, count, np.int32) if block is None else np.minimum(count, (places // block + 1) * block)
    for start in range(0, count, size):
        wanted = places[start : start + size]
        step = Step(tokens, pages, zero, np.array([count], np.int32), wanted, sees=sees.astype(np.int32))
        yield decoder.forward(step).float().cpu().numpy().copy()


def piece(vocabulary: int) -> int:
    """Positions at once."""
    return max(1, PIECE_BYTES // (4 * vocabulary))


def _paired(ours: Pieces, theirs: Pieces) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    yield from zip(ours, theirs, strict=True)


def _compared(
    ours: Row, theirs: Row, start: int, sides: tuple[str, str], tolerance: Tolerance, finding: Difference
) -> Iterator[tuple[int, tuple[int, int], dict[str, tuple[float, float]], bool, str]]:
    """The positions that differ: faults, and ties."""
    apart = np.abs(ours - theirs)
    worst = np.where(np.isnan(apart).any(axis=1), math.inf, apart.max(axis=1))
    bad = ~(apart <= tolerance.allowed(ours))
    finding.difference = max(finding.difference, float(worst.max()))
    first, second = ours.argmax(axis=1), theirs.argmax(axis=1)
    for at in np.flatnonzero(bad.any(axis=1) | (first != second)).tolist():
        pair = (int(first[at]), int(second[at]))
        tie = not bad[at].any()
        if not tie and pair[0] == pair[1]:
            pair = (pair[0], int(np.where(bad[at], np.nan_to_num(apart[at], nan=math.inf), 0).argmax()))
        values = {
            side: (float(rows[at, pair[0]]), float(rows[at, pair[1]]))
            for side, rows in zip(sides, (ours, theirs), strict=True)
        }
        gap = abs(values[sides[0]][0] - values[sides[0]][1])
        why = (
            f"a tie: the two logits are {gap:.2g} apart"
            if tie
            else f"the logits differ by {worst[at]:.2g}, and {tolerance.allowed(ours[at])[0]:.2g} is allowed"
        )
        yield start + at, pair, values, tie, why
