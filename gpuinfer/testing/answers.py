"""How far two answers lie apart, whatever they are made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

TOLERANCE = 1e-6


def distance(first: Any, second: Any) -> float:
    """The largest difference anywhere in two answers; inf when they are not of one shape, 0 when they are equal."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        if first.keys() != second.keys():
            return math.inf
        return max((distance(first[key], second[key]) for key in first), default=0.0)
    if isinstance(first, tuple | list) and isinstance(second, tuple | list):
        if len(first) != len(second):
            return math.inf
        return max(map(distance, first, second), default=0.0)
    if hasattr(first, "shape") and hasattr(second, "shape"):
        return _distance_of_arrays(_to_numpy(first), _to_numpy(second))
    return 0.0 if first == second else math.inf


def _distance_of_arrays(first: Any, second: Any) -> float:
    if first.shape != second.shape:
        return math.inf
    with np.errstate(invalid="ignore"):
        gaps = np.where(first == second, 0.0, np.abs(first - second))  # -inf equals -inf
    return float(gaps.max(initial=0.0))


def _to_numpy(array: Any) -> Any:
    if hasattr(array, "detach"):  # torch: from any device, and from types that NumPy does not have
        array = array.detach().cpu().double()
    return np.asarray(array, dtype=np.float64)
