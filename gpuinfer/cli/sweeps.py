"""`--sweep key=a,b,c` as a grid: any flag of the simulation, any option of a strategy, or the strategy itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpuinfer.cli.simulation import Options
from gpuinfer.cli.variants import Axis, labels_of, parts, with_choices
from gpuinfer.config import options, registry
from gpuinfer.errors import UnknownName, UsageError

NOT_SWEPT = ("plot", "solve")
COMMON = ("strategy", "seed")


def grid(sweeps: Sequence[str], values: Mapping[str, Any]) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """The flags of each combination, and what is swept in it; the last sweep fastest. Raises `UsageError`."""
    axes: dict[Axis, list[str]] = {}
    words = [_split(word) for word in sweeps]
    strategies = [one for key, found in words if key == "strategy" for one in found]
    strategies = strategies or [values.get("strategy") or "dynamic"]
    for key, found in words:
        axis = _axis(key, strategies)
        if axis in axes:
            raise UsageError(f"--sweep names '{key}' twice. Give all its values in one: --sweep {key}=a,b,c.")
        if not axis[1] and values.get(axis[0]) is not None:
            flag = axis[0].replace("_", "-")
            raise UsageError(f"--sweep and --{flag} both name values of '{key}'. Leave one of them out.")
        axes[axis] = found
    chosen = [dict(zip(axes, one, strict=True)) for one in itertools.product(*axes.values())]
    labels = labels_of(axes)
    return [(with_choices(values, one), {labels[axis]: text for axis, text in one.items()}) for one in chosen]


def _split(word: str) -> tuple[str, list[str]]:
    """A key and its values; a semicolon keeps commas inside them."""
    key, equals, listed = word.partition("=")
    found = list(dict.fromkeys(one.strip() for one in listed.split(";") if one.strip())) if ";" in listed else None
    found = found or parts(listed)
    key = key.strip().removeprefix("--").replace("-", "_")
    if not (key and equals and found):
        raise UsageError(f"--sweep {word}: not of the form key=a,b,c. Write --sweep {key or 'rate'}=VALUE,VALUE.")
    return key, found


def _axis(key: str, strategies: Sequence[str]) -> Axis:
    """The flag, or the option of a strategy: `strategy.max_rows`, say, where a flag has the same name."""
    flags = [name for name in options.fields_of(Options) if name not in NOT_SWEPT]
    owner, dot, option = key.rpartition(".")
    known = dict(_options_of(strategies))
    if not dot and key in (*flags, *COMMON):
        return key, ""
    if not dot and key in known:
        return "strategy_options", key
    if dot and owner == "strategy" and option in known:
        return "strategy_options", option
    if dot and owner in strategies and known.get(option, False):
        return "strategy_options", key
    raise UnknownName("setting to sweep", key, {*flags, *COMMON, *known}, label="Settings")


def _options_of(strategies: Sequence[str]) -> Iterator[tuple[str, bool]]:
    for name in strategies:
        for option in options.fields_of(registry.load("strategies", name).Options):
            yield option, True
