"""Routing policies: which replica a request goes to.

A policy reads no clock and does no I/O, so that the router and the simulator run the same.
"""

from __future__ import annotations

import hashlib
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from gpuinfer.errors import UnknownName, UsageError


class ReplicaLoad:
    """One replica as it stands now. Whoever asks the policy keeps the numbers up to date.

    `in_flight`: rows, or tokens, that it has now; `speed`: relative to the others, above 0; a slow start lowers it.
    `member` is its number in the fleet, and stays its own.
    """

    __slots__ = ("in_flight", "mark", "member", "speed")

    def __init__(self, member: int, in_flight: float = 0, speed: float = 1.0) -> None:
        self.member, self.in_flight, self.speed = member, in_flight, speed
        self.mark = hashed(b"%d" % member) | 1  # what `sticky` knows it by, in every process and on every machine

    def __repr__(self) -> str:
        return f"Load({self.member}, in_flight={self.in_flight:g}, speed={self.speed:g})"


@dataclass(slots=True)
class RoutedRequest:
    """A request. `affinity` is what its like share: a session, a user, or a hash of how the prompt begins."""

    rows: float = 1.0
    affinity: bytes | None = None


class RoutingChoice(NamedTuple):
    """`why` is short, such as `least-loaded 3<5`: answers carry it in a header, printable ASCII."""

    load: ReplicaLoad
    why: str


class RoutingPolicy(ABC):
    """Chooses. A few microseconds each time: it stands in the way of every request."""

    needs_affinity: bool = False  # whether it is worth finding out
    needs_load: bool = True  # whether it looks at `in_flight` at all
    OPTIONS: ClassVar[Mapping[str, float]] = {}  # with their defaults; none may be below 0

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    @abstractmethod
    def choose(self, loads: Sequence[ReplicaLoad], asking: RoutedRequest) -> RoutingChoice:
        """One of `loads`, which are never empty, in any order, and need not be those of the time before."""


def hashed(what: bytes) -> int:
    """64 bits that are the same in every process."""
    return int.from_bytes(hashlib.blake2b(what, digest_size=8).digest(), "little")


class Random(RoutingPolicy):
    """Any, each as likely as the next."""

    needs_load = False

    def choose(self, loads: Sequence[ReplicaLoad], asking: RoutedRequest) -> RoutingChoice:
        return RoutingChoice(loads[int(self._dice.random() * len(loads))], "random")


class RoundRobin(RoutingPolicy):
    """Each in turn, by its number, whatever its load and speed: the one after the last that was chosen."""

    needs_load = False
    _last = -1  # member

    def choose(self, loads: Sequence[ReplicaLoad], asking: RoutedRequest) -> RoutingChoice:
        last, after, lowest = self._last, None, loads[0]
        for load in loads:
            if load.member > last:
                if after is None or load.member < after.member:
                    after = load
            elif load.member < lowest.member:
                lowest = load
        chosen = lowest if after is None else after
        self._last = chosen.member
        return RoutingChoice(chosen, "round-robin")


MOST_KEPT = 4096
_kept: dict[tuple[str, float, float], str] = {}


def load_reason(policy: str, chosen: float, other: float) -> str:
    """Such as `least-loaded 3<5`. Kept, since putting it together takes as long as the choice."""
    key = (policy, chosen, other)
    said = _kept.get(key)
    if said is None:
        if len(_kept) >= MOST_KEPT:
            _kept.clear()
        sign = "<" if chosen < other else ">" if chosen > other else "="
        said = _kept[key] = f"{policy} {chosen:.4g}{sign}{other:.4g}"
    return said


class LeastLoaded(RoutingPolicy):
    """The one with the least in flight for its speed; of equals any, so that routers do not all run to the same one."""

    def choose(self, loads: Sequence[ReplicaLoad], asking: RoutedRequest) -> RoutingChoice:
        least = other = math.inf
        chosen, equals, draw = loads[0], 0, self._dice.random
        for load in loads:
            score = load.in_flight / load.speed
            if score < least:
                least, other, chosen, equals = score, least, load, 1
            elif score == least:
                other = score
                equals += 1
                if draw() * equals < 1.0:  # each of the equals so far has the same chance (Vitter's reservoir, 1985)
                    chosen = load
            elif score < other:
                other = score
        return RoutingChoice(
            chosen, "least-loaded alone" if other == math.inf else load_reason("least-loaded", least, other)
        )


