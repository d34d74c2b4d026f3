"""The workload in this process, with answers that cost nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import instant

from gpuinfer.api import Limits, Setup
from gpuinfer.testing.fakes import FakeInfer
from gpuinfer.workloads.generate import workload
from gpuinfer.workloads.generate.workload import Generate

workload.model_fingerprint = lambda spec: "abc"


def answered(request) -> Any:
    found = instant.answer(request.payload)
    if isinstance(found, Exception):
        raise found
    return found


def infer_of(slots: int = 8) -> FakeInfer:
    return FakeInfer(answered, Limits(slots, slots=slots))


def run(folder: Path, text: bytes, infer: FakeInfer | None = None, **options: Any) -> list[dict[str, Any]]:
    """The output rows for an input of this text."""
    (folder / "in.jsonl").write_bytes(text)
    target = folder / "out.jsonl"
    given = {"model": "tiny", "input": str(folder / "in.jsonl"), "output": str(target), **options}
    last = asyncio.run(run_all(Generate(Setup(), **given), infer or infer_of()))
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert last.done == last.total
    return rows


async def run_all(generate: Generate, infer: FakeInfer) -> Any:
    """The last progress."""
    last = None
    async for progress in generate.run(infer):
        last = progress
    return last


def lines(*rows: Any) -> bytes:
    """JSONL; bytes stand as they are."""
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)
