"""Logits at every position of prompt and answer, ours against another decoder's.

Of a narrow number format float32 is the judge: two programs that round in other places differ, so what counts is which
side is further from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuinfer.lab.verify.divergence import AnswerDivergence, Difference, Row
from gpuinfer.lab.verify.probed_answers import Answers, VerifyQuestion
from gpuinfer.lab.verify.verify_setup import LEAST, Tolerance, VerifySetup
from gpuinfer.text.transformer import PAGE, Step

if TYPE_CHECKING:
    from gpuinfer.text.transformer import Decoder

PIECE_BYTES = 32 << 20  # of logits at once

Tokens = NDArray[np.int32]
Pieces = Iterator[NDArray[np.float32]]  # [positions, vocabulary], one after another


def compare_logits(
    opened: VerifySetup,
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
    for ask, tokens in sequences(opened, reference):
        start = 0
        for ours, theirs in zip(position_logits(opened.decoder, tokens), other(tokens), strict=True):
            finding.compared += len(ours)
            found = _compared(ours, theirs, start, sides, tolerance, finding)
            finding.divergences += [
                AnswerDivergence(ask.item.text, ask.number, 0, position, pair, values, tie, why)
                for position, pair, values, tie, why in found
            ]
            start += len(ours)
    faults = [one for one in finding.divergences if not one.tie]
    if faults:
        finding.status, finding.why = "fails", faults[0].why
    return finding


def sequences(opened: VerifySetup, reference: Answers) -> Iterator[tuple[VerifyQuestion, Tokens]]:
    """Every prompt with its answer, but for the answer's last token, after which nothing came."""
    for ask, (answer,) in zip(reference.route.asks[: len(opened.items)], reference.tokens, strict=False):
        yield ask, np.concatenate([ask.item.tokens, np.array(answer[:-1], np.int32)])


def position_logits(decoder: Decoder, tokens: Tokens) -> Pieces:
    """Those of every position, computed in the first pages.

    Where tokens see those after them all go through together, for each piece of the logits anew.
    """
    size, masking, count = rows_in_a_piece(decoder.shape.vocabulary), decoder.shape.masking, len(tokens)
    places = np.arange(count, dtype=np.int32)
    pages = np.arange(-(-count // PAGE), dtype=np.int32)[None]
    for start in range(0, count, size):
        wanted = places[start : start + size]
        if masking is None:
            part = tokens[start : start + size]
            begin, length = np.array([start], np.int32), np.array([len(part)], np.int32)
            step = Step(part, pages, begin, length, wanted - start)
        else:
            block = masking.block or count
            sees = np.minimum(count, (places // block + 1) * block).astype(np.int32)
            step = Step(tokens, pages, np.zeros(1, np.int32), np.array([count], np.int32), wanted, sees=sees)
        yield decoder.forward(step).float().cpu().numpy().copy()


def rows_in_a_piece(vocabulary: int) -> int:
    """Positions at once."""
    return max(1, PIECE_BYTES // (4 * vocabulary))


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


FACTOR = 2.0  # ours may be so many times as far from float32 as the other side's furthest logit
SIDES = 2.0  # two answers of one program may lie apart by so many times its distance: one on either side of float32

Ask = Callable[[Tokens], Pieces]


class TokenPosition(NamedTuple):
    """One position: how far each side is from float32 at its furthest logit, and the logits that are spoken of."""

    prompt: str
    number: int
    position: int
    distances: tuple[float, float]
    likeliest: tuple[int, int]  # token of each side
    furthest: int  # the token at which our side is furthest
    logits: Mapping[int, tuple[float, ...]]  # of these tokens: ours, the other's, in float32
    apart: float


def distance_from_float32(opened: VerifySetup, reference: Answers, exact: Ask) -> float:
    """The largest distance of our logits from `exact`, over all positions of all prompts with their answers."""
    worst = 0.0
    for _, tokens in sequences(opened, reference):
        for ours, wanted in zip(position_logits(opened.decoder, tokens), exact(tokens), strict=True):
            worst = max(worst, float(_finite(np.abs(ours - wanted)).max()))
    return worst


def compare_rounding(
    opened: VerifySetup, name: str, reference: Answers, other: Ask, exact: Ask, sides: tuple[str, str]
) -> Difference:
    """Ours must be no further from `exact` than FACTOR times the other side's furthest logit, at any position."""
    finding = Difference(name, unit="positions")
    places = list(_places(opened, reference, other, exact))
    finding.compared = len(places)
    finding.difference = max(place.apart for place in places)
    ours, theirs = (max(place.distances[side] for place in places) for side in (0, 1))
    finding.from_float32 = dict(zip(sides, (ours, theirs), strict=True))
    allowed = max(LEAST, FACTOR * theirs) if math.isfinite(theirs) else 0.0
    finding.divergences += [
        _divergence(place, sides, allowed)
        for place in places
        if place.distances[0] > allowed or place.likeliest[0] != place.likeliest[1]
    ]
    faults = [one for one in finding.divergences if not one.tie]
    if faults:
        finding.status, finding.why = "fails", faults[0].why
    return finding


def _places(opened: VerifySetup, reference: Answers, other: Ask, exact: Ask) -> Iterator[TokenPosition]:
    for ask, tokens in sequences(opened, reference):
        start = 0
        for ours, theirs, wanted in zip(
            position_logits(opened.decoder, tokens), other(tokens), exact(tokens), strict=True
        ):
            off, other_off = _finite(np.abs(ours - wanted)), _finite(np.abs(theirs - wanted))
            apart = _finite(np.abs(ours - theirs)).max(axis=1)
            for at in range(len(ours)):
                likeliest, furthest = (int(ours[at].argmax()), int(theirs[at].argmax())), int(off[at].argmax())
                yield TokenPosition(
                    ask.item.text,
                    ask.number,
                    start + at,
                    (float(off[at].max()), float(other_off[at].max())),
                    likeliest,
                    furthest,
                    {
                        token: tuple(float(side[at, token]) for side in (ours, theirs, wanted))
                        for token in (*likeliest, furthest)
                    },
                    float(apart[at]),
                )
            start += len(ours)


def _finite(apart: Row) -> Row:
    return np.nan_to_num(apart, nan=math.inf, posinf=math.inf)


def _divergence(place: TokenPosition, sides: tuple[str, str], allowed: float) -> AnswerDivergence:
    """A fault, or two likeliest tokens that lie within the rounding of each other: a tie."""
    tie = place.distances[0] <= allowed
    pair = place.likeliest if tie else (place.likeliest[0], place.furthest)
    why = (
        f"a tie: {sides[0]} is within {allowed:.2g} of float32"
        if tie
        else f"{sides[0]} is {place.distances[0]:.2g} from float32 at token {place.furthest}; {allowed:.2g} is "
        f"allowed, {FACTOR:g} times as far as {sides[1]} at its furthest"
    )
    logits = {
        side: (place.logits[pair[0]][number], place.logits[pair[1]][number])
        for number, side in enumerate((*sides, "float32"))
    }
    return AnswerDivergence(place.prompt, place.number, 0, place.position, pair, logits, tie, why)
