"""How long the one file takes to start, beside the same gpuinfer in an environment: in turns, medians.

usage: python benchmarks/one_file.py [--repeats N] [NAME=COMMAND…]
       the command is a program, or several words; if none is named, dist/gpuinfer and the gpuinfer beside this Python

The first start is taken with an empty cache each time, so it unpacks, and compiles kernels; the second finds both.
Processor time is that of all processes: it tells more than the clock where other programs run.
"""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 1800.0
PLAYING = ("selfplay", "--games", "10", "--model", "blobnet-small", "--quiet", "--json", "-")
WORK = {"--help": ("--help",), "selfplay, 10 games": PLAYING}


@dataclass(frozen=True)
class Taken:
    """Seconds of the clock, and of processors."""

    wall_s: float
    cpu_s: float


def run(words: Sequence[str], cache: Path) -> Taken:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PEX_ROOT": str(cache / "pex")}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(
        words, env=environment, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wall_s, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Taken(wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def measure(programs: Mapping[str, Sequence[str]], repeats: int) -> dict[tuple[str, str], list[Taken]]:
    """First starts, then second ones: what was taken, by program and work."""
    taken: dict[tuple[str, str], list[Taken]] = {}
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: Path(folder, str(number)) for number, name in enumerate(programs)}
        for name, program in programs.items():
            taken[name, "first --help"] = [run([*program, "--help"], caches[name])]
        for name, program in programs.items():
            taken[name, "first selfplay"] = [run([*program, *PLAYING], caches[name])]
        for _ in range(repeats):
            for work, words in WORK.items():
                for name, program in programs.items():
                    taken.setdefault((name, work), []).append(run([*program, *words], caches[name]))
    return taken


def named(word: str) -> tuple[str, list[str]]:
    """Name and words of a command; for argparse, which says what is wrong."""
    name, _, command = word.partition("=")
    words = shlex.split(command)
    if not name or not words:
        raise argparse.ArgumentTypeError(f"'{word}' is no NAME=COMMAND. Write one such as file=dist/gpuinfer")
    if not Path(words[0]).is_file():
        raise argparse.ArgumentTypeError(f"there is no program {words[0]}. Build it (make binary), or name another")
    return name, words


def main(arguments: argparse.Namespace) -> None:
    programs = dict(arguments.programs)
    if not programs:
        programs = {"one file": ["dist/gpuinfer"], "environment": [str(Path(sys.executable).with_name("gpuinfer"))]}
    for name, program in programs.items():
        print(f"{name}: {Path(program[0]).stat().st_size / 1e6:,.1f} MB")
    for (name, work), times in measure(programs, arguments.repeats).items():
        wall_s, cpu_s = (statistics.median(values) for values in ([t.wall_s for t in times], [t.cpu_s for t in times]))
        print(f"{work:20} {name:20} {wall_s:7.2f} s, of processors {cpu_s:6.2f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("programs", nargs="*", type=named, metavar="NAME=COMMAND")
    main(parser.parse_args())
