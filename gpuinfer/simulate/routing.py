"""The router of a simulation: the policies are those of the real one, and so is what they see of the replicas."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from gpuinfer.load.arrivals import Offer
from gpuinfer.routing.policy import Asking, Load, make

if TYPE_CHECKING:
    from gpuinfer.simulate.replica import Replica

Route = Callable[[Offer], "Replica"]


def route(policy: str, replicas: Sequence[Replica], dice: random.Random) -> Route:
    """Picks a replica for each request. A client is its requests' affinity. Raises `UnknownName` for no policy."""
    chooser = make(policy, dice)
    if len(replicas) == 1:
        return lambda ask: replicas[0]
    loads = [Load(number) for number in range(len(replicas))]
    cores = [replica.core for replica in replicas]
    looks, keyed = chooser.needs_load, chooser.needs_affinity
    keys: dict[Hashable, bytes | None] = {None: None}

    def pick(ask: Offer) -> Replica:
        if looks:
            for load, core in zip(loads, cores, strict=True):
                load.in_flight = core.rows
        if keyed and ask.client not in keys:
            keys[ask.client] = str(ask.client).encode()
        asking = Asking(ask.rows, keys[ask.client] if keyed else None)
        return replicas[chooser.choose(loads, asking).load.member]

    return pick
