"""The largest batch under a bound."""

from __future__ import annotations

from collections.abc import Callable

STEP = 1.1  # between the sizes that are looked at first


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest batch from 1 to `most` that fits, 0 where none does.

    A larger batch may take less than a smaller one, since allocators treat large pieces otherwise: so it is looked for
    from above, in steps of a tenth, and then between two of them.
    """
    if fits(most):
        return most
    high = most  # which does not fit
    while high > 1:
        low = min(high - 1, int(high / STEP))
        if fits(low):
            break
        high = low
    else:
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