class PowerOfTwo(RoutingPolicy):
    """The less loaded of two at random: nearly as good as looking at all, and it does not herd where loads are known
    late (Mitzenmacher, "The power of two choices in randomized load balancing", 2001).
    """

    def choose(self, loads: Sequence[ReplicaLoad], asking: RoutedRequest) -> RoutingChoice:
        count, draw = len(loads), self._dice.random
        if count == 1:
            return RoutingChoice(loads[0], "power-of-two alone")
        first, second = int(draw() * count), int(draw() * (count - 1))
        one, other = loads[first], loads[second + (second >= first)]
        ours, theirs = one.in_flight / one.speed, other.in_flight / other.speed
        if theirs < ours:
            one, ours, theirs = other, theirs, ours
        return RoutingChoice(one, load_reason("power-of-two", ours, theirs))


BITS = (1 << 64) - 1


class Sticky(RoutingPolicy):
    """The favourite of the request's affinity, unless it has more than `margin` more in flight, for its speed, than
    the least loaded, which is then taken. Requests without an affinity go to the least loaded.

    The favourite is the one whose hash with the affinity is the highest (rendezvous hashing: Thaler & Ravishankar,
    "Using name-based mappings to increase hit rates", 1998): when a replica leaves, only what it was the favourite of
    moves, and when one joins, only what it is now the favourite of. Processes need not talk to agree on it.
    """

    needs_affinity = True
    OPTIONS: ClassVar[Mapping[str, float]] = {"margin": 8.0}

    def __init__(self, dice: random.Random, margin: float = OPTIONS["margin"]) -> None:
        super().__init__(dice)
        self._margin = margin
        self._least = LeastLoaded(dice)

    def choose(self, loads: Sequence[ReplicaLoad], asking: RoutedRequest) -> RoutingChoice:
        if asking.affinity is None:
            return self._least.choose(loads, asking)
        key = hashed(asking.affinity)
        # A product with an odd number, modulo 2^64, compared by its high bits, is as even as another blake2b, and takes
        # a tenth of the time (Dietzfelbinger et al., "A reliable randomized algorithm for the closest-pair problem",
        # 1997).
        hashes = [key * load.mark & BITS for load in loads]
        favourite = loads[hashes.index(max(hashes))]
        ahead = favourite.in_flight / favourite.speed
        if ahead > self._margin:  # else nobody can be so far behind it
            chosen = self._least.choose(loads, asking).load
            least = chosen.in_flight / chosen.speed
            if ahead - least > self._margin:
                return RoutingChoice(chosen, load_reason("sticky-broken", ahead, least))
        return RoutingChoice(favourite, "sticky")


DEFAULT_POLICY = "least-loaded"
POLICIES: Mapping[str, type[RoutingPolicy]] = {
    DEFAULT_POLICY: LeastLoaded,
    "power-of-two": PowerOfTwo,
    "sticky": Sticky,
    "round-robin": RoundRobin,
    "random": Random,
}


def make_policy(name: str, dice: random.Random, **options: float | str) -> RoutingPolicy:
    """The policy of this name; `dice` decide what it leaves to chance. Options are numbers of 0 or more, or say them.

    Raises `UnknownName` for a policy or an option that is none, and `UsageError` for a value that cannot be.
    """
    if name not in POLICIES:
        raise UnknownName("routing", name, POLICIES, label="Known")
    policy = POLICIES[name]
    for option in options:
        if option not in policy.OPTIONS:
            raise UnknownName(f"option of routing '{name}'", option, policy.OPTIONS, label="Known")
    return policy(dice, **{option: _number(name, option, value) for option, value in options.items()})


def _number(name: str, option: str, value: float | str) -> float:
    try:
        found = float(value)
    except ValueError:
        found = math.nan
    if not found >= 0:
        raise UsageError(f"routing '{name}': {option}={value} cannot be. Give a number of 0 or more.")
    return found
