"""The `gpuinfer selfplay` command as people run it: a process of its own, its streams, and what it leaves on disk."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from forking import Forked, own_environment
from matches import in_order

SECONDS = 240  # after which a process that does not end has failed


def started(*words: object, cwd: Path, program: str = "gpuinfer", **options) -> Forked:
    """The command in a session of its own, so that it can be signalled with all its workers. `program`: the module or
    the file that is run.
    """
    return Forked([program, "selfplay", *words], cwd, own_environment(COLUMNS="200"), text=True, **options)


def selfplay(*words: object, cwd: Path, **options) -> subprocess.CompletedProcess[str]:
    """The command to its end, with worker processes that are forked."""
    with started(*words, cwd=cwd, workers=True, **options) as process:
        try:
            out, err = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.npz"))


def records_of(folder: Path) -> dict[str, np.ndarray]:
    """All records of a folder, in the order of games and moves."""
    parts = []
    for shard in shards(folder):
        with np.load(shard, allow_pickle=False) as arrays:
            parts.append(dict(arrays))
    return in_order(parts)


def until(condition: Callable[[], object], process: Forked) -> None:
    """Wait, with an end, for something that a running process does."""
    for _ in range(SECONDS * 50):
        if condition():
            return
        try:
            process.wait(0.02)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"ended with {process.returncode} before that: {process.communicate()}")
    raise AssertionError("that did not come about")


def played_by(*words: object, cwd: Path) -> dict[str, Any]:
    """The report that a command which succeeds writes to standard output."""
    made = selfplay(*words, cwd=cwd)
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout)
