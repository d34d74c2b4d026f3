"""Runs a command as its user does, and writes what the verdict said of it: `observed.py FILE SECONDS SECONDS WORDS…`.

The two are how much longer a write and a sync of the output take than they do: a disk as slow as that.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def slow(call, seconds: float):
    def slowly(*given):
        time.sleep(seconds)
        return call(*given)

    return slowly


def main() -> None:
    from keeping import judged, to_plain

    from gpuinfer.__main__ import main as command
    from gpuinfer.report import report
    from gpuinfer.workloads.generate import writing

    target, write_s, sync_s, *words = sys.argv[1:]
    disk = type(os)("os")
    disk.__dict__.update(os.__dict__)
    disk.write, disk.fsync = slow(os.write, float(write_s)), slow(os.fsync, float(sync_s))
    writing.os = disk
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
