"""Flags that name several values, `--workers 1,2,4`, as variants: one for each combination."""

from __future__ import annotations

import functools
import os
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuinfer.cli import flags
from gpuinfer.cli.building import build, merge
from gpuinfer.cli.flags import SHORTS, spelled
from gpuinfer.cli.grid import parts, points, split_axis
from gpuinfer.config import options, registry
from gpuinfer.errors import UnknownName, UsageError
from gpuinfer.lab.bench.measurement import Variant

KINDS = {"backend_options": "backends", "strategy_options": "strategies"}
# Flags that take one value: no part of a run, or, the seed, counted up by the repeats.
SINGLE = (
    "json",
    "trace",
    "profile",
    "profile_seconds",
    "track",
    "config",
    "live",
    "quiet",
    "verbose",
    "roofline",
    "trial",
    "seed",
)
AMOUNTS = ("games", "groups", "requests", "duration", "schedule", "replay")  # flags that say how much there is to do
ENDLESS = {"games": str(10**9), "duration": str(10**9)}  # in a run that is ended by the clock

KEPT_NOWHERE = {"output": os.devnull}  # of a workload that writes answers: a comparison keeps none

Axis = tuple[str, str]  # a flag and "", or `backend_options` and the key of a -B
Values = Mapping[str, Any]


def variants_of(target: str, values: Values, compare: Sequence[str], *, timed: bool) -> list[Variant]:
    """The variants in the order in which they are named, the last axis fastest. Raises `UsageError`.

    `compare` holds `a,b` (backends) or `key=a,b`. With `timed` each run has more work than it will ever do.
    """
    plugin = registry.load("workloads", target)
    known = {**options.fields_of(plugin.Options), **flags.common_flags()}
    setter = functools.partial(_setter, target, values)
    axes: dict[Axis, list[str]] = {}
    for word in compare:
        name, said = split_axis(word)
        name = name or "backend"
        flag = None if name in known or name in KINDS else setter(name)
        if flag is None and (name not in known or name in (*SINGLE, *KINDS)):
            raise UnknownName("setting to compare", name, set(known) - {*SINGLE, *KINDS}, label="Settings")
        if not said:
            raise UsageError(f"--compare {word}: names nothing to compare. Write --compare {name}=a,b.")
        axis = (flag, name) if flag else (name, "")
        axes[axis] = list(dict.fromkeys([*axes.get(axis, []), *said]))
    for key, option in axes:
        if _given_twice(values, key, option):
            short = SHORTS.get(key) or flags.flag(key)
            raise UsageError(f"--compare and {short} both name values of '{option or key}'. Leave one of them out.")
    axes |= dict(_grids(plugin, values, axes.get(("backend", ""), [])))
    found = (variant(target, values, chosen, timed=timed) for chosen in points(axes))
    return list({one.command: one for one in found}.values())  # an option of one backend makes no two of another


def variant(target: str, values: Values, chosen: Mapping[Axis, str], *, timed: bool) -> Variant:
    """One variant: the flags as given, with these values on their axes."""
    own = with_choices(values, chosen)
    common = merge(target, {**own, **dict.fromkeys(KINDS)}).common
    chosen = {axis: value for axis, value in chosen.items() if _concerns(axis, common)}
    for flag, kind in KINDS.items():
        name = getattr(common, _owner(flag))
        own[flag] = _in_place(
            addressed(own.get(flag) or [], kind, name), kind, name, {key for axis, key in chosen if axis == flag}
        )
    fixed = {key: place for key, place in KEPT_NOWHERE.items() if _has(target, key)}
    fixed |= {key: amount for key, amount in ENDLESS.items() if timed and _has(target, key) and own.get(key) is None}
    return Variant(
        name=", ".join(_said(label, chosen[axis]) for axis, label in labels_of(chosen).items()) or common.backend,
        build=lambda seed: build(target, merge(target, {**own, **fixed, "seed": str(seed)})),
        settings={label: chosen[axis] for axis, label in labels_of(chosen).items()},
        command=spelled(target, own),
        flags=own,
    )


def with_choices(values: Values, chosen: Mapping[Axis, str]) -> dict[str, Any]:
    """The flags with the choices in their places."""
    own = dict(values)
    for (flag, key), value in chosen.items():
        if key:
            words = [word for word in own.get(flag) or [] if _key(word) != key]
            own[flag] = [*words, f"{key}={value}"]
        else:
            own[flag] = value
    return own


