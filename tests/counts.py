"""How much is enough: few in `make test`, more in `make thorough`, the counts that we promise in `make soak`."""

from __future__ import annotations

import os

import pytest

THOROUGH = os.environ.get("TEST_COUNTS") == "thorough"
QUICK_SHARE = 5  # `make test` tries one in so many of a property's examples
LEAST = 3


def examples(number: int) -> int:
    """A property's `max_examples`: `number` in `make thorough` and `make soak`."""
    return number if THOROUGH else max(LEAST, number // QUICK_SHARE)


def counts(small: int, full: int) -> list[object]:
    """Values for `parametrize`: the ordinary count, and the full one marked `soak`."""
    soak = [pytest.mark.soak, pytest.mark.timeout(14_400)]
    return [pytest.param(small, id=f"{small}"), pytest.param(full, id=f"{full}", marks=soak)]
