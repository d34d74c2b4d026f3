"""Whether memory stays flat: 100,000 games with records, the memory of all processes looked at four times a second.

usage: python benchmarks/memory.py [GAMES] [FLAG…]      prints it at each tenth of the games, MiB (USS, summed)
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil


def memory_mb(root: psutil.Process) -> float:
    """Unique memory of a process and all its children: what would be freed if they ended."""
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_full_info().uss
        except psutil.Error:  # just ended
            continue
    return total / 2**20


def main(games: int, flags: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "records"
        words = ["selfplay", "--games", str(games), "--model", "uniform", "--out", str(out), "--quiet", "--json", "-"]
        run = subprocess.Popen([sys.executable, "-m", "gpuinfer", *words, *flags], stdout=subprocess.DEVNULL)
        samples = []
        while run.poll() is None:
            samples.append(memory_mb(psutil.Process(run.pid)))
            time.sleep(0.25)
        written = sum(shard.stat().st_size for shard in out.iterdir()) / 2**20
    busy = samples[8:-2]  # without start and end
    tenths = [
        max(busy[len(busy) * i // 10 : max(len(busy) * (i + 1) // 10, len(busy) * i // 10 + 1)]) for i in range(10)
    ]
    print(f"{games:,} games, {written:,.0f} MiB of records; most memory in each tenth of the time, MiB:")
    print(" ".join(f"{mb:,.0f}" for mb in tenths))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000, sys.argv[2:])
