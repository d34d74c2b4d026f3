"""How much is enough: few in `make test`, more in `make thorough`, the counts that we promise in `make soak`."""

from __future__ import annotations

import os

import pytest

SHARES = {"soak": 1, "thorough": 3}  # one in so many of a property's examples is tried
QUICK_SHARE = 5  # in `make test`
THOROUGH = os.environ.get("TEST_COUNTS") in SHARES
SHARE = SHARES.get(os.environ.get("TEST_COUNTS", ""), QUICK_SHARE)
LEAST = 3


def examples(number: int) -> int:
    """A property's `max_examples`: `number` in `make soak`, a third of it in `make thorough`."""
    return max(LEAST, number // SHARE)


def counts(small: int, full: int) -> list[object]:
    """Values for `parametrize`: the ordinary count, and the full one marked `soak`."""
    soak = [pytest.mark.soak, pytest.mark.timeout(14_400)]
    return [pytest.param(small, id=f"{small}"), pytest.param(full, id=f"{full}", marks=soak)]
