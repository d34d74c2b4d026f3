"""A recorded load: the arrivals of a trace, at the times at which they came."""

from __future__ import annotations

import math
from pathlib import Path

from gpuinfer.load.arrivals import Ask, Recorded
from gpuinfer.trace import reading


def replayed(path: str | Path) -> Recorded:
    """The load of a trace, all its engines as one. Raises `UsageError` for a file that is none."""
    return Recorded(
        Ask(
            one.at,
            one.rows,
            one.priority,
            math.inf if one.left_s is None else one.left_s,
            one.client,
            one.group,
        )
        for one in reading.read(path, arrivals_only=True).arrivals
    )
