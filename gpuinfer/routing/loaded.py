"""Policies that look at how much each replica has to do, in proportion to its speed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpuinfer.routing.choosing import Asking, Choice, Load, Policy

MOST_KEPT = 4096
_kept: dict[tuple[str, float, float], str] = {}


def because(policy: str, chosen: float, other: float) -> str:
    """Such as `least-loaded 3<5`. Kept, since putting it together takes as long as the choice."""
    key = (policy, chosen, other)
    said = _kept.get(key)
    if said is None:
        if len(_kept) >= MOST_KEPT:
            _kept.clear()
        sign = "<" if chosen < other else ">" if chosen > other else "="
        said = _kept[key] = f"{policy} {chosen:.4g}{sign}{other:.4g}"
    return said


class LeastLoaded(Policy):
    """The one with the least in flight for its speed; of equals any, so that routers do not all run to the same one."""

    def choose(self, loads: Sequence[Load], asking: Asking) -> Choice:
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
        return Choice(chosen, "least-loaded alone" if other == math.inf else because("least-loaded", least, other))


class PowerOfTwo(Policy):
    """The less loaded of two at random: nearly as good as looking at all, and it does not herd where loads are known
    late (Mitzenmacher, "The power of two choices in randomized load balancing", 2001).
    """

    def choose(self, loads: Sequence[Load], asking: Asking) -> Choice:
        count, draw = len(loads), self._dice.random
        if count == 1:
            return Choice(loads[0], "power-of-two alone")
        first, second = int(draw() * count), int(draw() * (count - 1))
        one, other = loads[first], loads[second + (second >= first)]
        ours, theirs = one.in_flight / one.speed, other.in_flight / other.speed
        if theirs < ours:
            one, ours, theirs = other, theirs, ours
        return Choice(one, because("power-of-two", ours, theirs))
