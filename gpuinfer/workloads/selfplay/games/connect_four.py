"""Connect Four: two players, perfect information."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from gpuinfer.api import Setup
from gpuinfer.workloads.selfplay.game import Game


class ConnectFour(Game):
    """Seven columns of six; the first to connect four wins. Returns are 1, 0 (draw) and -1."""

    rules: ClassVar[str] = "gpuinfer.workloads.selfplay.games.connect_four_rules"
    hidden: ClassVar[bool] = False
    won_or_lost: ClassVar[bool] = True

    def __init__(self, setup: Setup | None = None, /, **options: object) -> None:
        super().__init__(setup, **options)
        self.seats = 2
        self.actions = 7
        self.max_legal = 7
        self.max_moves = 42
        self.features = 7 + 2 * 42
        self.words = 4
        self.config = np.zeros(1, np.int64)

    def symmetries(self) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
        """The board seen in a mirror."""
        columns = np.arange(self.actions)[::-1]
        cells = np.arange(self.actions, self.features).reshape(2, self.actions, -1)[:, columns]
        return [([*columns.tolist(), *cells.ravel().tolist()], columns.tolist())]

    def show(self, position: np.ndarray, seat: int) -> str:
        """X has the first move."""
        from gpuinfer.workloads.selfplay.games import connect_four_rules as rules  # needs Numba: half a second

        first, second = (int(board) for board in position[rules.BOARDS : rules.BOARDS + 2])
        lines = [" ".join(str(column + 1) for column in range(rules.COLUMNS))]
        for row in reversed(range(rules.ROWS)):
            cells = [1 << (rules.HEIGHT * column + row) for column in range(rules.COLUMNS)]
            lines.append(" ".join("X" if first & cell else "O" if second & cell else "." for cell in cells))
        return "\n".join([*lines, f"You have {'XO'[seat]}."])

    def action_name(self, position: np.ndarray, action: int) -> str:
        """The column, from 1."""
        return str(action + 1)
