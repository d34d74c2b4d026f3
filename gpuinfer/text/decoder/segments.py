"""Where the tokens of a step are, and what they see: plain arithmetic on the host."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpuinfer.text.step import Step

Integers = NDArray[np.int64]


def firsts_of(step: Step) -> Integers:
    """The index of each segment's first token."""
    found: Integers = np.cumsum(step.lengths, dtype=np.int64) - step.lengths
    return found


def segments_of(step: Step) -> Integers:
    """The number of the segment that each token is of."""
    return np.repeat(np.arange(len(step.lengths)), step.lengths)


def adapters_of(step: Step) -> NDArray[np.int32]:
    """The number of each token's adapter, 0: none."""
    return np.repeat(np.zeros_like(step.lengths) if step.adapters is None else step.adapters, step.lengths)


def positions_of(step: Step) -> Integers:
    """The position of each token."""
    offsets = np.repeat(step.starts - firsts_of(step), step.lengths)
    found: Integers = np.arange(len(step.tokens), dtype=np.int64) + offsets
    return found


def sees_of(step: Step) -> Integers:
    """How many positions each token attends to."""
    return positions_of(step) + 1 if step.sees is None else step.sees.astype(np.int64)


def ends_of(step: Step) -> Integers:
    """Of each segment, how many positions there are with it: its own, and those that it sees."""
    ends: Integers = (step.starts + step.lengths).astype(np.int64)
    return ends if step.sees is None else np.maximum(ends, np.maximum.reduceat(step.sees, firsts_of(step)))
