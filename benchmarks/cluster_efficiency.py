"""Self-play over 1, 2 and 4 nodes of a SLURM on this host, each held to the same share of a core: how much of n nodes'
work is left of n times the work of one.

    python benchmarks/cluster_efficiency.py
    python benchmarks/cluster_efficiency.py --model blobnet-small --games 2000 --rounds 3

Rounds alternate. `efficiency` counts games by the second of a node, from when it is ready to play until the run ends,
also while it waits for work or for the others, against those of a single node; `with start` counts the whole command,
the start of Python on each node included; `separate` are n runs beside one another that know nothing of each other,
held to the same shares: what the host itself costs. Needs a host with little else to do, root, control groups,
slurm-wlm and munge.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from system import slurm_here
from system.control_group import control_groups

GPUINFER = (sys.executable, "-m", "gpuinfer", "selfplay", "--game", "blob", "--workers", "1", "--no-live", "--quiet")
LIMIT_S = 3600.0


@dataclass(frozen=True)
class Rates:
    """Games a second: of a node that is ready, on average, and of all from the command's start to its end."""

    of_node: float
    whole: float


class Contest:
    def __init__(self, model: str, games: int, simulations: int, cores: float, folder: Path) -> None:
        self._words = [*GPUINFER, "--model", model, "--simulations", str(simulations)]
        self._games, self._cores, self._folder = games, cores, folder

    def divided(self, nodes: int) -> Rates:
        """One run over so many nodes."""
        where = Path(tempfile.mkdtemp(dir=self._folder))
        report = where / "report.json"
        words = ["--games", str(self._games), "--out", str(where / "games"), "--json", str(report)]
        words += ["--launcher", "slurm", "-L", f"nodes={nodes}", "-L", "cpus=1", "-L", f"folder={where / 'shared'}"]
        began = time.monotonic()
        subprocess.run([*self._words, *words], check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
        took = time.monotonic() - began
        cluster = json.loads(report.read_text())["cluster"]
        ready_s = cluster["wall_s"] * nodes * (1 - cluster["time"]["starting"])
        return Rates(self._games / ready_s, self._games / took)

    def separate(self, runs: int) -> Rates:
        """So many runs of as many games each as a node of `divided` plays."""
        where, games = Path(tempfile.mkdtemp(dir=self._folder)), self._games // runs
        began = time.monotonic()
        with control_groups([f"run{number}" for number in range(runs)], self._cores) as groups:
            started = []
            for name, group in groups.items():
                words = ["--games", str(games), "--out", str(where / name), "--json", str(where / f"{name}.json")]
                started.append(group.start(*self._words, *words, stdout=subprocess.DEVNULL))
            for process in started:
                if process.wait(LIMIT_S):
                    raise SystemExit(f"a run ended with {process.returncode}")
        took = time.monotonic() - began
        reports = [json.loads((where / f"{name}.json").read_text()) for name in groups]
        each = sum(one["throughput"]["games_per_min"] for one in reports) / 60 / runs
        return Rates(each, self._games / took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="uniform")
    parser.add_argument("--games", type=int, default=20_000)
    parser.add_argument("--simulations", type=int, default=30)
    parser.add_argument("--nodes", default="1,2,4")
    parser.add_argument("--cores", type=float, default=0.35, help="of each node")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    counts = [int(one) for one in given.nodes.split(",")]
    found: dict[tuple[str, int], list[Rates]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="cluster-efficiency-") as temporary:
        contest = Contest(given.model, given.games, given.simulations, given.cores, Path(temporary))
        with slurm_here.running(max(counts), given.cores) as slurm:
            for number in range(given.rounds):
                for count in counts if number % 2 == 0 else counts[::-1]:
                    slurm.wait(lambda: not slurm.jobs())
                    found["nodes", count].append(contest.divided(count))
                    found["separate", count].append(contest.separate(count))
                    print(f"round {number + 1}, {count} nodes: {found['nodes', count][-1]}", flush=True)
    print(table(counts, found))


def table(counts: Sequence[int], found: dict[tuple[str, int], list[Rates]]) -> str:
    """Medians over the rounds of ratios within a round."""
    first = counts[0]

    def against_one(kind: str, count: int, of: Callable[[Rates], float]) -> float:
        pairs = zip(found[kind, count], found[kind, first], strict=True)
        return statistics.median(of(one) / of(base) for one, base in pairs)

    lines = [f"{'nodes':>5} {'games/s':>9} {'efficiency':>11} {'with start':>11} {'separate':>9}"]
    for count in counts:
        rate = statistics.median(one.whole for one in found["nodes", count])
        ready = against_one("nodes", count, lambda one: one.of_node)
        whole = against_one("nodes", count, lambda one: one.whole) * first / count
        separate = against_one("separate", count, lambda one: one.of_node)
        lines.append(f"{count:>5} {rate:>9.1f} {ready:>11.3f} {whole:>11.3f} {separate:>9.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
