"""What models of one run are called where people read of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import PurePath

from gpuinfer.api import ModelSpec

NO_FILE = "no weights file"


def called(spec: ModelSpec) -> str:
    """A path's last part."""
    return PurePath(spec.name).name or spec.name


def told_apart(own: ModelSpec, other: ModelSpec) -> tuple[str, str]:
    """The run's own model and another: by name, or of one name by the files of their weights.

    `blobnet` and `blobnet-small`; `a/chat` and `b/chat`; `blobnet (new.pt)` and `blobnet (old.pt)`.
    """
    if own.name != other.name:
        return _tails(own.name, other.name)
    name = called(own)
    if own.weights == other.weights:
        return f"own {name}", name
    if own.weights is None or other.weights is None:
        files = tuple(PurePath(one).name if one else NO_FILE for one in (own.weights, other.weights))
    else:
        files = _tails(own.weights, other.weights)
    return f"{name} ({files[0]})", f"{name} ({files[1]})"


def _tails(one: str, other: str) -> tuple[str, str]:
    """As few of the last parts of two paths as tell them apart."""
    parts = PurePath(one).parts, PurePath(other).parts
    for count in range(1, max(map(len, parts)) + 1):
        found = tuple(str(PurePath(*part[-count:])) for part in parts)
        if found[0] != found[1]:
            return found[0], found[1]
    return one, other


def free_name(name: str, taken: Iterable[str]) -> str:
    """This one, or else the first of `name 2`, `name 3`, … that is not taken."""
    known = set(taken)
    names = itertools.chain([name], (f"{name} {number}" for number in itertools.count(2)))
    return next(free for free in names if free not in known)
