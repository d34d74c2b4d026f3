"""How strong one side was against another: the score, and the difference in Elo that explains it, with their intervals.

The expected score of a player who is D Elo above another is 1 / (1 + 10^(−D/400)) (Elo 1978, "The rating of chess
players, past and present", section 8.4: the logistic curve).

The interval is that of the score, carried over. Games 2k and 2k + 1 are dealt alike with the sides swapped, so that
they are no two independent games: a pair counts as one observation, and its variance is that of its mean score. Two
pairs are added for the interval, one won and one lost (as Agresti and Coull 1998, "Approximate is better than 'exact'
for interval estimation of binomial proportions", add two wins and two losses): so it is one too where all games were
won, or all pairs shared. A game whose partner has not ended is an observation of half the weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gpuinfer.units import whole

PAIR = 2  # games
NORMAL_95 = 1.959964  # standard deviations
ELO_SCALE = 400.0

WIN, DRAW, LOSS = 1.0, 0.5, 0.0
COUNTED = ("wins", "draws", "losses", "pairs", "score_low", "score_high")
FACT = "strength: "  # before each of them, in `Progress.facts`


class Tally:
    """Points by the game's number, added up as they come. A game counts once, however often it is told of."""

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
        return {f"{FACT}{name}": value for name, value in zip(COUNTED, values, strict=True)}

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


def of_strength(facts: Mapping[str, float]) -> dict[str, Any] | None:
    """The report's `strength`, of the facts of a `Tally`; None where there is no opponent, or no game has ended.

    `elo` and the ends of `elo_ci95` are None where the score is 0 or 1: no number of Elo is that far.
    """
    if f"{FACT}wins" not in facts:
        return None
    wins, draws, losses, pairs, low, high = (facts[f"{FACT}{name}"] for name in COUNTED)
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
    """The difference in Elo at which so much is to be expected; None for a score of 0 or 1."""
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
    """Ends that are not known are those of scores of 0 and 1."""
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
