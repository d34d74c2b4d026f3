"""`gpuinfer generate` of many rows over local nodes: order, memory over time, reads of the input, rows a core-second.

    python -m benchmarks.cluster_generate --rows 10000000 --nodes 4

The model is `null`, which computes nothing: what is measured is what surrounds a model. A plain run of `--plain-rows`
of the same rows comes first. Exit 1 when a claim does not hold: each row once, in order; the input opened by one
process that never goes back in it; with `--strace`: no byte but the first 64 KiB is read twice; memory of the
coordinator and of each node flat over the run's second half.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

SAMPLE_S = 0.5
GROWTH = 1.25  # of memory over the second half of a run, at most
SLACK_BYTES = 64 << 20
FORM_BYTES = 80 << 10  # of the beginning, which tells the input's form before the run


@dataclass
class ProcessTrack:
    """One process over time."""

    kind: str  # coordinator, node, other
    cpu_s: float = 0.0
    rss: list[tuple[float, int]] = field(default_factory=list)  # seconds, bytes

    def grew(self, seconds: float) -> bool:
        """Whether its memory grew over the second half of the run, of its third quarter to its last."""
        quarters = [[size for at, size in self.rss if 0 <= at - low * seconds < seconds / 4] for low in (0.5, 0.75)]
        return all(quarters) and max(quarters[1]) > GROWTH * max(quarters[0]) + SLACK_BYTES


@dataclass
class Measured:
    """One run."""

    rows: int
    seconds: float
    processes: dict[int, ProcessTrack]
    positions: dict[int, list[int]]  # of each process that had the input open, where it was in it

    @property
    def cpu_s(self) -> float:
        return sum(one.cpu_s for one in self.processes.values())


def run(command: Sequence[str], source: Path, rows: int, log: Path) -> Measured:
    """Raises `SystemExit` when the command fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began, tracks = time.monotonic(), dict[int, ProcessTrack]()
    positions, taken = dict[int, list[int]](), source.stat()
    with log.open("wb") as written:
        process = subprocess.Popen(command, stdout=written, stderr=written, env=environment)
        first = psutil.Process(process.pid)
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):
                for one in (first, *first.children(recursive=True)):
                    with contextlib.suppress(psutil.Error, OSError):
                        words = one.cmdline()
                        kind = "node" if "node" in words else "coordinator" if "generate" in words else "other"
                        kind = "other" if words[:1] == ["strace"] else kind
                        track = tracks.setdefault(one.pid, ProcessTrack(kind))
                        used = one.cpu_times()
                        track.cpu_s = used.user + used.system
                        track.rss.append((time.monotonic() - began, one.memory_info().rss))
                        for descriptor in Path(f"/proc/{one.pid}/fd").iterdir():
                            found = os.stat(descriptor)
                            if (found.st_dev, found.st_ino) == (taken.st_dev, taken.st_ino):
                                text = Path(f"/proc/{one.pid}/fdinfo/{descriptor.name}").read_text()
                                positions.setdefault(one.pid, []).append(int(text.split()[1]))
            time.sleep(SAMPLE_S)
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text()[-4000:]}")
    return Measured(rows, time.monotonic() - began, tracks, positions)


def write_rows(path: Path, rows: int) -> None:
    with path.open("w") as file:
        file.writelines(f'{{"id": {number}, "prompt": "a short prompt {number}"}}\n' for number in range(rows))


def in_order(path: Path, rows: int) -> bool:
    """Whether each row is there once, in the order of the input."""
    with path.open("rb") as file:
        number = -1
        for number, line in enumerate(file):
            if json.loads(line)["id"] != number:
                return False
    return number == rows - 1


def read_bytes(traced: Path) -> int:
    """How many bytes of the input all processes have read together."""
    with traced.open() as file:
        results = [line.rpartition(" = ")[2].split()[0] for line in file if " = " in line]
    return sum(int(one) for one in results if one.isdigit())


