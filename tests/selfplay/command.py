"""The `gpuinfer selfplay` command as people run it: a process of its own, its streams, and what it leaves on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matches import in_order

SECONDS = 120  # after which a process that does not end has failed


def started(*words: object, cwd: Path, run: Sequence[str] = ("-m", "gpuinfer"), **options) -> subprocess.Popen[str]:
    """The command in a session of its own, so that it can be signalled with all its workers."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GPUINFER_")}
    return subprocess.Popen(
        [sys.executable, *run, "selfplay", *map(str, words)],
        cwd=cwd,
        env={**environment, "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


def selfplay(*words: object, cwd: Path, **options) -> subprocess.CompletedProcess[str]:
    with started(*words, cwd=cwd, **options) as process:
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


def until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
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
