"""Runs a command as its user does, and writes what the verdict said of it: `observed.py FILE S S MB WORDS…`.

The first two are how much longer a write and a sync of the output take than they do: a disk as slow as that. The third
is how much memory every other step of a decoder touches for the first time.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from pathlib import Path


def slow(call, seconds: float):
    def slowly(*given):
        time.sleep(seconds)
        return call(*given)

    return slowly


def touch(megabytes: int) -> None:
    """Every other forward of the decoder writes to so much memory that nobody has touched before."""
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
    from keeping import judged, to_plain

    from gpuinfer.__main__ import main as command
    from gpuinfer.report import report
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
            told = [{"evidence": to_plain(run), "told": report.judge(run)} for run in seen[:1]]
            Path(target).write_text(json.dumps(told))


if __name__ == "__main__":  # worker processes import this file too
    sys.path.insert(0, str(Path(__file__).parent))
    main()
