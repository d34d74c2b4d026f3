"""The peer: OpenSpiel's Python MCTS, a torch perceptron 128 wide, Connect Four, 100 simulations a move, one process."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import pyspiel
import torch
from open_spiel.python.algorithms import mcts
from torch import nn

SIMULATIONS = 100


class Evaluator(mcts.Evaluator):  # type: ignore[misc]
    """One position a call, as its interface has it."""

    def __init__(self, inputs: int, actions: int) -> None:
        self._network = nn.Sequential(
            nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, actions + 1)
        )

    def _answer(self, state: Any) -> np.ndarray:
        with torch.inference_mode():
            return self._network(torch.tensor(state.observation_tensor()).unsqueeze(0))[0].numpy()

    def evaluate(self, state: Any) -> np.ndarray:
        value = np.tanh(self._answer(state)[-1])
        return np.array([value, -value])

    def prior(self, state: Any) -> list[tuple[int, float]]:
        actions = state.legal_actions()
        weights = np.exp(self._answer(state)[actions])
        return list(zip(actions, weights / weights.sum(), strict=True))


def main(seconds: float) -> None:
    """Play for so long; print simulations per second."""
    torch.set_num_threads(1)
    game = pyspiel.load_game("connect_four")
    bot = mcts.MCTSBot(
        game,
        1.4,
        SIMULATIONS,
        Evaluator(game.observation_tensor_size(), game.num_distinct_actions()),
        random_state=np.random.RandomState(0),
        child_selection_fn=mcts.SearchNode.puct_value,
    )
    start, moves = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        state = game.new_initial_state()
        while not state.is_terminal():
            state.apply_action(bot.step(state))
            moves += 1
    print(moves * SIMULATIONS / (time.perf_counter() - start))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 20.0)
