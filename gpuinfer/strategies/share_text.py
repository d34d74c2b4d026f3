"""Shares of the classes as people give them: `60,30,10`, `high=60,low=20`, or a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from gpuinfer.api import Priority

CLASSES = [priority.name.lower() for priority in Priority]
FORM = f"Give {len(CLASSES)} percentages, for {', '.join(CLASSES)}: 50,30,20; or some by name: high=60."


def read_shares(given: Any, default: Sequence[float]) -> tuple[float, ...]:
    """Percent for each class, highest first. Raises `ValueError`, with the cure, for what cannot be.

    Classes that are not named share what is left in the proportion of their defaults.
    """
    parts = [part.strip() for part in given.split(",") if part.strip()] if isinstance(given, str) else given
    if isinstance(parts, Mapping):
        shares = _complete({str(name): _number(value) for name, value in parts.items()}, default)
    elif not isinstance(parts, Sequence):
        raise ValueError(f"{given!r} are no shares. {FORM}")
    elif parts and all(isinstance(part, str) and _separator(part) for part in parts):
        named = [part.split(_separator(part), 1) for part in parts]
        if len({name.strip() for name, _ in named}) != len(named):
            raise ValueError(f"a class is named twice. {FORM}")
        shares = _complete({name.strip(): _number(value) for name, value in named}, default)
    elif len(parts) == len(CLASSES):
        shares = [_number(part) for part in parts]
    else:
        raise ValueError(f"these are {len(parts)} shares. {FORM}")
    return _checked(shares)


def _checked(shares: Sequence[float]) -> tuple[float, ...]:
    for name, share in zip(CLASSES, shares, strict=True):
        if not 0 < share < math.inf:
            raise ValueError(f"a share of {share:g} % for {name} cannot be. Give each class more than 0.")
    if sum(shares) > 100 + 1e-9:
        raise ValueError(f"the shares add up to {sum(shares):g} %. Give at most 100 in all.")
    return tuple(shares)


def _complete(named: Mapping[str, float], default: Sequence[float]) -> list[float]:
    for name in named:
        if name not in CLASSES:
            near = get_close_matches(name, CLASSES, n=1, cutoff=0.5)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise ValueError(f"no class named '{name}'.{hint} Classes: {', '.join(CLASSES)}.")
    usual = dict(zip(CLASSES, default, strict=True))
    others = sum(usual[name] for name in CLASSES if name not in named)
    left = 100 - sum(named.values())
    if others and left <= 0 < min(named.values()):
        raise ValueError(f"the shares add up to {100 - left:g} %, which leaves nothing for the others. {FORM}")
    return [named[name] if name in named else left * usual[name] / others for name in CLASSES]


def _separator(part: str) -> str:
    return next((sign for sign in "=:" if sign in part), "")


def _number(value: Any) -> float:
    text = value.strip().removesuffix("%") if isinstance(value, str) else value
    if isinstance(text, bool):
        raise ValueError(f"{value!r} is no share. {FORM}")
    try:
        return float(text)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is no share. {FORM}") from None
