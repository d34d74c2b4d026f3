"""A narrow number format judged by float32: how far a side's logits are from it, and whether ours are the further ones.

Two programs that round in other places differ, and neither is wrong for it. What would be wrong is to lie further from
float32 than the format makes anybody lie, so the other side's own distance is the measure of ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from gpuinfer.verifying import positions
from gpuinfer.verifying.asking import Answers
from gpuinfer.verifying.judging import Difference, Divergence, Row
from gpuinfer.verifying.positions import Pieces, Tokens
from gpuinfer.verifying.rig import LEAST, Rig

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
    logits: Mapping[int, tuple[float, float, float]]  # of these tokens: ours, the other's, in float32
    apart: float


def distance(rig: Rig, reference: Answers, exact: Ask) -> float:
    """The largest distance of our logits from `exact`, over all positions of all prompts with their answers."""
    worst = 0.0
    for _, tokens in positions.sequences(rig, reference):
        for ours, wanted in zip(positions.logits(rig.decoder, tokens), exact(tokens), strict=True):
            worst = max(worst, float(_finite(np.abs(ours - wanted)).max()))
    return worst


def against(rig: Rig, name: str, reference: Answers, other: Ask, exact: Ask, sides: tuple[str, str]) -> Difference:
    """Ours must be no further from `exact` than FACTOR times the other side's furthest logit, at any position."""
    finding = Difference(name, unit="positions")
    places = list(_places(rig, reference, other, exact))
    finding.compared = len(places)
    finding.difference = max(place.apart for place in places)
    ours, theirs = (max(place.distances[side] for place in places) for side in (0, 1))
    finding.from_float32 = dict(zip(sides, (ours, theirs), strict=True))
    allowed = max(LEAST, FACTOR * theirs) if math.isfinite(theirs) else 0.0
    finding.divergences += [_divergence(place, sides, allowed) for place in places if _notable(place, allowed)]
    faults = [one for one in finding.divergences if not one.tie]
    if faults:
        finding.status, finding.why = "fails", faults[0].why
    return finding


def _places(rig: Rig, reference: Answers, other: Ask, exact: Ask) -> Iterator[TokenPosition]:
    for ask, tokens in positions.sequences(rig, reference):
        start = 0
        for ours, theirs, wanted in zip(
            positions.logits(rig.decoder, tokens), other(tokens), exact(tokens), strict=True
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
                    {token: _values(at, token, ours, theirs, wanted) for token in (*likeliest, furthest)},
                    float(apart[at]),
                )
            start += len(ours)


def _values(at: int, token: int, *sides: Row) -> tuple[float, float, float]:
    ours, theirs, exact = (float(side[at, token]) for side in sides)
    return ours, theirs, exact


def _finite(apart: Row) -> Row:
    return np.nan_to_num(apart, nan=math.inf, posinf=math.inf)


def _notable(place: TokenPosition, allowed: float) -> bool:
    return place.distances[0] > allowed or place.likeliest[0] != place.likeliest[1]


def _divergence(place: TokenPosition, sides: tuple[str, str], allowed: float) -> Divergence:
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
    return Divergence(place.prompt, place.number, 0, place.position, pair, logits, tie, why)
