"""Which of two ways of sharing a device is the faster one: looks at both, in turns, while several models have work.

A look is a moment in which all that have work go one way; what counts is how much each gets done, from the end of its
first forward that began in it to that of its last. Ways come in the order A B B A A B …, so that a drift of the load
and of the machine's other programs hits both alike. Until something is known, the way is gone that is likely to be the
faster one. Pairs of looks are taken until their interval tells the ways apart, and no more than a few; then one now and
then, ever less often while it says the same. A look at the slower way costs what is not done meanwhile: the worse it
seems to be, the longer nobody looks again, so that looks cost a hundredth of the work and not more. What they find
is for those who have work at once: another company is looked at anew.
Pure decisions, on nobody's clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from gpuinfer.stats import t_interval

LOOK_S = 0.2  # of one, at least: prompts and answers come unevenly
LEAST_FORWARDS = 4  # of each model in a look; where they are long so few that it lasts no longer than LONG_S
LONG_S, LEAST_LONG = 1.0, 2
LONGEST_S = 60.0  # of a look: whoever has so few forwards is not in anybody's way
LEAST_PAIRS, MOST_PAIRS = 3, 8  # at first: the interval of two is as good as none
COST = 0.01  # part of what gets done that looks may cost until it is clear
REST = 20  # times as long as a pair of looks they go on without any once that is clear, or will not become so, and at
# most before; counted while they have work
LONGER, LONGEST = 2, 8  # times as long a rest after each pair that clearly said the same; times the first, at most
REST_INTERRUPTED = 4  # the same after a look that came to no end
IDLE_S = 0.1  # nothing was computed for so long, nor for as long as a forward: what comes then is another load
REMEMBERED = MOST_PAIRS  # pairs by which is judged
KEPT = 0.95  # of what a model would get done in the first way: the second one is not to cost anybody more


class SharingWay(Enum):
    """How models that have work at once share a device."""

    TURNS = "turns"  # one after the other, each with all of it
    SHARES = "shares"  # at once, each with a share of it
    FREELY = "freely"  # at once, each with as much as if it were alone


@dataclass(slots=True)
class PairStatistics:
    """Sums over pairs of looks: of the logarithm of how many times as much a model got done in the second way as in
    the first, and of its square.
    """

    pairs: int = 0
    logs: float = 0.0
    squares: float = 0.0

    def add(self, log: float) -> None:
        self.pairs += 1
        self.logs += log
        self.squares += log * log


@dataclass(slots=True)
class _WorkDone:
    """What one model got done in a look."""

    first: float | None = None  # when its first forward ended
    last: float = 0.0
    work: float = 0.0  # after that
    forwards: int = 0

    def add(self, now: float, work: float) -> None:
        if self.first is None:
            self.first = now
        else:
            self.last, self.work, self.forwards = now, self.work + work, self.forwards + 1

    @property
    def rate(self) -> float:
        return self.work / (self.last - self.first) if self.first is not None and self.last > self.first else 0.0


@dataclass
class _BusyModels:
    """What is known of models that have work at once. `pairs`: of each model the logarithms of its ratios."""

    way: SharingWay
    pairs: deque[Mapping[Any, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    looks: int = 0  # that are over
    rates: list[Mapping[Any, float]] = field(default_factory=list)  # of the pair under way
    resting: float = REST  # so many times as long as a pair it is to be
    rest_s: float = 0.0  # until the next look

    def loss(self, shares: Mapping[Any, float], ways: tuple[SharingWay, SharingWay]) -> float:
        """What part of the work a look at the way that is not gone seems to cost: below 1; 0 where it seems faster."""
        gained = math.fsum(shares[one] * pair[one] for pair in self.pairs for one in shares) / len(self.pairs)
        return max(0.0, 1 - math.exp(-gained if self.way is ways[1] else gained))


@dataclass
class _Trial:
    """One under way. `way`: None where nothing is to be learnt."""

    company: frozenset[Any]
    way: SharingWay
    since: float
    learning: bool
    tallies: dict[Any, _WorkDone]


class SharingExperiment:
    """Tell it of each forward that has ended, and who has work; it says which `way` is to be gone.

    `shares` are those of the models by themselves (whatever can be hashed): a way is judged by the mean of their
    ratios, weighed so, and no model may lose by the second one. What pairs of looks do not tell apart is left as it is
    likely to be.
    """

    def __init__(
        self, first: SharingWay, second: SharingWay, usual: SharingWay | None = None, likely: SharingWay | None = None
    ) -> None:
        """`usual`: the way that is gone whatever is seen; None: the faster one. `likely`: the one that probably is;
        None: the first.
        """
        self.ways, self._usual, self._likely = (first, second), usual, likely or first
        self.judged: dict[Any, PairStatistics] = {}
        self._known: dict[frozenset[Any], _BusyModels] = {}
        self._look: _Trial | None = None
        self._seen = -math.inf  # the end of the latest forward
        self._forever = usual or self._likely

    @property
    def way(self) -> SharingWay:
        return self._forever if self._look is None else self._look.way

    def ended(
        self,
        model: Any,
        began_at: float,
        now: float,
        work: float,
        shares: Mapping[Any, float],
        likely: SharingWay | None = None,
    ) -> None:
        """A forward of `model` has ended, which has done so much; those with `shares` have work. `likely`: the way that
        is probably the faster one for these; None: as for all.
        """
        company, before = frozenset(shares), self._seen
        look, self._seen = self._look, now
        if look is not None and (look.company != company or began_at - before > max(IDLE_S, now - began_at)):
            self._interrupt(look, before)
            look = None
        if len(company) < 2:
            return
        likely = likely or self._likely
        if look is None:
            self._known.setdefault(company, _BusyModels(self._usual or likely))
            look = self._begin(company, now)
        if not look.learning:
            if now - look.since >= self._known[company].rest_s:
                self._known[company].rest_s = 0.0
                self._begin(company, now)
            return
        if model in look.tallies and began_at >= look.since:
            look.tallies[model].add(now, work)
        lasted_s, fewest = now - look.since, min(tally.forwards for tally in look.tallies.values())
        if lasted_s >= LOOK_S and fewest >= (LEAST_LONG if lasted_s >= LONG_S else LEAST_FORWARDS):
            self._over(look, now, shares, likely)
        elif lasted_s > LONGEST_S:
            self._rest(look, now, REST)
            self._begin(company, now)

    def _interrupt(self, look: _Trial, at: float) -> None:
        known = self._known[look.company]
        if look.learning:
            self._rest(look, at, REST_INTERRUPTED)
        else:
            known.rest_s = max(0.0, known.rest_s - (at - look.since))
        self._look = None

    def _begin(self, company: frozenset[Any], now: float) -> _Trial:
        known = self._known[company]
        learning = known.rest_s <= 0
        way = self.ways[known.looks % 2 ^ known.looks // 2 % 2] if learning else known.way
        self._look = _Trial(company, way, now, learning, {one: _WorkDone() for one in company})
        return self._look

    def _over(self, look: _Trial, now: float, shares: Mapping[Any, float], likely: SharingWay) -> None:
        known = self._known[look.company]
        known.rates.append({one: tally.rate for one, tally in look.tallies.items()})
        known.looks += 1
        if len(known.rates) == 2:
            first, second = known.rates if known.looks // 2 % 2 else reversed(known.rates)
            known.rates = []
            ratios = {one: math.log(second[one] / first[one]) for one in look.company if first[one] and second[one]}
            if len(ratios) == len(look.company):
                known.pairs.append(ratios)
                for one, log in ratios.items():
                    self.judged.setdefault(one, PairStatistics()).add(log)
            way, clear = self._faster(known, shares, likely)
            way = self._usual or way
            if way is not known.way or not clear:
                known.way, known.resting = way, REST
            if clear or known.looks >= 2 * MOST_PAIRS:
                self._rest(look, now, known.resting)
                known.resting = min(REST * LONGEST, known.resting * LONGER)
            elif known.pairs:
                self._rest(look, now, min(REST, known.loss(shares, self.ways) / (2 * COST)))
        self._begin(look.company, now)

    def _rest(self, look: _Trial, now: float, times: float) -> None:
        """No look for a while from now on. One that is abandoned takes its pair along."""
        known = self._known[look.company]
        known.looks -= len(known.rates)
        known.rates = []
        known.rest_s = times * 2 * max(LOOK_S, now - look.since)

    def _faster(self, known: _BusyModels, shares: Mapping[Any, float], likely: SharingWay) -> tuple[SharingWay, bool]:
        """The way to go, and whether pairs of looks have made that clear: by 95 % intervals, of all together and of
        each that may lose.
        """
        if len(known.pairs) < LEAST_PAIRS:
            return likely, False
        first, second = self.ways
        lows, highs = zip(*(_ends([pair[one] for pair in known.pairs]) for one in shares), strict=True)
        low, high = _ends([math.fsum(share * pair[one] for one, share in shares.items()) for pair in known.pairs])
        kept = math.log(KEPT)
        if high < 0 or min(highs) < kept:
            return first, True
        if low > 0 and min(lows) >= kept:
            return second, True
        return likely, high - low < -kept  # so near to one another that it is all the same


def _ends(logs: Sequence[float]) -> tuple[float, float]:
    """Of the 95 % interval of their mean."""
    mean, half = (
        math.fsum(logs) / len(logs),
        t_interval(len(logs), math.fsum(logs), math.fsum(log * log for log in logs)),
    )
    return mean - half, mean + half
