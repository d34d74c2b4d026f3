"""`gpuinfer rollouts` as people run it, with the instant model: a process of its own, and what it leaves on disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from forking import Forked, own_environment

from gpuinfer.rollouts.files import read
from gpuinfer.rollouts.record import Group

SECONDS = 120  # after which a process that does not end has failed
HERE = Path(__file__).parent
INSTANT = HERE.parent / "generate" / "instant.py"


def started(*words: object) -> Forked:
    line = ["gpuinfer", "rollouts", "--no-roofline", "--no-live", *words]
    return Forked(line, HERE, own_environment(COLUMNS="200"), prepared=INSTANT)


def ended(process: Forked) -> tuple[int, str, str]:
    """The exit code and what it said."""
    out, err = process.communicate(timeout=SECONDS)
    return int(process.returncode or 0), out.decode(), err.decode()


def rollouts(*words: object) -> tuple[int, str, str]:
    with started(*words) as process:
        return ended(process)


def until(condition: Callable[[], object], process: Forked) -> None:
    """Wait for something that a running process does."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None, ended(process)
        assert time.monotonic() < end, "that did not come about"
        time.sleep(0.01)


def groups_in(folder: Path) -> list[Group]:
    """All that are there, by number; none where there is no folder yet."""
    return sorted(read(folder), key=lambda group: group.number) if (folder / "manifest.json").exists() else []


def timeless(group: Group) -> object:
    """The record, as plain values, without when it was and what was cached."""

    def without(value):
        if isinstance(value, dict):
            return {name: without(one) for name, one in value.items() if name not in OF_TIME}
        return [without(one) for one in value] if isinstance(value, list) else value

    return without(msgspec.json.decode(msgspec.json.encode(group)))


OF_TIME = ("timing", "cached_tokens", "started", "seconds")
