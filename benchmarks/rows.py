"""A million short rows through a model that computes nothing: rows per second, and how memory grows with the rows.

usage: python benchmarks/rows.py [ROWS] [FLAG…]      flags of `gpuinfer generate`, such as --ordered
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

EARLY = 0.1  # of the output is written: from here on memory is looked at
LOOK_S = 0.1


def write(path: Path, rows: int) -> None:
    with path.open("w") as file:
        file.writelines(f'{{"prompt":"What is {number} and a half?"}}\n' for number in range(rows))


def watched(run: subprocess.Popen[bytes], output: Path, whole_bytes: int) -> tuple[float, float]:
    """Memory (resident bytes) early in the run, and at most after that."""
    process, early, most = psutil.Process(run.pid), 0.0, 0.0
    while run.poll() is None:
        written = output.stat().st_size if output.exists() else 0
        try:
            now = float(process.memory_info().rss)
        except psutil.Error:  # just ended
            break
        if written > EARLY * whole_bytes:
            early = early or now
            most = max(most, now)
        try:
            run.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            continue
    return early, most


def main(rows: int, flags: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prompts, answers, report = (Path(folder) / name for name in ("in.jsonl", "out.jsonl", "report.json"))
        write(prompts, rows)
        words = ["--model", "null", "--input", str(prompts), "--output", str(answers), "--json", str(report)]
        words += ["--max-new-tokens", "1", "--batch-size", "1024", "--no-roofline", "--quiet", *flags]
        run = subprocess.Popen([sys.executable, "-m", "gpuinfer", "generate", *words], stdout=subprocess.DEVNULL)
        early, most = watched(run, answers, 200 * rows)
        if run.returncode:
            sys.exit(run.returncode)
        found = json.loads(report.read_text())
        with answers.open("rb") as file:
            written = sum(1 for _ in file)
    later = rows * (1 - EARLY)
    print(f"{written:,} of {rows:,} rows, {found['throughput']['rows_per_s']:,.0f} rows/s over {found['wall_s']:.1f} s")
    growth = (most - early) / later
    print(f"memory: {early / 2**20:.1f} MiB early, {most / 2**20:.1f} MiB at most: {growth:.1f} bytes a row")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000, sys.argv[2:])
