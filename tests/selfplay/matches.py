"""Whole searches in this process, without engine and model: arenas, and players who meet in one game."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from gpuinfer.workloads.selfplay import arrays, bits, kernels
from gpuinfer.workloads.selfplay.arena import Arena
from gpuinfer.workloads.selfplay.game import Game

Model = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
FIELDS = ("observation", "legal", "policy", "value", "player", "game", "move")

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


def arena_of(game: Game, slots: int, **changed: Any) -> Arena:
    return Arena(game, load(game.rules), search_of(**changed), slots)


def played(arena: Arena, ids: Sequence[int], model: Model | None = None, rounds: int = 1) -> dict[str, np.ndarray]:
    """What all these games leave behind, in the order of their numbers. `model` answers a block of features."""
    parts, answers = [], ()
    arena.add_games(ids)
    for _ in range(1_000_000):
        rows = arena.play(*answers, rounds=rounds)
        if (part := arena.collect()) is not None:
            parts.append(part)
        if not rows and not arena.busy and not arena.queued:
            return in_order(parts)
        answers = model(arena.features[:rows].copy()) if model is not None and rows else ()
    raise AssertionError(f"games {ids[:3]}… do not end")


def in_order(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    rows, games = np.lexsort((whole["move"], whole["game"])), np.argsort(whole["finished"])
    return {name: array[rows if name in FIELDS else games] for name, array in whole.items()}


def same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def random_linear(game: Game, seed: int = 0) -> Model:
    """A model whose answers differ from position to position: one matrix, drawn at random."""
    weights = np.random.default_rng(seed).normal(size=(game.features, game.actions + game.seats)).astype(np.float32)

    def answer(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # one row at a time: the same bits whatever the block
        answers = np.stack([np.tanh(row.astype(np.float32) @ weights * 0.1) for row in features])
        return np.ascontiguousarray(answers[:, : game.actions]), np.ascontiguousarray(answers[:, game.actions :])

    return answer


class Thinker:
    """The search asked about one position at a time."""

    def __init__(self, game: Game, **changed: Any) -> None:
        self.arena = arena_of(game, 1, **{"noise": 0.0, **changed})
        self.kernels = load(game.rules)
        self._asked = 0

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
        answers: tuple[np.ndarray, ...] = ()
        while not games.records[0]:
            rows = arena.play(*answers, rounds=1 if model else arena.search.simulations)
            answers = model(arena.features[:rows].copy()) if model and rows else ()
        games.game[0], arena._trees.row[:] = arrays.IDLE, -1
        arena.collect()
        return games.policy[0, 0].copy()

    def think(self, state: np.ndarray, model: Model | None = None) -> np.ndarray:
        self.begin(state)
        return self.finish(model)
