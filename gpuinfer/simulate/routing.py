"""Which replica a request goes to."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpuinfer.errors import UnknownName

if TYPE_CHECKING:
    from gpuinfer.simulate.replica import Replica

Route = Callable[[], "Replica"]


def route(policy: str, replicas: Sequence[Replica], dice: random.Random) -> Route:
    """Picks a replica for each request. Raises `UnknownName` for a policy that is none."""
    if policy not in POLICIES:
        raise UnknownName("routing", policy, POLICIES, label="Known")
    if len(replicas) == 1:
        return lambda: replicas[0]
    return POLICIES[policy](replicas, dice)


def at_random(replicas: Sequence[Replica], dice: random.Random) -> Route:
    count, below = len(replicas), dice.randrange
    return lambda: replicas[below(count)]


def round_robin(replicas: Sequence[Replica], dice: random.Random) -> Route:
    last = len(replicas) - 1

    def pick() -> Replica:
        nonlocal last
        last = (last + 1) % len(replicas)
        return replicas[last]

    return pick


def least_outstanding(replicas: Sequence[Replica], dice: random.Random) -> Route:
    """The replica with the fewest rows that wait or are served; of equals the one that was chosen longest ago."""
    order = list(replicas)

    def pick() -> Replica:
        best = min(order, key=lambda replica: replica.core.rows)
        order.remove(best)
        order.append(best)
        return best

    return pick


def power_of_two(replicas: Sequence[Replica], dice: random.Random) -> Route:
    """The less busy of two at random: nearly as good as looking at all of them (Mitzenmacher, "The power of two choices
    in randomized load balancing", 2001).
    """
    count, below = len(replicas), dice.randrange

    def pick() -> Replica:
        first, second = below(count), below(count - 1)
        one, other = replicas[first], replicas[second + (second >= first)]
        return one if one.core.rows <= other.core.rows else other

    return pick


POLICIES: dict[str, Callable[[Sequence[Replica], random.Random], Route]] = {
    "random": at_random,
    "round-robin": round_robin,
    "least-outstanding": least_outstanding,
    "power-of-two": power_of_two,
}
