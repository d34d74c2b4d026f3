"""The few batch sizes that a CUDA graph is captured for: a batch is padded to the next of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

SMALLEST = 16
HALF_STEPS_FROM = 1024  # from here on padding costs more than a further graph: sizes grow by 1.5 and 1.33 in turn


def buckets_up_to(max_rows: int) -> list[int]:
    """Ascending batch sizes, the last exactly `max_rows`. Less than half of any batch above 16 rows is padding."""
    sizes, size = [], SMALLEST
    while size < max_rows:
        sizes.append(size)
        if size >= HALF_STEPS_FROM and size * 3 // 2 < max_rows:
            sizes.append(size * 3 // 2)
        size *= 2
    return [*sizes, max_rows]


def bucket_for(rows: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `rows`. Raises `ValueError` when none does."""
    at = bisect_left(buckets, rows)
    if at == len(buckets):
        raise ValueError(f"{rows} rows fit in none of the buckets up to {buckets[-1]}")
    return buckets[at]
