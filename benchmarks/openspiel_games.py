"""The same game searched both ways, in turns: OpenSpiel's own MCTS, and that of `--game openspiel:…` with its batches.

    python benchmarks/openspiel_games.py [--game connect_four] [--rounds 3] [--seconds 3]

Both search 100 simulations a move with a torch perceptron 128 wide (`blobnet-small`), on one thread of one process.
Counted are simulations a second of processor time, which others on the machine disturb less than a rate on the clock.
Ours is search and model, without the engine and the processes of a run: 640 games in lockstep, a block of leaves a
forward.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

SIMULATIONS = 100
SLOTS = 640
ROOT = Path(__file__).parent.parent


def ours(name: str, seconds: float) -> float:
    import torch
    from gpuinfer_openspiel import OpenSpiel

    from gpuinfer.models.networks import BlobNetSmall
    from gpuinfer.testing.reference_search import search_of
    from gpuinfer.workloads.selfplay import arrays
    from gpuinfer.workloads.selfplay.python_arena import PythonArena

    torch.set_num_threads(1)
    game = OpenSpiel(name=name)
    network = BlobNetSmall(game.features, game.actions, game.seats).eval()
    search = search_of(
        evaluator=arrays.NETWORK, determinizations=1, simulations=SIMULATIONS, noise=0.0, exploration=1.4, record=False
    )
    arena = PythonArena(game, search, SLOTS)
    arena.add_games(range(1_000_000))
    logits = values = None
    start, before = 0.0, 0
    for number in itertools.count():
        if number == 5:  # what is compiled is compiled
            start, before = time.process_time(), int(arena.counters[arrays.SIMULATIONS])
        elif number > 5 and time.process_time() - start > seconds:
            break
        rows = arena.play(logits, values)
        with torch.inference_mode():
            answers = network(torch.from_numpy(arena.features[:rows]))
        logits, values = (part.numpy() for part in answers)
        arena.collect()
    return (int(arena.counters[arrays.SIMULATIONS]) - before) / (time.process_time() - start)


def peer(name: str, seconds: float) -> float:
    import pyspiel
    import torch
    from open_spiel.python.algorithms import mcts

    from benchmarks.openspiel_mcts import Evaluator

    torch.set_num_threads(1)
    game = pyspiel.load_game(name)
    evaluator = Evaluator(game.observation_tensor_size(), game.num_distinct_actions())
    bot = mcts.MCTSBot(
        game,
        1.4,
        SIMULATIONS,
        evaluator,
        random_state=np.random.RandomState(0),
        child_selection_fn=mcts.SearchNode.puct_value,
    )
    state, moves = game.new_initial_state(), 0
    bot.step(state)
    start = time.process_time()
    while time.process_time() - start < seconds:
        if state.is_terminal():
            state = game.new_initial_state()
        state.apply_action(bot.step(state))
        moves += 1
    return moves * SIMULATIONS / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", default="connect_four")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--alone", choices=("ours", "peer"), help=argparse.SUPPRESS)  # in a process of its own
    arguments = parser.parse_args()
    if arguments.alone is not None:
        print({"ours": ours, "peer": peer}[arguments.alone](arguments.game, arguments.seconds))
        return
    paths = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    ratios = []
    for _ in range(arguments.rounds):
        rates = []
        for one in ("ours", "peer"):
            words = [sys.executable, __file__, f"--alone={one}", f"--game={arguments.game}"]
            words.append(f"--seconds={arguments.seconds}")
            done = subprocess.run(words, capture_output=True, text=True, check=True, env=paths)
            rates.append(float(done.stdout))
        ratios.append(rates[0] / rates[1])
        print(f"{rates[0]:,.0f} and {rates[1]:,.0f} simulations a second of processor time", flush=True)
    print(f"{arguments.game}: {statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})")


if __name__ == "__main__":
    main()
