"""How many games of self-play ended by resignation, and how often that was false.

Silver et al. 2017, "Mastering the game of Go without human knowledge", Methods: nobody may resign a tenth of the games;
of those that somebody would have resigned, fewer than 5 % are to be games that the same player did not lose.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gpuinfer.report.strength import NORMAL_95
from gpuinfer.units import whole

MOST_FALSE = 0.05  # of the checked games that somebody would have resigned
STEP = 0.005  # between thresholds that are looked at
THRESHOLDS = array("f", [round(step * STEP, 3) for step in range(1, round(1 / STEP) + 1)])  # float32, as in the search
COUNTED = ("threshold", "games", "resigned", "checked", "would_have_resigned", "false")
ADVISED = "advised"  # a fact where there is such a threshold
FACT = "resignation: "  # before each of them, in `Progress.facts`


class Ended(NamedTuple):
    """A game, in what resignation is judged by."""

    checked: bool  # nobody was allowed to resign
    resigned: bool  # somebody did, or would have where it is checked
    false: bool  # and did not lose in the end
    lowest: float  # what a position was worth at least to whoever moved there, in the whole game; inf where none was
    lowest_false: float  # the same of those who did not lose; only where it was the least of the game so far


class Resignations:
    """Games by number, added up as they come. A game counts once, however often it is told of."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._known: set[int] = set()
        # Checked games by how many of the thresholds they would have been resigned at, and falsely so.
        self._reached = [0] * (len(THRESHOLDS) + 1)
        self._reached_falsely = [0] * (len(THRESHOLDS) + 1)
        self._counts = dict.fromkeys(COUNTED[1:], 0)

    def add(self, games: Mapping[int, Sequence[Any]]) -> None:
        """By game: the fields of an `Ended`."""
        for number, fields in games.items():
            if number in self._known:
                continue
            one = Ended(*fields)
            self._known.add(number)
            self._counts["games"] += 1
            self._counts["checked"] += one.checked
            self._counts["resigned"] += one.resigned and not one.checked
            self._counts["would_have_resigned"] += one.resigned and one.checked
            if one.checked:
                self._counts["false"] += one.false
                self._reached[bisect_right(THRESHOLDS, -one.lowest)] += 1
                self._reached_falsely[bisect_right(THRESHOLDS, -one.lowest_false)] += 1

    def facts(self) -> dict[str, float]:
        """What `of_resignation` reads; nothing before a game has ended."""
        if not self._known:
            return {}
        found: dict[str, float] = {"threshold": self._threshold, **self._counts}
        if _too_many(found) and (advised := self._stricter()) is not None:
            found[ADVISED] = advised
        return {f"{FACT}{name}": value for name, value in found.items()}

    def _stricter(self) -> float | None:
        """The mildest of stricter thresholds at which no more of the same games would have been resigned falsely than
        should be, and some rightly. Counted a little too strictly: a game whose loser would have resigned first counts
        as false where the other came to think even worse of it.
        """
        found, resigned, false = None, 0, 0
        for step in range(len(THRESHOLDS), math.floor(self._threshold / STEP), -1):
            resigned += self._reached[step]
            false += self._reached_falsely[step]
            if resigned and false <= MOST_FALSE * resigned:
                found = round(step * STEP, 3)
        return found


def _too_many(found: Mapping[str, float]) -> bool:
    return found["false"] > MOST_FALSE * found["would_have_resigned"]


def of_resignation(facts: Mapping[str, float]) -> dict[str, Any] | None:
    """The report's `resignation`, of the facts of `Resignations`; None where nobody may, or no game has ended."""
    if f"{FACT}games" not in facts:
        return None
    found = {name: facts[f"{FACT}{name}"] for name in COUNTED}
    would, false = round(found["would_have_resigned"]), round(found["false"])
    advised = facts.get(f"{FACT}{ADVISED}")
    return {
        "threshold": found.pop("threshold"),
        **{name: round(count) for name, count in found.items()},
        "false_rate": false / would if would else None,
        "false_rate_ci95": wilson(false, would) if would else None,
        "advised": advised,
        "advice": _advice(advised) if _too_many(found) else None,
    }


def _advice(threshold: float | None) -> str:
    cure = (
        "At no threshold up to 1 would it have been less: leave --resign out until the network has learnt more."
        if threshold is None
        else f"Try --resign {threshold:g}: in these games it would have been no more than that."
    )
    return f"More than {MOST_FALSE:.0%} of resignations are false, and the network learns from them. {cure}"


def wilson(hits: int, trials: int) -> list[float]:
    """The 95 % interval of a share (Wilson 1927, "Probable inference, the law of succession, and statistical
    inference").
    """
    share, square = hits / trials, NORMAL_95**2
    middle = share + square / (2 * trials)
    reach = NORMAL_95 * math.sqrt(share * (1 - share) / trials + square / (4 * trials**2))
    whole_of = 1 + square / trials
    return [max(0.0, (middle - reach) / whole_of), min(1.0, (middle + reach) / whole_of)]


def in_share(found: Mapping[str, Any]) -> str:
    """Such as `31% of 2,000 games`: of a report's `resignation`, those that may be resigned."""
    free = found["games"] - found["checked"]
    return f"{found['resigned'] / free:.0%} of {whole(free)} games" if free else "no game: all are checked"


def in_rate(found: Mapping[str, Any]) -> str:
    """What came of the games that nobody may resign, such as `false in 2 of 61 checked games that would have been
    resigned (3.3 %, 0.9 to 11.2 %)`.
    """
    would = found["would_have_resigned"]
    if not would:
        return f"of {whole(found['checked'])} checked games none would have been resigned"
    low, high = found["false_rate_ci95"]
    rate = f"{100 * found['false_rate']:.1f} %, {100 * low:.1f} to {100 * high:.1f} %"
    return f"false in {whole(found['false'])} of {whole(would)} checked games that would have been resigned ({rate})"
