"""`gpuinfer rollouts` as people run it, with the instant model: a process of its own, and what it leaves on disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from forking import Forked, own_environment

from gpuinfer.rollouts.files import read
from gpuinfer.rollouts.record import Group, Timing

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


def timeless(group: Group) -> Group:
    """The record without when it was, and without what was cached."""

    def of_turn(turn):
        return msgspec.structs.replace(turn, timing=Timing(), cached_tokens=0)

    def of_trajectory(one):
        return msgspec.structs.replace(one, turns=tuple(map(of_turn, one.turns)))

    def of_game(game):
        return msgspec.structs.replace(game, seconds=0.0, trajectories=tuple(map(of_trajectory, game.trajectories)))

    games, failed = (tuple(map(of_game, games)) for games in (group.games, group.failed))
    return msgspec.structs.replace(group, started=0.0, seconds=0.0, games=games, failed=failed)
