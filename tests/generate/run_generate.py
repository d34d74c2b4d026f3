"""`gpuinfer generate` as people run it, with the instant model: a process of its own, and what it leaves on disk."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forking import Forked, own_environment

INSTANT = Path(__file__).with_name("instant.py")
SECONDS = 240  # after which a process that does not end has failed


def started(*words: object, cwd: Path, environment: dict[str, str] | None = None, limit: int | None = None) -> Forked:
    """`limit`: the most bytes that a file of its may have."""
    return Forked(
        ["gpuinfer", "generate", "--no-roofline", "--model", "tiny", *words],
        cwd,
        own_environment(**{"COLUMNS": "200", **(environment or {})}),
        limit=limit,
        prepared=INSTANT,
    )


def generate(*words: object, cwd: Path, given: bytes = b"", **options: Any) -> subprocess.CompletedProcess[str]:
    with started(*words, cwd=cwd, **options) as process:
        out, err = process.communicate(given, timeout=SECONDS)
    return subprocess.CompletedProcess(process.args, process.returncode, out.decode(), err.decode())


def until(condition: Callable[[], object], process: Forked) -> None:
    """Wait for something that a running process does, or for the process to end."""
    for _ in range(SECONDS * 200):
        if condition():
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.005)
            return
    raise AssertionError("that did not come about")


def prompts(path: Path, count: int, **more: Any) -> Path:
    rows = ({"id": f"r{number}", "prompt": f"prompt {number}", **more} for number in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
