"""Rollouts of Diplomacy beside what they could be: the own engine, in turn with itself. A Markdown table.

    python benchmarks/rollouts.py [--repeats N] [--years N] [--quick] [--only turns|peak|constraint]

`turns`: 7 powers × 6 samples, all at once, against one call after another (of one sample: its speed does not depend on
how many there are). `peak`: 8 groups on 42 slots, against the same prompts asked again, all at hand, for answers of the
same lengths. `constraint`: legal orders alone, against the same games led by the orders of a record, while as many
tokens are drawn freely. Tokens are those that were drawn, by the wall clock. A model of random weights never says a
tag: a line of it is what begins the orders. Ratios are taken within a repeat. Needs plugins/gpuinfer-diplomacy.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpuinfer.host import machine

CASES = {  # flags → the least ratio of the second way to the first
    "turns": (["--groups", "1", "--samples-per-group", "6"], 8.0),
    "peak": (["--groups", "8", "--samples-per-group", "6", "--groups-in-flight", "8"], 0.85),
    "constraint": (["--groups", "8", "--samples-per-group", "6", "--groups-in-flight", "8"], 0.95),
}
SLOTS, YEARS = 42, {"turns": 3, "peak": 1, "constraint": 1}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--years", type=int, help="of every case")
    parser.add_argument("--quick", action="store_true", help="one year, one repeat")
    parser.add_argument("--only", choices=list(CASES), action="append")
    given = parser.parse_args(arguments)
    print(f"{machine.cores()} cores, tiny, {SLOTS} slots\n\n| case | first | second | ratio | at least |")
    print("|---|---:|---:|---:|---:|")
    for name in given.only or CASES:
        print(row(name, given), flush=True)


def row(name: str, given: argparse.Namespace) -> str:
    flags, least = CASES[name]
    years = 1 if given.quick else given.years or YEARS[name]
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.json")
        subprocess.run(
            [sys.executable, "-m", "gpuinfer", "bench", "rollouts", "--env", "diplomacy", "--model", "tiny",
             "--cases", name, *flags, "--horizon", str(years), "--batch-size", str(SLOTS),
             "--repeats", str(1 if given.quick else given.repeats), "--json", str(report)],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        document = json.loads(report.read_text())
    first, second = document["comparison"]
    ends = second["ratio_ci95"]
    spread = f" ({ends[0]:.2f} to {ends[1]:.2f})" if ends else ""
    speeds = " | ".join(f"{one['name'].partition(': ')[2]}: {one['median']:,.0f} tokens/s" for one in (first, second))
    held = "" if second["ratio_to_first"] >= least else " MISSED"
    return f"| {name}, {years} years | {speeds} | {second['ratio_to_first']:.2f}{spread} | {least}{held} |"


if __name__ == "__main__":
    main()
