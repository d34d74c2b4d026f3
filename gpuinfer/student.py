"""How far from their mean the truth may lie, by few values (Student, "The probable error of a mean", 1908)."""

from __future__ import annotations

import math

STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469)  # the 0.975 quantile for 1 to 6 degrees of freedom
NORMAL = 1.96


def reach(count: int, total: float, squares: float) -> float:
    """Half of the 95 % interval of a mean, by how many values there are, their sum and that of their squares; inf for
    fewer than two.
    """
    if count < 2:
        return math.inf
    variance = max(0.0, squares - total * total / count) / (count - 1)
    return quantile(count - 1) * math.sqrt(variance / count)


def quantile(freedom: int) -> float:
    """Of Student's distribution with so many degrees of freedom, at 0.975; beyond the table a little more than that."""
    return STUDENT[freedom - 1] if freedom <= len(STUDENT) else NORMAL + (STUDENT[-1] - NORMAL) * len(STUDENT) / freedom
