"""A compiled game with a hidden card, whose guesses are sometimes the truth because they look at it."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuinfer.workloads.selfplay.bits import compiled, random_below
from gpuinfer.workloads.selfplay.game import Game

TURN, BET, OWN, OTHER = range(4)
CARDS = 3


class HighCard(Game):
    """Each of two players has one of three cards; the first bets or passes, and the higher card wins."""

    rules = __name__

    def __init__(self, setup: Any = None, /, **options: Any) -> None:
        super().__init__(setup, **options)
        self.seats, self.actions, self.max_legal, self.max_moves = 2, 2, 2, 1
        self.features, self.words = self.actions + CARDS, 4
        self.config = np.array([0], np.int64)  # of four guesses, how many are the truth


class Marked(HighCard):
    def __init__(self, setup: Any = None, /, **options: Any) -> None:
        super().__init__(setup, **options)
        self.config = np.array([3], np.int64)


@compiled
def deal(config, state, stream):
    state[TURN], state[BET] = 0, 0
    state[OWN] = random_below(stream, CARDS)
    state[OTHER] = (state[OWN] + 1 + random_below(stream, CARDS - 1)) % CARDS


@compiled
def to_move(config, state):
    return state[TURN]


@compiled
def legal(config, state, actions):
    actions[0], actions[1] = 0, 1
    return 2


@compiled
def apply(config, state, action):
    state[TURN], state[BET] = -1, action


@compiled
def returns(config, state, values):
    won = 1.0 if state[OWN] > state[OTHER] else -1.0
    values[0] = won if state[BET] else 0.0
    values[1] = -values[0]


@compiled
def observe(config, state, actions, count, row):
    row[0], row[1] = 1, 1
    row[2 + state[OWN]] = 1


@compiled
def determinize(config, state, samples, stream, integers, floats):
    for n in range(samples.shape[0]):
        for i in range(state.shape[0]):
            samples[n, i] = state[i]
        if random_below(stream, 4) >= config[0]:
            samples[n, OTHER] = (state[OWN] + 1 + random_below(stream, CARDS - 1)) % CARDS
