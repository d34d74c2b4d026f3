"""The policies by name."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from gpuinfer.errors import UnknownName, UsageError
from gpuinfer.routing.blind import Random, RoundRobin
from gpuinfer.routing.choosing import Asking, Choice, Load, Policy
from gpuinfer.routing.loaded import LeastLoaded, PowerOfTwo
from gpuinfer.routing.sticky import Sticky

__all__ = ["DEFAULT", "POLICIES", "Asking", "Choice", "Load", "Policy", "make"]

DEFAULT = "least-loaded"
POLICIES: Mapping[str, type[Policy]] = {
    DEFAULT: LeastLoaded,
    "power-of-two": PowerOfTwo,
    "sticky": Sticky,
    "round-robin": RoundRobin,
    "random": Random,
}


def make(name: str, dice: random.Random, **options: float | str) -> Policy:
    """The policy of this name; `dice` decide what it leaves to chance. Options are numbers of 0 or more, or say them.

    Raises `UnknownName` for a policy or an option that is none, and `UsageError` for a value that cannot be.
    """
    if name not in POLICIES:
        raise UnknownName("routing", name, POLICIES, label="Known")
    policy = POLICIES[name]
    for option in options:
        if option not in policy.OPTIONS:
            raise UnknownName(f"option of routing '{name}'", option, policy.OPTIONS, label="Known")
    return policy(dice, **{option: _number(name, option, value) for option, value in options.items()})


def _number(name: str, option: str, value: float | str) -> float:
    try:
        found = float(value)
    except ValueError:
        found = math.nan
    if not found >= 0:
        raise UsageError(f"routing '{name}': {option}={value} cannot be. Give a number of 0 or more.")
    return found
