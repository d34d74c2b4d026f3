"""Requests of one kind to one replica, which may still hold what it computed for the last one."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import ClassVar

from gpuinfer.routing.choosing import Asking, Choice, Load, Policy, hashed
from gpuinfer.routing.loaded import LeastLoaded, because

BITS = (1 << 64) - 1


class Sticky(Policy):
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

    def choose(self, loads: Sequence[Load], asking: Asking) -> Choice:
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
                return Choice(chosen, because("sticky-broken", ahead, least))
        return Choice(favourite, "sticky")
