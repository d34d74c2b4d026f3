"""From the options of a load to the requests that it brings: the very arrivals that the simulator draws."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

from pydantic import BaseModel

from gpuinfer.api import Priority
from gpuinfer.config.options import natural
from gpuinfer.errors import UnknownName, UsageError
from gpuinfer.load.arrivals import LONGEST_S, MOST_RATE, MOST_ROWS, Arrivals, Bursty, Mix, Offer, Poisson, check_rate

CLASSES = {priority.name.lower(): priority for priority in Priority}

RATES = ("rate", "schedule")
DRAWN = (*RATES, "clients")
OPTIONS_OF = {  # options, and the loads that heed them: a recorded one is as it is
    "burst": RATES,
    "burst_s": RATES,
    "sources": RATES,
    "think": ("clients",),
    "think_time": ("clients",),
    "rows": DRAWN,
    "classes": DRAWN,
    "timeout": DRAWN,
}

Piece = tuple[float, float]
"""(rows per second, seconds)"""


class Constant(Arrivals):
    """Requests at equal distances; of several rows, so that `rate` rows per second come on average."""

    def __init__(self, rate: float, mix: Mix | None = None) -> None:
        check_rate(rate)
        self.rate, self.mix = rate, mix or Mix()

    @property
    def rows_per_s(self) -> float:
        return self.rate

    def asks(self, dice: random.Random) -> Iterator[Offer]:
        draw, gap = self.mix.draw(dice), self.mix.mean_rows / self.rate
        yield from (draw(number * gap) for number in itertools.count())


class Pieces(Arrivals):
    """One load after the other, each for its time: `one` makes that of a rate. It ends after the last."""

    def __init__(self, schedule: Sequence[Piece], one: Callable[[float], Arrivals]) -> None:
        if not schedule:
            raise UsageError("a schedule of nothing brings no request. Give rates and times, such as 200:8s,3000:8s.")
        self.schedule = [(one(rate) if rate else None, seconds) for rate, seconds in schedule]
        self.duration = math.fsum(seconds for _, seconds in schedule)
        self.rate = math.fsum(rate * seconds for rate, seconds in schedule) / self.duration
        self.mix = next((load.mix for load, _ in self.schedule if load is not None), Mix())
        if not self.rate:
            raise UsageError("a rate of 0 brings no request. Give a rate above 0, in rows per second.")

    @property
    def rows_per_s(self) -> float:
        return self.rate

    def asks(self, dice: random.Random) -> Iterator[Offer]:
        start = 0.0
        for load, seconds in self.schedule:
            if load is not None:
                for ask in itertools.takewhile(lambda ask, end=seconds: ask.at < end, load.asks(dice)):  # type: ignore[misc]
                    yield ask._replace(at=start + ask.at)
            start += seconds


def drawn(kind: str, rate: float | Sequence[Piece], mix: Mix, burst: float, burst_s: float) -> Arrivals:
    """The open load of this kind (poisson, constant, bursty). Raises `UsageError` for a rate that cannot be."""

    def one(rows_per_s: float) -> Arrivals:
        if kind == "bursty":
            return Bursty(rows_per_s, burst, burst_s, mix)
        return Constant(rows_per_s, mix) if kind == "constant" else Poisson(rows_per_s, mix)

    return one(rate) if isinstance(rate, int | float) else Pieces(rate, one)


def refuse_unread(options: BaseModel, source: str) -> None:
    """Raises `UsageError` for an option that means nothing to a load of this source: rate, schedule, clients or replay.

    Those that are not there, and those at their defaults, are no matter.
    """
    for name, field in type(options).model_fields.items():
        sources = OPTIONS_OF.get(name, (source,))
        if source not in sources and getattr(options, name) != field.default:
            flag, owners = f"--{name.replace('_', '-')}", " or ".join(f"--{one}" for one in sources)
            raise UsageError(f"{flag} is for {owners}, and means nothing to --{source}. Leave {flag} out.")


def rows_of(text: str) -> tuple[int, int]:
    """`8` or `1-8` as the least and the most rows of a request. Raises `UsageError`."""
    least, _, most = text.partition("-")
    try:
        found = int(least), int(most or least)
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1] <= MOST_ROWS:
        raise UsageError(
            f"--rows {text}: no request has so many rows. Give a number such as 8, or a range such as 1-8."
        )
    return found


def classes_of(text: str) -> dict[Priority, float]:
    """`high=0.2,normal=0.4,low=0.4` as shares of the requests. Raises `UsageError`."""
    found: dict[Priority, float] = {}
    for part in text.split(","):
        name, _, share = (word.strip() for word in part.partition("="))
        if name not in CLASSES:
            raise UnknownName("class", name, CLASSES, label="Classes")
        found[CLASSES[name]] = _number("--classes", part, share, f"{name}=0.2")
    if not (all(0 <= share <= 1 for share in found.values()) and abs(sum(found.values()) - 1) < 1e-6):
        raise UsageError(
            f"--classes {text}: the shares add up to {sum(found.values()):g}. Give shares of 0 to 1 that add up to 1."
        )
    return found


def schedule_of(parts: Sequence[str]) -> list[Piece]:
    """`200:8s`, `3000:8s` as rows per second and seconds. Raises `UsageError`."""
    found = []
    for part in parts:
        rate, _, seconds = part.partition(":")
        piece = tuple(_number("--schedule", part, word, "200:8s,3000:8s") for word in (rate, seconds))
        if not (0 <= piece[0] <= MOST_RATE and 0 < piece[1] <= LONGEST_S):
            raise UsageError(f"--schedule {part}: cannot be. Give rows/s and a time, such as 200:8s,3000:8s.")
        found.append((piece[0], piece[1]))
    return found


def _number(flag: str, part: str, word: str, example: str) -> float:
    try:
        return float(natural(word.strip(), float))
    except ValueError:
        raise UsageError(f"{flag} {part}: '{word}' is no number. Write it as {flag} {example}.") from None
