"""The same games both ways, in turns: OpenSpiel's own MCTS, and `gpuinfer selfplay --game openspiel:…`.

    python benchmarks/openspiel_games.py [--game connect_four] [--rounds 3] [--games 400] [--seconds 20]

Both search 100 simulations a move with a torch perceptron 128 wide (`blobnet-small`), and play all
of the game so. Counted is the processor time that a game takes, which others on the machine disturb less than its
duration: of ours the difference between a run of so many games and one of a quarter of them, so that starting
drops out; of the peer so many seconds of play.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

SIMULATIONS = 100
IN_FLIGHT = 128
ROOT = Path(__file__).parent.parent


def ours(game: str, games: int) -> float:
    """Games a minute of processor time."""
    few = games // 4
    return 60 * (games - few) / (_taken(game, games) - _taken(game, few))


def _taken(game: str, games: int) -> float:
    """Seconds of processor time of a run and its worker."""
    command = [sys.executable, "-m", "gpuinfer", "selfplay", f"--game=openspiel:{game}", "--model=blobnet-small"]
    command += [f"--games={games}", f"--simulations={SIMULATIONS}", f"--games-in-flight={IN_FLIGHT}", "--workers=2"]
    command += ["--noise=0", "--quiet", "--no-roofline", "--no-trial", "--json=-"]
    before = _children()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, cwd=ROOT)
    return _children() - before


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def peer(name: str, seconds: float) -> float:
    """Games a minute of processor time, in this process. The last one counts as far as its moves go in the mean."""
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
    start, lengths, moves = time.process_time(), [], 0
    while time.process_time() - start < seconds or not lengths:
        state, moves = game.new_initial_state(), 0
        while not state.is_terminal() and (time.process_time() - start < seconds or not lengths):
            state.apply_action(bot.step(state))
            moves += 1
        if state.is_terminal():
            lengths.append(moves)
            moves = 0
    finished = len(lengths) + moves / statistics.mean(lengths)
    return 60 * finished / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", default="connect_four")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--games", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)  # in a process of its own
    arguments = parser.parse_args()
    if arguments.peer:
        print(peer(arguments.game, arguments.seconds))
        return
    found: list[tuple[float, float]] = []
    for _ in range(arguments.rounds):
        words = [sys.executable, __file__, "--peer", f"--game={arguments.game}", f"--seconds={arguments.seconds}"]
        paths = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=paths)
        found.append((ours(arguments.game, arguments.games), float(done.stdout)))
        print(f"{found[-1][0]:,.1f} ÷ {found[-1][1]:,.2f} games a minute of processor time", flush=True)
    ratios = sorted(one / other for one, other in found)
    print(f"{arguments.game}: {statistics.median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f})")


if __name__ == "__main__":
    main()
