"""What many decoders do: take the best few."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def best(scores: NDArray[np.float64], count: int) -> NDArray[np.bool_]:
    """The `count` largest of scores [n], at least one and at most all; of equal ones those that come first."""
    chosen = np.zeros(len(scores), np.bool_)
    chosen[np.argsort(-scores, kind="stable")[: max(count, 1)]] = True
    return chosen