def addressed(words: Sequence[str], kind: str, plugin: str) -> list[str]:
    """The `key=value` words for this plugin: `central.max_clients=2` is for central alone, and for it `max_clients=2`.

    Raises `UnknownName` for a word to a plugin that is not there.
    """
    found = []
    for word in words:
        owner, dot, rest = word.partition(".")
        if not dot or "=" in owner:
            found.append(word)
        elif owner == plugin:
            found.append(rest)
        elif owner not in (known := {record.name for record in registry.listing(kind)}):
            raise UnknownName(registry.KINDS[kind], owner, known)
    return found


def _in_place(words: Sequence[str], kind: str, plugin: str, compared: Collection[str]) -> list[str]:
    """The words without those that go with another value of what is compared: of `-B stages=3 --compare
    parallel=data,pipeline` the first variant has no stages.
    """
    given = {_key(word): word.partition("=")[2] for word in words}
    if not compared & given.keys():
        return list(words)
    try:
        idle = options.out_of_place(registry.load(kind, plugin).Options, given)
    except UsageError:  # said when the variant is built
        return list(words)
    return [word for word in words if _key(word) not in idle]


def _concerns(axis: Axis, common: Any) -> bool:
    """Whether an option's axis is about the plugin in force."""
    owner, dot, _ = axis[1].partition(".")
    return not dot or owner == getattr(common, _owner(axis[0]))


def _setter(target: str, values: Values, key: str) -> str | None:
    """The flag that sets this option of the backend or of the strategy in force; None where neither has it."""
    common = merge(target, {**values, **dict.fromkeys(KINDS)}).common
    for flag, kind in KINDS.items():
        if any(_field(kind, name, key) for name in parts(getattr(common, _owner(flag)))):
            return flag
    return None


def _given_twice(values: Values, flag: str, option: str) -> bool:
    if option:
        return any(_key(word) == option for word in values.get(flag) or [])
    return values.get(flag) is not None


def _grids(plugin: Any, values: Values, backends: Sequence[str]) -> Iterator[tuple[Axis, list[str]]]:
    """The flags whose values are lists where one value is due."""
    fields = options.fields_of(plugin.Options)
    for flag, given in values.items():
        if isinstance(given, str) and flag not in SINGLE and _splits(given, fields.get(flag)):
            yield (flag, ""), parts(given)
    for flag, kind in KINDS.items():
        named = values.get(_owner(flag)) or ",".join(backends if kind == "backends" else [])
        for word in values.get(flag) or []:
            key, _, given = word.partition("=")
            if _splits(given, *(_field(kind, name, _key(word)) for name in parts(named))):
                yield (flag, _key(word)), parts(given)
            elif not key or "=" not in word:
                flags.option_pairs([word], SHORTS[flag], kind)  # raises


def _splits(text: str, *fields: Any) -> bool:
    """Whether this text names several values: an option that takes a list, a path or pairs keeps its commas."""
    return "," in text and "=" not in text and not any(field and _keeps_commas(field.annotation) for field in fields)


def _keeps_commas(annotation: Any) -> bool:
    members = [annotation, *typing.get_args(annotation)]
    return any(typing.get_origin(member) in (list, tuple, set) or member is Path for member in members)


def _field(kind: str, name: str, key: str) -> Any:
    try:
        return options.fields_of(registry.load(kind, name).Options).get(key)
    except UsageError:  # said when the variant is built
        return None


def _has(target: str, key: str) -> bool:
    return key in options.fields_of(registry.load("workloads", target).Options)


def _key(word: str) -> str:
    """Of a `key=value` word; a plugin's name before it stays as it is."""
    owner, dot, key = word.partition("=")[0].strip().rpartition(".")
    return owner + dot + key.replace("-", "_")


def _owner(flag: str) -> str:
    """`backend` for `backend_options`: the flag that names the plugin."""
    return flag.removesuffix("_options")


def labels_of(axes: Iterable[Axis]) -> dict[Axis, str]:
    """A name for each: that of its setting, with `strategy.` or `backend.` before it when another has that name."""
    labels: dict[Axis, str] = {}
    for flag, key in axes:
        label = key or flag
        labels[flag, key] = f"{_owner(flag)}.{label}" if label in labels.values() else label
    return labels


def _said(label: str, value: str) -> str:
    if label in ("backend", "strategy"):
        return value
    words = label.replace("_", " ")
    counted = value[:1].isdecimal() and any(word.endswith("s") for word in words.split())
    if value == "1":
        words = words.removesuffix("s")
    return f"{value} {words}" if counted else f"{words} {value}"
