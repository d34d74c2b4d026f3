"""Versions of the policy: numbers where they are compared, names where weights are told apart."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpuinfer.rollouts.record import Group

_NAMED = re.compile(r"(?:.*@)?v?([0-9]{1,18})")


def name_of(number: int) -> str:
    """How a backend is told of these weights: v7. With an adapter it calls them policy@v7."""
    return f"v{number}"


def number_of(name: str) -> int:
    """Of the weights that a span names: v7, policy@v7 or 7 are 7. Those without a number are those of the start, 0."""
    found = _NAMED.fullmatch(name)
    return int(found[1]) if found else 0


def oldest(group: Group, otherwise: int = 0) -> int:
    """The oldest version that drew any trainable token; `otherwise` of a group without one."""
    return min((number_of(name) for name in group.versions), default=otherwise)


def lags(groups: Iterable[Group], version: int) -> list[int]:
    """How many versions each group lies behind, counted from its oldest trainable token."""
    return [version - oldest(group, version) for group in groups]
