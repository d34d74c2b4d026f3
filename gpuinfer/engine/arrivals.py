"""A load of requests: when they arrive and what they ask for, drawn, recorded or from options.

Each kind is endless, but for a recorded one; the simulator and a load on a real server draw the very same arrivals.
"""

from __future__ import annotations

import itertools
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic import BaseModel

from gpuinfer.api import Priority
from gpuinfer.config.options import natural
from gpuinfer.errors import UnknownName, UsageError

LEAST_RATE, MOST_RATE = 1e-6, 1e9  # rows per second
LONGEST_S = 1e9  # of a piece of a schedule
LEAST_TIMEOUT_S = 1e-6  # less is no time on a clock that has run for days
LEAST_IN_BURST = 0.01  # requests, on average: bursts that are nearly always empty are none
MOST_ROWS = 10**9  # of a request


class Offer(NamedTuple):
    """One request as it arrives, `at` seconds after the beginning."""

    at: float
    rows: int = 1
    priority: Priority = Priority.NORMAL
    timeout: float = math.inf
    client: Hashable = None
    group: Hashable = None


@dataclass(frozen=True, slots=True)
class Mix:
    """What the requests are like: rows each, drawn evenly from `rows` (least, most), and their classes by shares.

    Requests of an open loop come from `clients` senders, each as likely as the next; 0: requests name no client.
    Raises `UsageError` for a mix that cannot be.
    """

    rows: tuple[int, int] = (1, 1)
    classes: Mapping[Priority, float] = field(default_factory=dict)  # shares that add up to 1; none: all normal
    timeout: float = math.inf  # seconds
    clients: int = 0

    def __post_init__(self) -> None:
        least, most = self.rows
        if not 1 <= least <= most <= MOST_ROWS:
            raise UsageError(f"requests of {least} to {most} rows cannot be. Give 1 or more, such as 8 or 1-8.")
        shares = self.classes.values()
        if shares and not (all(share >= 0 for share in shares) and abs(sum(shares) - 1) < 1e-6):
            raise UsageError(f"the shares of the classes add up to {sum(shares):g}. Give shares that add up to 1.")
        if not self.timeout >= LEAST_TIMEOUT_S:
            raise UsageError(f"a timeout of {self.timeout:g} s is over before it began. Give 1 µs or more.")

    @property
    def mean_rows(self) -> float:
        return sum(self.rows) / 2

    def draw(self, dice: random.Random) -> Callable[[float], Offer]:
        """Makes the request that arrives at a given time; `dice` decide what it is like."""
        if self.rows[0] == self.rows[1] and not self.classes and not self.clients:
            plain = Offer(0.0, self.rows[0], timeout=self.timeout)[1:]
            return lambda at: Offer(at, *plain)
        classes, shares = list(self.classes), list(itertools.accumulate(self.classes.values()))

        def one(at: float) -> Offer:
            least, most = self.rows
            rows = least if least == most else dice.randint(least, most)
            priority = dice.choices(classes, cum_weights=shares)[0] if classes else Priority.NORMAL
            client = dice.randrange(self.clients) if self.clients else None
            return Offer(at, rows, priority, self.timeout, client)

        return one


class Arrivals(ABC):
    """A load. An open one comes whatever happens; a closed one only as fast as it is answered."""

    mix: Mix
    duration: float | None = None  # seconds after which it is over by itself
    count: int | None = None  # requests, as far as known

    rows_per_s: float | None = None  # the mean rate; None when that depends on the answers, or is not known

    @property
    def most_rows(self) -> int:
        return self.mix.rows[1]

    @abstractmethod
    def asks(self, dice: random.Random) -> Iterator[Offer]:
        """The requests, by time; of a closed load the first of each client."""


class Poisson(Arrivals):
    """Requests that know nothing of one another: the gaps between them are exponential, `rate` rows per second.

    Raises `UsageError` for a rate that cannot be.
    """

    def __init__(self, rate: float, mix: Mix | None = None) -> None:
        check_rate(rate)
        self.rows_per_s: float = rate
        self.mix = mix or Mix()

    def asks(self, dice: random.Random) -> Iterator[Offer]:
        draw, at, per_s = self.mix.draw(dice), 0.0, self.rows_per_s / self.mix.mean_rows
        while True:
            yield draw(at := at + dice.expovariate(per_s))


