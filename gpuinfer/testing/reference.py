"""The search once more, in plain Python: one tree, one simulation after the other, sums in place of running means."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gpuinfer.testing.table import Table
from gpuinfer.testing.thinking import Model
from gpuinfer.workloads.selfplay.game import Game


@dataclass
class Node:
    state: np.ndarray
    mover: int
    actions: list[int]
    priors: np.ndarray
    values: np.ndarray  # by seat, as the model sees the position
    visits: list[int] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)  # of the mover's value, over each action's visits
    children: dict[int, Node] = field(default_factory=dict)


class Tree:
    """PUCT from `root`, int64 [words], with `model` for every leaf."""

    def __init__(self, game: Game, root: np.ndarray, model: Model, exploration: float) -> None:
        self._table, self._model, self._exploration = Table(game), model, exploration
        self._table.state[:] = root
        self.root = self._expand()

    def visits(self, simulations: int) -> dict[int, int]:
        for _ in range(simulations - 1):  # the root itself was the first
            self._simulate(self.root)
        return dict(zip(self.root.actions, self.root.visits, strict=True))

    def _expand(self) -> Node:
        table = self._table
        actions, mover, seats = table.legal(), table.mover, table.game.seats
        logits, values = self._model(table.observe()[None])
        weights = np.exp(logits[0, actions].astype(float))
        by_seat = np.array([values[0, (seat - mover) % seats] for seat in range(seats)], float)
        count = len(actions)
        return Node(table.state.copy(), mover, actions, weights / weights.sum(), by_seat, [0] * count, [0.0] * count)

    def _simulate(self, node: Node) -> np.ndarray:
        choice = self._select(node)
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

    def _select(self, node: Node) -> int:
        total = 1 + sum(node.visits)
        mean = (node.values[node.mover] + sum(node.sums)) / total

        def score(k: int) -> float:
            visits = node.visits[k]
            quality = node.sums[k] / visits if visits else mean
            return float(quality + self._exploration * node.priors[k] * total**0.5 / (1 + visits))

        return max(range(len(node.actions)), key=score)
