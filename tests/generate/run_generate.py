"""`gpuinfer generate` with the instant model: as a process of its own, and the workload in this one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import instant
from forking import Forked, own_environment

from gpuinfer.api import Limits, Setup
from gpuinfer.testing.fakes import FakeInfer
from gpuinfer.workloads.generate import workload
from gpuinfer.workloads.generate.workload import Generate

INSTANT = Path(__file__).with_name("instant.py")
SECONDS = 240  # after which a process that does not end has failed

workload.model_fingerprint = lambda spec: "abc"


def started(*words: object, cwd: Path, environment: dict[str, str] | None = None, limit: int | None = None) -> Forked:
    """`limit`: the most bytes that a file of its may have."""
    command = ["gpuinfer", "generate", "--no-roofline", "--model", "tiny", *words]
    variables = own_environment(**{"COLUMNS": "200", **(environment or {})})
    return Forked(command, cwd, variables, limit=limit, prepared=INSTANT)


def generate(*words: object, cwd: Path, given: bytes = b"", **options: Any) -> subprocess.CompletedProcess[str]:
    with started(*words, cwd=cwd, **options) as process:
        out, err = process.communicate(given, timeout=SECONDS)
    return subprocess.CompletedProcess(process.args, process.returncode, out.decode(), err.decode())


def succeeded(*words: object, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    done = generate(*words, cwd=cwd, **options)
    assert done.returncode == 0, done.stderr
    return done


def until(condition: Callable[[], object], process: Forked) -> None:
    """Wait for something that a running process does, or for the process to end."""
    for _ in range(SECONDS * 200):
        if condition():
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.005)
            return
    raise AssertionError("that did not come about")


def lines(*rows: Any) -> bytes:
    """JSONL; bytes stand as they are."""
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


def prompts(folder: Path, *rows: Any, count: int = 0) -> None:
    """Write `in.jsonl`: these rows, or `count` plain ones."""
    plain = [{"id": f"r{number}", "prompt": f"prompt {number}"} for number in range(count)]
    (folder / "in.jsonl").write_bytes(lines(*(rows or plain)))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def answered(request: Any) -> Any:
    found = instant.answer(request.payload)
    if isinstance(found, Exception):
        raise found
    return found


def infer_of(slots: int = 8) -> FakeInfer:
    return FakeInfer(answered, Limits(slots, slots=slots))


def run(folder: Path, text: bytes, infer: FakeInfer | None = None, **options: Any) -> list[dict[str, Any]]:
    """The output rows for an input of this text, by the workload in this process."""
    folder.mkdir(exist_ok=True)
    (folder / "in.jsonl").write_bytes(text)
    given = {"model": "tiny", "input": str(folder / "in.jsonl"), "output": str(folder / "out.jsonl"), **options}
    last = asyncio.run(run_all(Generate(Setup(), **given), infer or infer_of()))
    assert last.done == last.total
    return rows_of(folder)


async def run_all(made: Generate, infer: FakeInfer) -> Any:
    """The last progress."""
    return [progress async for progress in made.run(infer)][-1]
