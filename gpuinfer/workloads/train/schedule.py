"""The learning rate of each step."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["cosine", "constant"]


def rate_at(step: int, *, peak: float, warmup: int, steps: int, schedule: Schedule) -> float:
    """For the step after `step` others: rising evenly over `warmup` steps; then `peak`, or with `cosine` falling to 0
    at `steps` along half a cosine (Loshchilov and Hutter 2017, "SGDR", without restarts).
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    return peak * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2
