"""Which layers make a stage: the split whose largest stage is least.

A chain of layers over a chain of processors, by dynamic programming over the number of layers that the first stages
have: Bokhari, "Partitioning Problems in Parallel, Pipelined, and Distributed Computing" (IEEE Transactions on
Computers 37:1, 1988). No torch here, and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

Split = list[tuple[int, int]]
"""For each stage its first layer, and the one after its last."""


Best = tuple[tuple[float, float], list[int]]
"""The largest stage and the sum of squares, and where each stage begins."""


def least_largest(
    seconds: Sequence[Sequence[float]], sizes: Sequence[float] = (), room: Sequence[float] = ()
) -> Split | None:
    """The split of layers into `len(seconds)` stages, none of them empty, whose largest stage takes least time.

    `seconds[stage][layer]` is what a layer takes where that stage would run, ≥ 0; of layers of `sizes[layer]` bytes a
    stage holds no more than `room[stage]`. Of splits that are as good, the one whose stages are most alike (least sum
    of squares). None where nothing fits; raises `ValueError` for fewer layers than stages.
    """
    stages, layers = len(seconds), len(seconds[0])
    if stages > layers:
        raise ValueError(f"{layers} layers make no {stages} stages")
    taken = [[0.0, *accumulate(of_stage)] for of_stage in seconds]
    held = [0.0, *accumulate(sizes or [0.0] * layers)]
    most = room or [math.inf] * stages
    none: Best = ((math.inf, math.inf), [])
    best = [((0.0, 0.0), list[int]()), *[none] * layers]  # of the first so many layers, on the stages so far
    for stage in range(stages):
        following = [none] * (layers + 1)
        for end in range(stage + 1, layers - (stages - stage - 1) + 1):
            for start in range(stage, end):
                (largest, squares), starts = best[start]
                if held[end] - held[start] > most[stage] or largest == math.inf:
                    continue
                own = taken[stage][end] - taken[stage][start]
                found = (max(largest, own), squares + own * own)
                if found < following[end][0]:
                    following[end] = (found, [*starts, start])
        best = following
    cost, starts = best[layers]
    return None if cost == none[0] else list(pairwise([*starts, layers]))


def at_points(points: Sequence[int], layers: int) -> Split:
    """The stages that begin at layer 0 and at each of `points`, which ascend and lie between 1 and `layers` - 1."""
    return list(pairwise([0, *points, layers]))


def deal(cores: int, seconds: Sequence[float]) -> list[int]:
    """Cores for stages that take so long: as many for each, one at least, and those left over to the slowest."""
    each, left = divmod(cores, len(seconds))
    if not each:
        return [1] * len(seconds)
    slowest = sorted(range(len(seconds)), key=lambda stage: -seconds[stage])[:left]
    return [each + (stage in slowest) for stage in range(len(seconds))]
