"""What it costs that a run of self-play is divided: one node of a coordinator against the plain run, in turns.

python benchmarks/selfplay_nodes.py [--games 20000] [--simulations 100] [--rounds 5] [more flags of self-play …]

Both play the same games with the same workers on this machine, first few of them and then many, so that what both take
to start cancels out: all figures are of the games that the longer run has more. CPU seconds are those of the whole tree
of processes. Writes the medians of the ratios; the folders of both are compared byte for byte.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

NODE = ["--launcher", "local", "-L", "nodes=1"]


def played(words: Sequence[str], folder: Path) -> tuple[float, float]:
    """Seconds of the clock and of the CPUs that this command takes."""
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "gpuinfer", "selfplay", *words, "--quiet", "--out", str(folder)])
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"self-play ended with {process.returncode}: {' '.join(words)}")
    return time.monotonic() - start, used.ru_utime + used.ru_stime


def difference(words: Sequence[str], games: int, folder: Path) -> tuple[float, float]:
    """The same of the games that a run has beyond a tenth of them."""
    few = played([*words, "--games", str(games // 10)], folder.with_suffix(".few"))
    many = played([*words, "--games", str(games)], folder)
    return many[0] - few[0], many[1] - few[1]


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in folder.iterdir()}


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    reader.add_argument("--games", type=int, default=20_000)
    reader.add_argument("--simulations", type=int, default=100)
    reader.add_argument("--rounds", type=int, default=5)
    given, more = reader.parse_known_args()
    words = ["--simulations", str(given.simulations), *(more or ["--game", "connect-four", "--model", "uniform"])]
    ratios = []
    for number in range(given.rounds):
        with tempfile.TemporaryDirectory() as name:
            both = [(Path(name) / "plain", words), (Path(name) / "node", [*words, *NODE])]
            found = {path.name: difference(line, given.games, path) for path, line in both[:: 1 if number % 2 else -1]}
            if bytes_of(Path(name) / "plain") != bytes_of(Path(name) / "node"):
                raise SystemExit("the folders differ")
        ratios.append([found["node"][which] / found["plain"][which] for which in (0, 1)])
        print(f"round {number + 1}: {found}", file=sys.stderr)
    wall, cpu = (statistics.median(column) for column in zip(*ratios, strict=True))
    print(f"{given.games} games, one node ÷ plain: {wall:.3f} of the clock, {cpu:.3f} of CPU seconds; the same bytes")


if __name__ == "__main__":
    main()
