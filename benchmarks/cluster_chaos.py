"""Self-play over the nodes of a real SLURM and a real Ray on this host, while nodes, machines, slurmd, raylets and
the coordinator are killed at seeded random times; a coordinator that was killed is resumed.

    python benchmarks/cluster_chaos.py --rounds 20
    python benchmarks/cluster_chaos.py --launchers slurm --seed 7 --rounds 1

A round holds when the folder has the bytes of a run on one machine and no process is left. Exits with 1 when one does
not. Needs root, control groups, slurm-wlm and munge, and Ray.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from system.cluster_chaos import Player, placed, play_alone


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="in all, divided over the launchers")
    parser.add_argument("--launchers", default="slurm,ray")
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    parser.add_argument("--games", type=int, default=400)
    parser.add_argument("--simulations", type=int, default=1000)
    parser.add_argument("--cores", type=float, default=0.5, help="of each machine")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="cluster-chaos-"))
    failed = played = 0
    expected = play_alone(given.games, given.simulations, folder / "alone")
    names = given.launchers.split(",")
    for place_number, launcher in enumerate(names):
        with placed(launcher, folder, given.cores) as place:
            for number in range(place_number, given.rounds, len(names)):
                player = Player(place, folder, given.games, given.simulations, given.seed + number)
                outcome = player.play(expected)
                played += 1
                failed += bool(outcome.failure)
                print(f"{launcher}, {outcome.told()}", flush=True)
    print(f"{played} rounds, {failed} failed")
    if failed:
        print(f"what they left is in {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
