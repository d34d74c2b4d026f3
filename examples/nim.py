"""A game of your own, whole: Nim. Three heaps; take as many as you like from one; who takes the last one wins.

    cd examples && gpuinfer selfplay --game nim:Nim --game-options largest=5 --model rollout --games 1000

The game class and its compiled rules may share a module, as here: `rules` names it. What each function must do is said
in `gpuinfer.workloads.selfplay.game`.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from gpuinfer.api import Options, Setup
from gpuinfer.workloads.selfplay.bits import compiled, random_below
from gpuinfer.workloads.selfplay.game import Game

HEAPS = 3
TURN, HEAP = 0, 1  # a position: whose turn, or -1; then the heaps; then who took last
LAST = HEAP + HEAPS


class Nim(Game):
    """Two players, three heaps of 1 to `largest` each. Returns are 1 and -1."""

    class Options(Options):
        largest: int = Field(7, ge=2, le=20, description="a heap holds no more than this at first")

    rules: ClassVar[str] = __name__
    hidden: ClassVar[bool] = False
    won_or_lost: ClassVar[bool] = True
    options: Options

    def __init__(self, setup: Setup | None = None, /, **options: object) -> None:
        super().__init__(setup, **options)
        largest = self.options.largest
        self.seats = 2
        self.actions = HEAPS * largest  # action: heap × largest + taken - 1
        self.max_legal = self.actions
        self.max_moves = HEAPS * largest
        self.features = self.actions + HEAPS
        self.words = LAST + 1
        self.config = np.array([largest], np.int64)

    def show(self, position: np.ndarray, seat: int) -> str:
        """For `gpuinfer play`."""
        return "\n".join(f"heap {heap + 1}: {'|' * int(position[HEAP + heap])}" for heap in range(HEAPS))

    def action_name(self, position: np.ndarray, action: int) -> str:
        """As 2:3, to take three of heap 2."""
        heap, taken = divmod(action, self.options.largest)
        return f"{heap + 1}:{taken + 1}"


@compiled
def deal(config, state, stream):
    state[TURN] = 0
    state[LAST] = -1
    for heap in range(HEAPS):
        state[HEAP + heap] = 1 + random_below(stream, config[0])


@compiled
def to_move(config, state):
    return state[TURN]


@compiled
def legal(config, state, actions):
    count = 0
    for heap in range(HEAPS):
        for taken in range(state[HEAP + heap]):
            actions[count] = heap * config[0] + taken
            count += 1
    return count


@compiled
def apply(config, state, action):
    state[LAST] = state[TURN]
    state[HEAP + action // config[0]] -= action % config[0] + 1
    left = 0
    for heap in range(HEAPS):
        left += state[HEAP + heap]
    state[TURN] = 1 - state[TURN] if left else -1


@compiled
def returns(config, state, values):
    values[state[LAST]] = 1.0
    values[1 - state[LAST]] = -1.0


@compiled
def observe(config, state, actions, count, row):
    for k in range(count):
        row[actions[k]] = 1
    for heap in range(HEAPS):
        row[HEAPS * config[0] + heap] = state[HEAP + heap]


@compiled
def determinize(config, state, samples, stream, integers, floats):
    """Nothing is hidden: every sample is the position itself."""
    for n in range(samples.shape[0]):
        for i in range(state.shape[0]):
            samples[n, i] = state[i]
