"""How much is enough: small counts in the ordinary run, the stated ones under `make soak`."""

from __future__ import annotations

import pytest


def counts(small: int, full: int) -> list[object]:
    """Values for `parametrize`: the ordinary count, and the full one marked `soak`."""
    soak = [pytest.mark.soak, pytest.mark.timeout(3600)]
    return [pytest.param(small, id=f"{small}"), pytest.param(full, id=f"{full}", marks=soak)]
