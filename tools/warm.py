"""Compiles the search of a game while torch is loaded for the first time, which takes another core as long.

    .venv/bin/python -m tools.warm

Both are kept: machine code in the user's cache, the modules' code beside them.
"""

from __future__ import annotations

import subprocess
import sys

from gpuinfer.workloads.selfplay import arrays, games, kernels
from gpuinfer.workloads.selfplay.arena import Arena

LIMIT_S = 600.0
SEARCH = arrays.Search(
    determinizations=1,
    simulations=1,
    seed=0,
    evaluator=arrays.NETWORK,
    exploration=1.0,
    noise=0.0,
    concentration=1.0,
    temperature=1.0,
    temperature_moves=0,
    record=False,
)


def compile_search(name: str) -> None:
    """Of a game of ours, as a run would at its start; what is there already is read, while torch is loaded."""
    game = games.build_game(name, {})
    Arena(game, kernels.load_search(game.rules), SEARCH, slots=1).play()  # no games are queued


def main() -> None:
    torch = subprocess.Popen([sys.executable, "-c", "import torch"])
    try:
        print("compiling the search kernels, and loading torch (first run)", flush=True)
        compile_search("blob")
        torch.wait(LIMIT_S)
    finally:
        torch.kill()


if __name__ == "__main__":
    main()