class Bursty(Arrivals):
    """Bursts with silence between them, at the same mean rate as a `Poisson` load of `rate` rows per second.

    In a burst, of exponential length with mean `length` seconds, requests come as from a Poisson load of `factor` times
    the rate; silences are exponential with mean (factor - 1) · length (the interrupted Poisson process: Kuczura, "The
    interrupted Poisson process as an overflow process", 1973). Raises `UsageError` for what cannot be.
    """

    def __init__(self, rate: float, factor: float = 5.0, length: float = 0.1, mix: Mix | None = None) -> None:
        check_rate(rate)
        if not 1 < factor < math.inf:
            raise UsageError(f"bursts of {factor:g} times the mean rate are none. Give a factor above 1.")
        if not 0 < length < math.inf:
            raise UsageError(f"bursts of {length:g} s cannot be. Give a length above 0.")
        self.rows_per_s: float = rate
        self.factor, self.length, self.mix = factor, length, mix or Mix()
        if factor * rate * length < LEAST_IN_BURST * self.mix.mean_rows:
            raise UsageError(f"in bursts of {length:g} s hardly a request comes at {rate:g} rows/s. Give longer ones.")

    def asks(self, dice: random.Random) -> Iterator[Offer]:
        draw, start = self.mix.draw(dice), 0.0
        per_s, silence = self.factor * self.rows_per_s / self.mix.mean_rows, (self.factor - 1) * self.length
        while True:
            start += dice.expovariate(1 / silence)
            end, at = start + dice.expovariate(1 / self.length), start
            while (at := at + dice.expovariate(per_s)) < end:
                yield draw(at)
            start = end


class ClosedLoop(Arrivals):
    """Clients that ask, wait for the answer, think, and ask again; each thinks before its first request too.

    `think` seconds are the mean of an exponential time, or with `constant` the time itself. So many clients as `blocks`
    says share a thread, as the blocks of a worker of self-play do: they think one after the other. Raises `UsageError`.
    """

    def __init__(
        self, clients: int, think: float = 0.0, *, constant: bool = False, mix: Mix | None = None, blocks: int = 1
    ) -> None:
        if clients < 1:
            raise UsageError(f"{clients} clients ask for nothing. Give 1 or more.")
        if not 0 <= think < math.inf:
            raise UsageError(f"a think time of {think:g} s cannot be. Give 0 or more.")
        if blocks < 1:
            raise UsageError(f"{blocks} clients share no thread. Give blocks=1 or more.")
        self.clients, self.think, self.constant, self.mix = clients, think, constant, mix or Mix()
        self.blocks = blocks

    def think_s(self, dice: random.Random) -> float:
        return self.think if self.constant or not self.think else dice.expovariate(1 / self.think)

    def asks(self, dice: random.Random) -> Iterator[Offer]:
        draw = self.mix.draw(dice)
        first = (draw(self.think_s(dice))._replace(client=number) for number in range(self.clients))
        yield from sorted(first, key=lambda ask: ask.at)


class RecordedArrivals(Arrivals):
    """Requests that once came, at the times at which they did."""

    def __init__(self, asks: Iterable[Offer]) -> None:
        self.recorded = list(asks)
        self.mix, self.count = Mix(), len(self.recorded)
        if not self.recorded:
            raise UsageError("nothing arrives in this recording. Record a run that asks for something.")
        seconds = self.recorded[-1].at - self.recorded[0].at
        self.rows_per_s = sum(ask.rows for ask in self.recorded) / seconds if seconds > 0 else None

    @property
    def most_rows(self) -> int:
        return max(ask.rows for ask in self.recorded)

    def asks(self, dice: random.Random) -> Iterator[Offer]:
        return iter(self.recorded)


