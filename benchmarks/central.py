"""The central server against its targets: each figure beside its peer in the same run, rounds interleaved, medians.

    python benchmarks/central.py [--quick] [--case NAME …] [--rounds N] [--seconds S] [--out FILE.md]

`--quick` looks at everything once and briefly; its figures say only that everything works. Cases:

blobnet, blobnet-small   self-play, two workers: central, and several inprocess settings (`central_selfplay.py`)
clients                  32 client processes: blocks, single rows, and the pickled queues (`central_clients.py`)
trip                     the round trip of one block (`central_trip.py`)
idle, start              a server that nobody asks; a worker process's start (`central_rest.py`)
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import central_clients
import central_rest
import central_trip
from central_selfplay import Contest

RATIO = "÷ best inprocess"

Figures = dict[str, list[float]]
"""Name of a figure → what it was in each round."""


@dataclass(frozen=True)
class Target:
    """One line of the table: a figure of a case, and what it should be."""

    case: str
    figure: str
    words: str
    least: float = -math.inf
    most: float = math.inf

    @property
    def wanted(self) -> str:
        return f"≥ {self.least:g}" if self.least > -math.inf else f"≤ {self.most:g}"

    def met(self, value: float) -> bool:
        return self.least <= value <= self.most


TARGETS = [
    Target("blobnet", "efficiency", "`blobnet` fp32, central, 2 workers ÷ roofline", least=0.93),
    Target("blobnet", RATIO, "`blobnet` fp32, central ÷ best inprocess", least=0.95),
    Target("blobnet", "mean batch", "`blobnet`, mean batch, rows", least=1000),
    Target("blobnet-small", RATIO, "`blobnet-small`, central ÷ best inprocess", least=0.80),
    Target("blobnet-small", "mean batch", "`blobnet-small`, mean batch, rows", least=1000),
    Target("clients", "blocks ÷ queue", "32 clients with blocks ÷ the queue design", least=10),
    Target("clients", "rows a batch × forwards", "32 clients, a row each: mean batch × forwards", least=28),
    Target("clients", "by a timer", "the same: batches cut by a timer", most=0),
    Target("clients", "rows ÷ queue", "the same ÷ the queue design", least=3),
    Target("trip", "block ÷ notification", "round trip of a block, p50 ÷ bare notification", most=2),
    Target("trip", "block ÷ pickled", "the same ÷ `multiprocessing.Queue`", most=0.12),
    Target("idle", "idle", "idle server, 8 idle clients: share of a core", most=0.01),
    Target("start", "client start s", "start of a client process to its first answer, s", most=1.5),
    Target("start", "worker start s", "start of a self-play worker until it is ready, s", most=1.5),
    Target("start", "with torch", "either has loaded torch", most=0),
]


@dataclass(frozen=True)
class Pace:
    """Seconds that one measurement of each kind takes."""

    run: float  # of self-play
    crew: float  # of client processes
    trip: float
    idle: float


LONG, QUICK = Pace(25.0, 8.0, 8.0, 10.0), Pace(3.0, 1.5, 1.5, 2.0)


def cases(pace: Pace, contests: dict[str, Contest]) -> dict[str, Callable[[], dict[str, float]]]:
    """One round of each case."""
    return {
        **{name: lambda contest=contest: contest.once(pace.run) for name, contest in contests.items()},
        "clients": lambda: central_clients.once(pace.crew),
        "trip": lambda: central_trip.once(pace.trip),
        "idle": lambda: central_rest.idle(pace.idle),
        "start": lambda: central_rest.start(0.0),
    }


def measure(chosen: list[str], pace: Pace, rounds: int) -> dict[str, Figures]:
    """Every case's figures, round by round."""
    contests = {name: Contest(name) for name in ("blobnet", "blobnet-small")}
    found: dict[str, Figures] = {name: {} for name in chosen}
    for number in range(rounds):
        for name in chosen:
            for figure, value in cases(pace, contests)[name]().items():
                found[name].setdefault(figure, []).append(value)
            print(f"round {number + 1}, {name}: {told(found[name])}", file=sys.stderr, flush=True)
    for name in set(chosen) & set(contests):
        found[name][RATIO] = contests[name].ratios()
        print(f"{name}: the best inprocess setting is {contests[name].best()}", file=sys.stderr)
    return found


def told(figures: Figures) -> str:
    return ", ".join(f"{name} {values[-1]:,.4g}" for name, values in figures.items())


def table(found: dict[str, Figures]) -> str:
    lines = ["| case | target | median | lowest | highest | rounds | |", "|---|---|---|---|---|---|---|"]
    for target in TARGETS:
        if target.case in found:
            values = found[target.case][target.figure]
            median = statistics.median(values)
            shown = " | ".join(f"{value:,.4g}" for value in (median, min(values), max(values)))
            verdict = "met" if target.met(median) else "**not met**"
            lines.append(f"| {target.words} | {target.wanted} | {shown} | {len(values)} | {verdict} |")
    return "\n".join(lines)


def others(found: dict[str, Figures]) -> str:
    """The medians that no target is set for: what the ratios are made of."""
    aimed = {(target.case, target.figure) for target in TARGETS}
    lines = ["| case | figure | median |", "|---|---|---|"]
    for case, figures in found.items():
        for figure, values in figures.items():
            if (case, figure) not in aimed:
                lines.append(f"| {case} | {figure} | {statistics.median(values):,.4g} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(target.case for target in TARGETS))
    parser.add_argument("--case", action="append", choices=names, help="only this one; repeatable")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=None, help="default 5, and 1 with --quick")
    parser.add_argument("--seconds", type=float, default=LONG.run, help="of one run of self-play")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    pace = QUICK if given.quick else Pace(given.seconds, LONG.crew, LONG.trip, LONG.idle)
    found = measure(given.case or names, pace, given.rounds or (1 if given.quick else 5))
    text = f"{table(found)}\n\n{others(found)}\n"
    print(text)
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