def megabytes(track: ProcessTrack, seconds: float) -> str:
    """At each eighth of the run."""
    found = []
    for part in range(1, 9):
        until = [size for at, size in track.rss if at <= seconds * part / 8]
        found.append(f"{(until[-1] if until else 0) / 1e6:,.0f}")
    return " ".join(found)


def report(name: str, measured: Measured) -> None:
    rate = measured.rows / measured.cpu_s
    took = f"{measured.seconds:.1f} s, {measured.cpu_s:.1f} core-seconds"
    print(f"{name}: {measured.rows:,} rows in {took}: {rate:,.0f} rows a core-second")
    for pid, track in measured.processes.items():
        if track.kind != "other":
            sizes = megabytes(track, measured.seconds)
            print(f"  {track.kind} {pid}: {track.cpu_s:.1f} core-seconds, MB at each eighth: {sizes}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--plain-rows", type=int, default=None, help="of the plain run [a tenth]")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=256, help="slots; their pages fill up in the first rows")
    parser.add_argument("--unordered", action="store_true")
    parser.add_argument("--strace", action="store_true", help="count the bytes read of the input; slow")
    parser.add_argument("--folder", type=Path, default=None, help="for input and output [a temporary one]")
    own = parser.parse_args()
    folder = own.folder or Path(tempfile.mkdtemp(prefix="cluster-generate-"))
    folder.mkdir(exist_ok=True)
    try:
        return compare(own, folder)
    finally:
        if own.folder is None:
            shutil.rmtree(folder)


def compare(own: argparse.Namespace, folder: Path) -> int:
    """The exit code."""

    def command(name: str, *more: str) -> list[str]:
        words = [sys.executable, "-m", "gpuinfer", "generate", "--model", "null", "--no-roofline", "--no-live"]
        words += ["--batch-size", str(own.batch_size), "--max-new-tokens", str(own.max_new_tokens)]
        words += [*([] if own.unordered else ["--ordered"])]
        return [*words, "--input", str(folder / f"{name}.jsonl"), "--output", str(folder / f"{name}.out.jsonl"), *more]

    few = own.plain_rows or max(1, own.rows // 10)
    for name, rows in (("plain", few), ("nodes", own.rows)):
        write_rows(folder / f"{name}.jsonl", rows)
        for old in folder.glob(f"{name}.out.jsonl*"):
            old.unlink()
    plain = run(command("plain"), folder / "plain.jsonl", few, folder / "plain.log")
    report("plain", plain)
    source, output = folder / "nodes.jsonl", folder / "nodes.out.jsonl"
    traced = folder / "nodes.strace"
    tracing = ["strace", "-f", "-qq", "-P", str(source), "-e", "trace=read,pread64,readv,preadv", "-o", str(traced)]
    words = command("nodes", "--launcher", "local", "-L", f"nodes={own.nodes}")
    many = run([*(tracing if own.strace else ()), *words], source, own.rows, folder / "nodes.log")
    report(f"{own.nodes} nodes", many)
    print(f"rows a core-second, of the plain run's: {many.rows / many.cpu_s / (plain.rows / plain.cpu_s):.2f}")
    ours = [one for one in many.processes.values() if one.kind == "coordinator"]
    print(f"coordinator alone: {own.rows / sum(one.cpu_s for one in ours):,.0f} rows a core-second")
    claims = {
        "each row once, in order": own.unordered or in_order(output, own.rows),
        "one process opened the input": len(many.positions) == 1,
        "it never went back in it": all(found == sorted(found) for found in many.positions.values()),
        "no byte was read twice": not own.strace or read_bytes(traced) <= source.stat().st_size + FORM_BYTES,
        "memory is flat": not [one for one in many.processes.values() if one.grew(many.seconds)],
    }
    for claim, holds in claims.items():
        print(f"{'yes' if holds else 'NO '} {claim}")
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
