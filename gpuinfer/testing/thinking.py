"""The compiled search asked about one position at a time, and a model whose answers never tie."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from gpuinfer.workloads.selfplay import arrays, bits, kernels
from gpuinfer.workloads.selfplay.arena import Arena
from gpuinfer.workloads.selfplay.game import Game

Model = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""From features [rows, features] to policy logits float32 [rows, actions] and values float32 [rows, seats]."""

load: Callable[[str], ModuleType] = cache(kernels.load)


def search_of(**changed: Any) -> arrays.Search:
    """Two determinizations of eight simulations with rollouts, the moves drawn, all recorded; but for `changed`."""
    usual = {
        "determinizations": 2,
        "simulations": 8,
        "seed": 11,
        "evaluator": arrays.ROLLOUT,
        "exploration": 1.5,
        "noise": 0.25,
        "concentration": 10.0,
        "temperature": 1.0,
        "temperature_moves": 8,
        "record": True,
    }
    return arrays.Search(**{**usual, **changed})


def random_linear(game: Game, seed: int = 0) -> Model:
    """One matrix, drawn at random."""
    weights = np.random.default_rng(seed).normal(size=(game.features, game.actions + game.seats)).astype(np.float32)

    def answer(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # one row at a time: the same bits whatever the block
        answers = np.stack([np.tanh(row.astype(np.float32) @ weights * 0.1) for row in features])
        return np.ascontiguousarray(answers[:, : game.actions]), np.ascontiguousarray(answers[:, game.actions :])

    return answer


class Thinker:
    """A search with one slot. Nothing is added to the priors of the root, unless `noise` says so."""

    def __init__(self, game: Game, **changed: Any) -> None:
        self.kernels = load(game.rules)
        self.arena = Arena(game, self.kernels, search_of(**{"noise": 0.0, **changed}), 1)
        self._asked = 0

    @property
    def roots(self) -> np.ndarray:
        """The full positions that the trees search, int64 [determinizations, words]."""
        return self.arena._trees.root

    def begin(self, state: np.ndarray) -> None:
        """Put `state`, where there is a choice, into the only slot; its trees are ready but empty."""
        arena, games = self.arena, self.arena._games
        self._asked += 1
        games.game[0], games.moves[0], games.records[0] = self._asked, 0, 0
        games.state[0] = state
        bits.seed_stream(games.stream[0], arena.search.seed, self._asked)
        self.kernels.begin_search(
            arena.game.config, arena.search, games, arena._trees, arena._scratch, arena._work, np.int64(0)
        )

    def finish(self, model: Model | None = None) -> np.ndarray:
        """The visits of all trees together as shares, float32 [actions]."""
        arena, games = self.arena, self.arena._games
        logits = values = None
        while not games.records[0]:
            rows = arena.play(logits, values, rounds=1 if model else arena.search.simulations)
            logits, values = model(arena.features[:rows].copy()) if model and rows else (None, None)
        games.game[0], arena._trees.row[:] = arrays.IDLE, -1
        arena.collect()
        policy: np.ndarray = games.policy[0, 0].copy()
        return policy

    def think(self, state: np.ndarray, model: Model | None = None) -> np.ndarray:
        self.begin(state)
        return self.finish(model)
