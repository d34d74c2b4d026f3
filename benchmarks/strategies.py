"""What the strategies reach, on the real engine: against fixed settings, through changes, under overload.

    python benchmarks/strategies.py [--only CASE[,CASE]] [--seconds S] [--json FILE]

Cases: open, step, drift, infeasible, closed, priority, reality, engine. Every case runs the same seeds for all that it
compares. "stand-in" is a backend that takes the time a service model says; "blobnet" the network on the CPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import strategies_cases as cases
from strategies_cases import Row

CASES: dict[str, Callable[[float], Iterator[Row]]] = {
    "open": cases.open_loop,
    "step": cases.step_in_load,
    "drift": cases.drift,
    "infeasible": cases.infeasible,
    "closed": cases.closed_loop,
    "priority": cases.priority,
    "reality": cases.reality,
    "engine": cases.engine,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help="cases, separated by commas")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each run")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[Row] = []
    for name in arguments.only.split(","):
        for row in CASES[name](arguments.seconds):
            print(f"{'ok  ' if row.ok else 'MISS'} {row.case:34} {row.text}", flush=True)
            rows.append(row)
    if arguments.json:
        arguments.json.write_text(json.dumps([row._asdict() for row in rows], indent=1))
    missed = sum(not row.ok for row in rows)
    print(f"{len(rows) - missed} of {len(rows)} kept")


if __name__ == "__main__":
    main()
