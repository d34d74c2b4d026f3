"""How much better a sample did than the others from its start."""

from __future__ import annotations

import math
from collections.abc import Sequence


def advantages(rewards: Sequence[float]) -> list[float]:
    """Each reward less their mean, in standard deviations (Shao et al. 2024, GRPO, section 4.1.2); 0 where all got the
    same.
    """
    scale = max(map(abs, rewards), default=0.0) or 1.0  # so that nothing overflows; it cancels out
    scaled = [reward / scale for reward in rewards]
    mean = math.fsum(scaled) / max(1, len(scaled))
    deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in scaled) / max(1, len(scaled)))
    if deviation < 1e-12:
        return [0.0] * len(rewards)
    return [(one - mean) / deviation for one in scaled]
