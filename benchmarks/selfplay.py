"""Self-play against its targets: medians of several runs, interleaved case by case, each with the roofline of its own.

usage: python benchmarks/selfplay.py [--cases uniform,blobnet,…] [--runs 3] [--seconds 60] [--out FILE.md]

A run is `gpuinfer selfplay` in a process of its own, so that start-up, tail and all are as a user has them; the rates
are over the report's wall_s, tail included. `openspiel` runs the peer: OpenSpiel's own Python MCTS with a torch network
of the same size, Connect Four, 100 simulations a move (needs the package open_spiel).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GAME = ["--players", "4", "--cards", "5", "--determinizations", "3", "--simulations", "30"]
CONNECT_FOUR = ["--game", "connect-four", "--simulations", "100", "--noise", "0"]


@dataclass(frozen=True)
class Case:
    """What to run, which figure of the report counts, and the least it should be."""

    flags: list[str]
    measure: str  # a throughput, or "efficiency"
    target: float
    games_per_s: float  # a first guess, for the number of games that fills the time


CASES = {
    "uniform": Case([*GAME, "--model", "uniform", "--workers", "2"], "simulations_per_s", 4e6, 8000),
    "blobnet fp32": Case([*GAME, "--model", "blobnet"], "efficiency", 0.95, 15),
    "blobnet fp32 rate": Case([*GAME, "--model", "blobnet"], "games_per_min", 500, 15),
    "blobnet bf16": Case([*GAME, "--model", "blobnet", "--dtype", "bfloat16"], "efficiency", 0.90, 40),
    "blobnet bf16 rate": Case([*GAME, "--model", "blobnet", "--dtype", "bfloat16"], "games_per_min", 1200, 40),
    "blobnet-small": Case([*GAME, "--model", "blobnet-small"], "games_per_min", 15_000, 800),
    "connect-four": Case([*CONNECT_FOUR, "--model", "blobnet-small"], "simulations_per_s", math.nan, 100),
}
OPENSPIEL = "openspiel"


def run(case: Case, games: int) -> dict[str, Any]:
    """One run's report."""
    command = [
        sys.executable,
        "-m",
        "gpuinfer",
        "selfplay",
        *case.flags,
        "--games",
        str(games),
        "--json",
        "-",
        "--quiet",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def value(case: Case, report: dict[str, Any]) -> float:
    if case.measure == "efficiency":
        return float(report["roofline"]["efficiency"])
    return float(report["throughput"][case.measure])


def openspiel(seconds: float) -> float:
    """Simulations per second of the peer, one process, as its users run it."""
    code = f"from benchmarks.openspiel_mcts import main; main({seconds})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def games_for(case: Case, seconds: float) -> int:
    """As many games as take about so long here, from a short run."""
    report = run(case, max(20, int(case.games_per_s * min(10.0, seconds))))
    return max(20, math.ceil(report["throughput"]["games_per_min"] / 60 * seconds * 1.1))


def table(results: dict[str, list[float]], seconds: dict[str, list[float]]) -> str:
    lines = [
        "| case | measure | target | median | lowest | highest | runs | seconds a run |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, values in results.items():
        case = CASES.get(name)
        measure, target = (case.measure, case.target) if case else ("simulations_per_s", math.nan)
        shown = "" if math.isnan(target) else f"{target:,.6g}"
        figures = " | ".join(f"{x:,.3f}" if measure == "efficiency" else f"{x:,.0f}" for x in spread(values))
        span = f"{min(seconds[name]):.0f} to {max(seconds[name]):.0f}"
        lines.append(f"| {name} | {measure} | {shown} | {figures} | {len(values)} | {span} |")
    if OPENSPIEL in results and "connect-four" in results:
        ratios = [ours / peer for ours, peer in zip(results["connect-four"], results[OPENSPIEL], strict=True)]
        figures = " | ".join(f"{x:,.0f}" for x in spread(ratios))
        lines.append(f"| connect-four ÷ openspiel | ratio, run by run | 50 | {figures} | {len(ratios)} | |")
    return "\n".join(lines)


def spread(values: list[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join([*CASES, OPENSPIEL]))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    names = arguments.cases.split(",")
    games: dict[tuple[str, ...], int] = {}
    results: dict[str, list[float]] = {name: [] for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(arguments.runs):
        reports: dict[tuple[str, ...], dict[str, Any]] = {}  # cases that differ in what they measure share a run
        for name in names:
            if name == OPENSPIEL:
                start = time.monotonic()
                results[name].append(openspiel(arguments.seconds))
                seconds[name].append(time.monotonic() - start)
            else:
                case = CASES[name]
                key = tuple(case.flags)
                if key not in games:
                    games[key] = games_for(case, arguments.seconds)
                if key not in reports:
                    reports[key] = run(case, games[key])
                results[name].append(value(case, reports[key]))
                seconds[name].append(reports[key]["wall_s"])
            print(f"{name}: {results[name][-1]:,.6g}", file=sys.stderr, flush=True)
    text = table(results, seconds)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
