"""How much is enough: few in `make test` and `make thorough`, the counts that we promise in `make soak`."""

from __future__ import annotations

import os

import pytest

SOAK = os.environ.get("TEST_COUNTS") == "soak"
SHARE = 1 if SOAK else 5  # one in so many of a property's examples is tried
LEAST = 3


def examples(number: int) -> int:
    """A property's `max_examples`: `number` in `make soak`, a fifth of it elsewhere."""
    return max(LEAST, number // SHARE)


def counts(small: int, full: int) -> list[object]:
    """Values for `parametrize`: the ordinary count, and the full one marked `soak`."""
    soak = [pytest.mark.soak, pytest.mark.timeout(14_400)]
    return [pytest.param(small, id=f"{small}"), pytest.param(full, id=f"{full}", marks=soak)]
