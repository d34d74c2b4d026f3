"""References for a game's search: a position played by hand through the compiled rules, the search once more in plain
Python, and the compiled search asked about one position at a time, with a model whose answers never tie.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from gpuinfer.workloads.selfplay import arrays, bits, kernels
from gpuinfer.workloads.selfplay.arena import Arena
from gpuinfer.workloads.selfplay.game import Game


class ReferenceTable:
    """Deals at once; the same `seed` and `number` give the same deal as the search's game of that number."""

    def __init__(self, game: Game, seed: int = 0, number: int = 0) -> None:
        self.game = game
        self.rules = importlib.import_module(game.rules)
        self.state = np.zeros(game.words, np.int64)
        self.stream = np.zeros(2, np.uint64)
        self._actions = np.zeros(game.max_legal, np.int16)
        self._scratch = np.zeros(game.scratch[0], np.int64), np.zeros(game.scratch[1], np.float64)
        bits.seed_stream(self.stream, seed, number)
        self.rules.deal(game.config, self.state, self.stream)

    @property
    def mover(self) -> int:
        return int(self.rules.to_move(self.game.config, self.state))

    @property
    def over(self) -> bool:
        return self.mover < 0

    def legal(self) -> list[int]:
        count = self.rules.legal(self.game.config, self.state, self._actions)
        legal: list[int] = self._actions[:count].tolist()
        return legal

    def play(self, *actions: int) -> None:
        for action in actions:
            self.rules.apply(self.game.config, self.state, np.int16(action))

    def returns(self) -> list[float]:
        values = np.zeros(self.game.seats, np.float32)
        self.rules.returns(self.game.config, self.state, values)
        returns: list[float] = values.tolist()
        return returns

    def observe(self) -> np.ndarray:
        """What the player to move sees, [features]."""
        row = np.zeros(self.game.features, self.game.feature_dtype)
        count = self.rules.legal(self.game.config, self.state, self._actions)
        self.rules.observe(self.game.config, self.state, self._actions, count, row)
        return row

    def guesses(self, count: int) -> np.ndarray:
        """Positions that the player to move thinks possible, int64 [count, words]."""
        samples = np.zeros((count, self.game.words), np.int64)
        self.rules.determinize(self.game.config, self.state, samples, self.stream, *self._scratch)
        return samples


Model = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""From features [rows, features] to policy logits float32 [rows, actions] and values float32 [rows, seats]."""

load: Callable[[str], ModuleType] = cache(kernels.load_search)


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
        self._searches = 0

    @property
    def roots(self) -> np.ndarray:
        """The full positions that the trees search, int64 [determinizations, words]."""
        return self.arena._trees.root

    def begin(self, state: np.ndarray) -> None:
        """Put `state`, where there is a choice, into the only slot; its trees are ready but empty."""
        arena, games = self.arena, self.arena._games
        self._searches += 1
        games.game[0], games.moves[0], games.records[0] = self._searches, 0, 0
        games.state[0] = state
        bits.seed_stream(games.stream[0], arena.search.seed, self._searches)
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


@dataclass
class ReferenceNode:
    state: np.ndarray
    mover: int
    actions: list[int]
    priors: np.ndarray
    values: np.ndarray  # by seat, as the model sees the position
    visits: list[int] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)  # of the mover's value, over each action's visits
    children: dict[int, ReferenceNode] = field(default_factory=dict)


class ReferenceTree:
    """PUCT from `root`, int64 [words], with `model` for every leaf."""

    def __init__(self, game: Game, root: np.ndarray, model: Model, exploration: float) -> None:
        self._table, self._model, self._exploration = ReferenceTable(game), model, exploration
        self._table.state[:] = root
        self.root = self._expand()

    def visits(self, simulations: int) -> dict[int, int]:
        for _ in range(simulations - 1):  # the root itself was the first
            self._simulate(self.root)
        return dict(zip(self.root.actions, self.root.visits, strict=True))

    def _expand(self) -> ReferenceNode:
        table = self._table
        actions, mover, seats = table.legal(), table.mover, table.game.seats
        logits, values = self._model(table.observe()[None])
        weights = np.exp(logits[0, actions].astype(float))
        by_seat = np.array([values[0, (seat - mover) % seats] for seat in range(seats)], float)
        count = len(actions)
        return ReferenceNode(
            table.state.copy(), mover, actions, weights / weights.sum(), by_seat, [0] * count, [0.0] * count
        )

    def _simulate(self, node: ReferenceNode) -> np.ndarray:
        total = 1 + sum(node.visits)
        mean = (node.values[node.mover] + sum(node.sums)) / total

        def score(k: int) -> float:
            visits = node.visits[k]
            quality = node.sums[k] / visits if visits else mean
            return float(quality + self._exploration * node.priors[k] * total**0.5 / (1 + visits))

        choice = max(range(len(node.actions)), key=score)
        table = self._table
        table.state[:] = node.state
        table.play(node.actions[choice])
        while not table.over and len(table.legal()) == 1:
            table.play(*table.legal())
        if table.over:
            values = np.array(table.returns())
        elif choice in node.children:
            values = self._simulate(node.children[choice])
        else:
            node.children[choice] = self._expand()
            values = node.children[choice].values
        node.visits[choice] += 1
        node.sums[choice] += values[node.mover]
        return values