def check_rate(rows_per_s: float) -> None:
    """Raises `UsageError` for a rate that cannot be."""
    if not LEAST_RATE <= rows_per_s <= MOST_RATE:
        bounds = f"above 0, from {LEAST_RATE:g} to {MOST_RATE:g}"
        raise UsageError(f"a rate of {rows_per_s:g} rows/s cannot be. Give a rate {bounds}.")


CLASSES = {priority.name.lower(): priority for priority in Priority}

RATES = ("rate", "schedule")
DRAWN = (*RATES, "clients")
OPTIONS_OF = {  # options, and the loads that heed them: a recorded one is as it is
    "burst": RATES,
    "burst_s": RATES,
    "sources": RATES,
    "think": ("clients",),
    "think_time": ("clients",),
    "blocks": ("clients",),
    "rows": DRAWN,
    "classes": DRAWN,
    "timeout": DRAWN,
}

Piece = tuple[float, float]
"""(rows per second, seconds)"""


class ConstantRate(Arrivals):
    """Requests at equal distances; of several rows, so that `rate` rows per second come on average."""

    def __init__(self, rate: float, mix: Mix | None = None) -> None:
        check_rate(rate)
        self.rows_per_s: float = rate
        self.mix = mix or Mix()

    def asks(self, dice: random.Random) -> Iterator[Offer]:
        draw, gap = self.mix.draw(dice), self.mix.mean_rows / self.rows_per_s
        yield from (draw(number * gap) for number in itertools.count())


class PiecewiseArrivals(Arrivals):
    """One load after the other, each for its time: `one` makes that of a rate. It ends after the last."""

    def __init__(self, schedule: Sequence[Piece], one: Callable[[float], Arrivals]) -> None:
        if not schedule:
            raise UsageError("a schedule of nothing brings no request. Give rates and times, such as 200:8s,3000:8s.")
        for rate, seconds in schedule:
            if not seconds > 0 or rate < 0:
                raise UsageError(f"{rate:g} rows/s for {seconds:g} s cannot be. Give numbers above 0.")
        self.schedule = [(one(rate) if rate else None, seconds) for rate, seconds in schedule]
        self.duration = math.fsum(seconds for _, seconds in schedule)
        self.rows_per_s: float = math.fsum(rate * seconds for rate, seconds in schedule) / self.duration
        self.mix = next((load.mix for load, _ in self.schedule if load is not None), Mix())
        if not self.rows_per_s:
            raise UsageError("a rate of 0 brings no request. Give a rate above 0, in rows per second.")

    def asks(self, dice: random.Random) -> Iterator[Offer]:
        start = 0.0
        for load, seconds in self.schedule:
            if load is not None:
                for ask in itertools.takewhile(lambda ask, end=seconds: ask.at < end, load.asks(dice)):  # type: ignore[misc]
                    yield ask._replace(at=start + ask.at)
            start += seconds


def open_arrivals(kind: str, rate: float | Sequence[Piece], mix: Mix, burst: float, burst_s: float) -> Arrivals:
    """The open load of this kind (poisson, constant, bursty). Raises `UsageError` for a rate that cannot be."""

    def one(rows_per_s: float) -> Arrivals:
        if kind == "bursty":
            return Bursty(rows_per_s, burst, burst_s, mix)
        return ConstantRate(rows_per_s, mix) if kind == "constant" else Poisson(rows_per_s, mix)

    return one(rate) if isinstance(rate, int | float) else PiecewiseArrivals(rate, one)


def refuse_unused(options: BaseModel, source: str) -> None:
    """Raises `UsageError` for an option that means nothing to a load of this source: rate, schedule, clients or replay.

    Those that are not there, and those at their defaults, are no matter.
    """
    for name, info in type(options).model_fields.items():
        sources = OPTIONS_OF.get(name, (source,))
        if source not in sources and getattr(options, name) != info.default:
            flag, owners = f"--{name.replace('_', '-')}", " or ".join(f"--{one}" for one in sources)
            raise UsageError(f"{flag} is for {owners}, and means nothing to --{source}. Leave {flag} out.")


def parse_rows(text: str) -> tuple[int, int]:
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
