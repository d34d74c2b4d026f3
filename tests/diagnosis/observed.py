"""What the verdict looks at in a run, kept as plain values; and a command run as its user does, observed so:
`observed.py FILE S S MB WORDS…`.

The first two numbers are how much longer a write and a sync of the output take: a disk as slow as that. The third is
how much memory every other step of a decoder touches for the first time.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from gpuinfer.api import Roofline
from gpuinfer.report import report
from gpuinfer.report.evidence import Evidence


@contextlib.contextmanager
def judged() -> Iterator[list[Evidence]]:
    """The evidence of every run that is reported meanwhile."""
    seen: list[Evidence] = []
    judge = report.judge

    def noting(run: Evidence) -> dict[str, Any]:
        seen.append(run)
        return judge(run)

    report.judge = noting
    try:
        yield seen
    finally:
        report.judge = judge


def from_plain(kept: Mapping[str, Any]) -> Evidence:
    """Of `asdict`, by way of JSON. Fields that an older or a newer verdict does not know are left out."""
    known = {field.name for field in fields(Evidence)}
    values = {name: value for name, value in kept.items() if name in known}
    values["batch_s"] = {int(rows): sums for rows, sums in kept["batch_s"].items()}
    values["roofline"] = Roofline(**kept["roofline"]) if kept["roofline"] else None
    return Evidence(**values)


def slow(call, seconds: float):
    return lambda *given: (time.sleep(seconds), call(*given))[1]


def touch(megabytes: int) -> None:
    """Every other forward of the decoder writes to so much memory that is new to the process."""
    from gpuinfer.text.decoder.compiled_decoder import CpuDecoder

    forward, steps = CpuDecoder.forward, iter(range(1 << 60))

    def forward_and_touch(self, step):
        if next(steps) % 2:
            with mmap.mmap(-1, megabytes << 20) as fresh:
                for place in range(0, len(fresh), mmap.PAGESIZE):
                    fresh[place] = 1
        return forward(self, step)

    CpuDecoder.forward = forward_and_touch


def main() -> None:
    from gpuinfer.__main__ import main as command
    from gpuinfer.workloads.generate import output_writer

    target, write_s, sync_s, touched_mb, *words = sys.argv[1:]
    if int(touched_mb):
        touch(int(touched_mb))
    disk = type(os)("os")
    disk.__dict__.update(os.__dict__)
    disk.write, disk.fsync = slow(os.write, float(write_s)), slow(os.fsync, float(sync_s))
    output_writer.os = disk
    sys.argv = ["gpuinfer", *words]
    with judged() as seen:
        try:
            command()
        finally:
            told = [{"evidence": asdict(run), "told": report.judge(run)} for run in seen[:1]]
            Path(target).write_text(json.dumps(told))


if __name__ == "__main__":  # worker processes import this file too
    main()
