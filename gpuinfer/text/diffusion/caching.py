"""Which positions of a row are computed anew in a step; what is left out keeps its keys and values of earlier steps.

A token that becomes known changes what every position would compute that sees it. Where all see all (`prefix`, `dual`,
`vicinity`) what is kept is therefore an approximation, and a whole pass at each block's start mends it. In block-causal
models no position sees a later block: what is kept of blocks that are done is what would be computed anew (`exact`).

`prefix`, `dual`: Wu et al. 2025, "Fast-dLLM". `vicinity`: Ma et al. 2025, "dInfer". `exact`: Arriola et al. 2025,
"Block Diffusion".
"""

from __future__ import annotations

from typing import Literal

from gpuinfer.text.diffusion.layout import Layout

Cache = Literal["none", "prefix", "dual", "vicinity", "exact"]
VICINITY = 16  # positions on either side of a block
WARM_STEPS = 4  # of an answer, that compute all


def reach(
    cache: Cache, layout: Layout, start: int, stop: int, *, fresh: bool, warm: bool, stored: int
) -> tuple[int, int]:
    """The first position and the end of what a step computes for a row whose block lies at `start` to `stop`.

    `fresh`: the block's first step. `warm`: of its answer no more than `WARM_STEPS` steps have been. `stored`: so many
    positions from the beginning will never change.
    """
    if cache == "exact":
        return stored, layout.seen(stop - 1)
    if layout.attention is not None:
        return 0, layout.seen(stop - 1)
    if cache == "none" or fresh or (cache == "vicinity" and warm):
        return 0, layout.end
    if cache == "prefix":
        return start, layout.end
    if cache == "dual":
        return start, stop
    return max(0, start - VICINITY), min(layout.end, stop + VICINITY)
