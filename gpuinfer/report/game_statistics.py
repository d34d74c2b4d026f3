"""Statistics of games with intervals: strength as a score and as Elo, and resignations and how many were false.

The expected score of a player who is D Elo above another is 1 / (1 + 10^(−D/400)) (Elo 1978, "The rating of chess
players, past and present"). Resignation as in Silver et al. 2017, "Mastering the game of Go without human knowledge",
Methods: a tenth of the games are played without resignation; of those that a player would have resigned, fewer than 5 %
may be games that this player did not lose.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from gpuinfer.report.document import ResignationSection, StrengthSection
from gpuinfer.units import whole

PAIR = 2  # games
NORMAL_95 = 1.959964  # standard deviations
ELO_SCALE = 400.0

WIN, DRAW, LOSS = 1.0, 0.5, 0.0
STRENGTH_COUNTS = ("wins", "draws", "losses", "pairs", "score_low", "score_high")
STRENGTH_FACT = "strength: "  # before each of them, in `Progress.facts`


class ScoreTally:
    """Points by the game's number, added up as they come. A game counts once, however often it is added."""

    def __init__(self, points: Mapping[int, float] | None = None) -> None:
        self._points: dict[int, float] = {}
        self._of_pair: dict[int, tuple[float, int]] = {}  # number → points, games
        # Sums over pairs of points², points × games, games²: all that the variance takes.
        self._squares = [0.0, 0.0, 0.0]
        self._counts = {WIN: 0, DRAW: 0, LOSS: 0}
        self.add(points or {})

    def add(self, points: Mapping[int, float]) -> None:
        """By game: 1 for one that was won, ½ for a draw, 0 for one that was lost."""
        for number, one in points.items():
            if number in self._points:
                continue
            self._points[number] = one
            self._counts[one] += 1
            before = self._of_pair.get(number // PAIR, (0.0, 0))
            self._weigh(before, -1)
            self._of_pair[number // PAIR] = now = (before[0] + one, before[1] + 1)
            self._weigh(now, 1)

    def _weigh(self, pair: tuple[float, int], sign: int) -> None:
        scored, games = pair
        for index, product in enumerate((scored * scored, scored * games, games * games)):
            self._squares[index] += sign * product

    def facts(self) -> dict[str, float]:
        """What `of_strength` reads; nothing before a game has ended."""
        if not self._points:
            return {}
        low, high = self.interval()
        wins, draws, losses = (self._counts[one] for one in (WIN, DRAW, LOSS))
        pairs = sum(games == PAIR for _, games in self._of_pair.values())
        values = (wins, draws, losses, pairs, low, high)
        return {f"{STRENGTH_FACT}{name}": value for name, value in zip(STRENGTH_COUNTS, values, strict=True)}

    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the score."""
        games = len(self._points) + 2 * PAIR
        scored = self._counts[WIN] + self._counts[DRAW] / 2 + PAIR
        mean = scored / games
        squares, products, sizes = (
            one + added for one, added in zip(self._squares, (PAIR**2, PAIR**2, 2 * PAIR**2), strict=True)
        )
        # Of a ratio of sums over pairs of different sizes (Cochran 1977, "Sampling techniques", section 6.4).
        variance = max(0.0, squares - 2 * mean * products + mean * mean * sizes) / games**2
        reach = NORMAL_95 * math.sqrt(variance)
        return max(0.0, mean - reach), min(1.0, mean + reach)


def of_strength(facts: Mapping[str, float]) -> StrengthSection | None:
    """The report's `strength`, from the facts of a `ScoreTally`; None without an opponent, or before a game has ended.

    `elo` and the ends of `elo_ci95` are None where the score is 0 or 1, as no Elo is that far.
    """
    if f"{STRENGTH_FACT}wins" not in facts:
        return None
    wins, draws, losses, pairs, low, high = (facts[f"{STRENGTH_FACT}{name}"] for name in STRENGTH_COUNTS)
    games = wins + draws + losses
    score = (wins + draws / 2) / games
    return {
        "games": round(games),
        "pairs": round(pairs),
        "wins": round(wins),
        "draws": round(draws),
        "losses": round(losses),
        "score": score,
        "score_ci95": [low, high],
        "elo": elo(score),
        "elo_ci95": [elo(low), elo(high)],
    }


def elo(score: float) -> float | None:
    """The difference in Elo that predicts this score; None for a score of 0 or 1."""
    if not 0.0 < score < 1.0:
        return None
    return ELO_SCALE * math.log10(score / (1.0 - score))


def in_elo(found: Mapping[str, Any]) -> str:
    """Such as `+85 Elo (+40 to +132)`."""
    if found["elo"] is None:
        return f"{_ends(found['elo_ci95'], 'Elo')}, all {'won' if found['score'] else 'lost'}"
    return f"{signed(found['elo'])} Elo ({_ends(found['elo_ci95'])})"


def in_score(found: Mapping[str, Any]) -> str:
    """Such as `62.0 % (56.1 to 67.5)`: the score with its interval."""
    low, high = found["score_ci95"]
    return f"{100 * found['score']:.1f} % ({100 * low:.1f} to {100 * high:.1f}) of {whole(found['games'])} games"


def _ends(interval: Sequence[float | None], unit: str = "") -> str:
    """The interval in words; unknown ends are those of scores of 0 and 1."""
    low, high = interval
    after = f" {unit}" if unit else ""
    if low is None or high is None:
        known = signed(low if low is not None else high or 0.0)
        bound = "more than" if low is not None else "less than"
        return f"{bound} {known}{after}" if (low, high) != (None, None) else "anything"
    return f"{signed(low)} to {signed(high)}{after}"


def signed(elo: float) -> str:
    """Such as `+85`, `−40` and `±0`."""
    return f"{elo:+.0f}".replace("-", "−") if round(elo) else "±0"


MOST_FALSE = 0.05  # of the checked games that somebody would have resigned
STEP = 0.005  # between thresholds that are looked at
THRESHOLDS = array("f", [round(step * STEP, 3) for step in range(1, round(1 / STEP) + 1)])  # float32, as in the search
RESIGNATION_COUNTS = ("threshold", "games", "resigned", "checked", "would_have_resigned", "false")
ADVISED = "advised"  # a fact where there is such a threshold
RESIGNATION_FACT = "resignation: "  # before each of them, in `Progress.facts`


class EndedGame(NamedTuple):
    """What resignation is judged by in a game."""

    checked: bool  # nobody was allowed to resign
    resigned: bool  # somebody did, or would have where it is checked
    false: bool  # and did not lose in the end
    lowest: float  # what a position was worth at least to whoever moved there, in the whole game; inf where none was
    lowest_false: float  # the same of those who did not lose; only where it was the least of the game so far


class Resignations:
    """Games by number, added up as they come. A game counts once, however often it is added."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._known: set[int] = set()
        # Checked games by how many of the thresholds they would have been resigned at, and falsely so.
        self._reached = [0] * (len(THRESHOLDS) + 1)
        self._reached_falsely = [0] * (len(THRESHOLDS) + 1)
        self._counts = dict.fromkeys(RESIGNATION_COUNTS[1:], 0)

    def add(self, games: Mapping[int, Sequence[Any]]) -> None:
        """By game: the fields of an `EndedGame`."""
        for number, fields in games.items():
            if number in self._known:
                continue
            one = EndedGame(*fields)
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
        if _too_many(found):
            # The mildest of stricter thresholds at which few enough of the same games would have been resigned falsely,
            # and some rightly. Slightly too strict: a game whose loser would have resigned first counts as false if the
            # other player came to judge it even worse.
            resigned = false = 0
            for step in range(len(THRESHOLDS), math.floor(self._threshold / STEP), -1):
                resigned += self._reached[step]
                false += self._reached_falsely[step]
                if resigned and false <= MOST_FALSE * resigned:
                    found[ADVISED] = round(step * STEP, 3)
        return {f"{RESIGNATION_FACT}{name}": value for name, value in found.items()}


def _too_many(found: Mapping[str, float]) -> bool:
    return found["false"] > MOST_FALSE * found["would_have_resigned"]


def of_resignation(facts: Mapping[str, float]) -> ResignationSection | None:
    """The report's `resignation`, from the facts of `Resignations`; None without resignation, or before a game has
    ended.
    """
    if f"{RESIGNATION_FACT}games" not in facts:
        return None
    found = {name: facts[f"{RESIGNATION_FACT}{name}"] for name in RESIGNATION_COUNTS}
    would, false = round(found["would_have_resigned"]), round(found["false"])
    advised = facts.get(f"{RESIGNATION_FACT}{ADVISED}")
    advice = f"More than {MOST_FALSE:.0%} of resignations are false, and the network learns from them. "
    if advised is None:
        advice += (
            "At no threshold up to 1 would it have been less: leave --resign out until the network has learnt more."
        )
    else:
        advice += f"Try --resign {advised:g}: in these games it would have been no more than that."
    section = {
        "threshold": found.pop("threshold"),
        **{name: round(count) for name, count in found.items()},
        "false_rate": false / would if would else None,
        "false_rate_ci95": wilson(false, would) if would else None,
        "advised": advised,
        "advice": advice if _too_many(found) else None,
    }
    return cast(ResignationSection, section)


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
    """The result of games without resignation, such as `false in 2 of 61 checked games that would have been resigned
    (3.3 %, 0.9 to 11.2 %)`.
    """
    would = found["would_have_resigned"]
    if not would:
        return f"of {whole(found['checked'])} checked games none would have been resigned"
    low, high = found["false_rate_ci95"]
    rate = f"{100 * found['false_rate']:.1f} %, {100 * low:.1f} to {100 * high:.1f} %"
    return f"false in {whole(found['false'])} of {whole(would)} checked games that would have been resigned ({rate})"
