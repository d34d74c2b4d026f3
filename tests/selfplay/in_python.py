"""Games whose rules are Python: any compiled game once more, and one of chance whose values are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from gpuinfer.testing.hidden_information import CompiledAsPython
from gpuinfer.workloads.selfplay.draw import Draw
from gpuinfer.workloads.selfplay.games.blob import Blob
from gpuinfer.workloads.selfplay.games.connect_four import ConnectFour
from gpuinfer.workloads.selfplay.python_game import CHANCE, OVER, PythonGame


class PythonConnectFour(CompiledAsPython):
    def __init__(self, setup: Any = None, /, **options: Any) -> None:
        super().__init__(ConnectFour(), setup, **options)


class PythonBlob(CompiledAsPython):
    def __init__(self, setup: Any = None, /, **options: Any) -> None:
        super().__init__(Blob(None, players=3, cards=3), setup, **options)


class Kuhn(PythonGame):
    """Kuhn poker (Kuhn 1950): three cards, one for each of two players; bet or pass. A position is both cards and what
    was done since.
    """

    PASS, BET = 0, 1

    def __init__(self, setup: Any = None, /, **options: Any) -> None:
        super().__init__(setup, **options)
        self.seats, self.actions, self.max_legal, self.max_moves, self.features = 2, 2, 2, 3, 2 + 3 + 6

    def deal(self, draw: Draw) -> tuple[int, ...]:
        first = draw.below(3)
        return first, (first + 1 + draw.below(2)) % 3

    def to_move(self, position: tuple[int, ...]) -> int:
        done = position[2:]
        return OVER if done in ((0, 0), (0, 1, 0), (0, 1, 1), (1, 0), (1, 1)) else len(done) % 2

    def legal(self, position: tuple[int, ...]) -> Sequence[int]:
        return [self.PASS, self.BET]

    def apply(self, position: tuple[int, ...], action: int) -> tuple[int, ...]:
        return (*position, action)

    def returns(self, position: tuple[int, ...]) -> Sequence[float]:
        done = position[2:]
        if done[-2:] == (self.BET, self.PASS):  # who passes a bet has lost the ante
            won = 0.5 if len(done) % 2 == 0 else -0.5
        else:
            won = (1.0 if done[-1] == self.BET else 0.5) * (1 if position[0] > position[1] else -1)
        return [won, -won]

    def observe(self, position: tuple[int, ...], row: np.ndarray) -> None:
        row[position[self.to_move(position)]] = 1
        for number, action in enumerate(position[2:]):
            row[3 + 2 * number + action] = 1

    def determinize(self, position: tuple[int, ...], draw: Draw) -> tuple[int, ...]:
        mover = self.to_move(position)
        other = (position[mover] + 1 + draw.below(2)) % 3
        return (position[0], other, *position[2:]) if mover == 0 else (other, *position[1:])


class Wager(PythonGame):
    """One player, one choice: 0.3 for sure, or a wheel that brings 1 in three of four cases, else -1: 0.5 on average.

    The wheel is turned twice: the first turn brings it to a halt with probability 0.5, else the second one does.
    """

    hidden: ClassVar[bool] = False
    SURE, WHEEL = 0, 1

    def __init__(self, setup: Any = None, /, **options: Any) -> None:
        super().__init__(setup, **options)
        self.seats, self.actions, self.max_legal, self.max_moves, self.features = 1, 2, 2, 1, 3

    def deal(self, draw: Draw) -> tuple[str, ...]:
        return ()

    def to_move(self, position: tuple[str, ...]) -> int:
        if not position:
            return 0
        return CHANCE if position[-1] in ("wheel", "turns on") else OVER

    def legal(self, position: tuple[str, ...]) -> Sequence[int]:
        return [self.SURE, self.WHEEL]

    def chances(self, position: tuple[str, ...]) -> Sequence[tuple[int, float]]:
        return [(0, 0.125), (1, 0.375), (2, 0.5)] if position[-1] == "wheel" else [(0, 0.25), (1, 0.75)]

    def apply(self, position: tuple[str, ...], action: int) -> tuple[str, ...]:
        return (*position, ("lost", "won", "turns on")[action] if position else ("sure", "wheel")[action])

    def returns(self, position: tuple[str, ...]) -> Sequence[float]:
        return [{"sure": 0.3, "won": 1.0, "lost": -1.0}[position[-1]]]

    def observe(self, position: tuple[str, ...], row: np.ndarray) -> None:
        row[0] = len(position)


def _shown(self, position, seat):
    return self.original.show(position, seat)


ShownConnectFour = type("ShownConnectFour", (PythonConnectFour,), {"__module__": __name__, "show": _shown})


class ShownBlob(PythonBlob):
    show = _shown

    def action_name(self, position: Any, action: int) -> str:
        return "the same"  # as all others: they are told apart by their numbers


class ShownWager(Wager):
    """Chance moves of itself, between the person's moves."""

    def show(self, position: Any, seat: int) -> str:
        return f"so far: {' '.join(position) or 'nothing'}"

    def action_name(self, position: Any, action: int) -> str:
        return ("Sure", "Wheel")[action]
