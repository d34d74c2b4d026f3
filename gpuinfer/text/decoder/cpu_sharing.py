"""Which slots begin alike because they were copied, so that a step reads what they share once for all of them.

Segments of one token whose slots hold the same first positions go through attention together, over the memory of one
of them (Juravsky et al. 2024, "Hydragen"; Ye et al. 2024, "Cascade inference"). Only what is read changes, not what is
summed: the bits are those that each row has alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.text.decoder.segments import firsts_of
from gpuinfer.text.step import Step

Turns = NDArray[np.int64]
"""[segments, 4], in the order in which they are gone through: the segment, its first row, the slot in whose memory its
first positions may be read, and how many; 0 if it shares none. Of those that read the same who shares less comes
first."""


class Sharing:
    """What `slots` slots share, in whole blocks of `block` positions. All calls come from the decoder's thread."""

    def __init__(self, slots: int, block: int) -> None:
        self._block = block
        self._origin = np.arange(slots, dtype=np.int64)  # whose first positions each slot has, too
        self._alike = np.zeros(slots, np.int64)  # so many
        self._lent = np.zeros(slots, np.int64)  # the most that any other has of it
        self._known: tuple[Any, NDArray[np.int64], Turns] | None = None  # of a step of lone tokens: see `turns`

    def copied(self, source: int, targets: Sequence[int], length: int) -> None:
        """These slots have got the source's first positions."""
        for target in targets:
            self._overwritten(target, 0)
            origin, shared = int(self._origin[source]), min(length, int(self._alike[source]))
            if shared // self._block < length // self._block:
                origin, shared = source, length
            self._origin[target], self._alike[target] = origin, shared
            self._lent[origin] = max(self._lent[origin], shared)

    def turns(self, step: Step) -> Turns:
        """How a step is to be gone through; what it writes over is shared no longer. Steps of lone tokens that have the
        very same slots are sorted once.
        """
        if self._known is not None and step.slots is self._known[0] and not (step.starts < self._known[1]).any():
            return self._known[2]
        for segment in np.flatnonzero(step.starts < self._reach(step.slots)).tolist():
            self._overwritten(int(step.slots[segment]), int(step.starts[segment]))
        found = self._sorted(step)
        again = len(step.tokens) == len(step.slots) and step.sees is None
        self._known = (step.slots, self._reach(step.slots), found) if again else None
        return found

    def _reach(self, slots: NDArray[np.int32]) -> NDArray[np.int64]:
        """How many positions of each slot are another's, too."""
        found: NDArray[np.int64] = np.maximum(self._alike[slots], self._lent[slots])
        return found

    def _sorted(self, step: Step) -> Turns:
        slots, firsts = step.slots.astype(np.int64), firsts_of(step)
        own = self._lent[slots] > self._alike[slots]  # more than it has of another's, others have of it
        origins = np.where(own, slots, self._origin[slots])
        shared = np.where(step.lengths == 1, self._reach(step.slots), 0)
        if step.sees is not None:
            shared = np.minimum(shared, step.sees[firsts])
        shared -= shared % self._block
        order = np.lexsort((shared, np.where(shared > 0, origins, -1)))
        return np.stack([order, firsts[order], origins[order], shared[order]], axis=1)

    def _overwritten(self, slot: int, start: int) -> None:
        """From this position on the slot holds something else."""
        self._known = None
        if self._alike[slot] > start:
            self._alike[slot] = start
        if self._lent[slot] > start:
            self._lent[slot] = start
            others = np.flatnonzero((self._origin == slot) & (self._alike > start))
            self._with_another(others[np.argsort(-self._alike[others], kind="stable")])

    def _with_another(self, slots: NDArray[np.int64]) -> None:
        """What they shared with one that has been written over, they still share with the first of them."""
        if not len(slots):
            return
        first, rest = slots[0], slots[1:]
        self._origin[slots] = first
        self._alike[first] = 0
        self._lent[first] = max(self._lent[first], self._alike[rest].max(initial=0))
