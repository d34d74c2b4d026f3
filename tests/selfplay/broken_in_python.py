"""Games in Python that break one promise each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from in_python import Kuhn, PythonConnectFour, Wager

from gpuinfer.workloads.selfplay.drawing import Draw
from gpuinfer.workloads.selfplay.python_game import PythonGame


class Overwriting(PythonConnectFour):
    def apply(self, position: np.ndarray, action: int) -> np.ndarray:
        position[:] = super().apply(position, action)
        return position


class Short(PythonConnectFour):
    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        self.max_moves = 6


class Unsorted(PythonConnectFour):
    def legal(self, position: np.ndarray) -> list[int]:
        return super().legal(position)[::-1]


class OneReturn(PythonConnectFour):
    def returns(self, position: np.ndarray) -> np.ndarray:
        return super().returns(position)[:1]


class Peeking(PythonConnectFour):
    """Guesses at positions that cannot be."""

    def determinize(self, position: np.ndarray, draw: Draw) -> np.ndarray:
        return self.apply(position, self.legal(position)[0])


class Counting(PythonConnectFour):
    """Features that depend on how often anybody has looked."""

    looked = 0

    def observe(self, position: np.ndarray, row: np.ndarray) -> None:
        super().observe(position, row)
        self.looked += 1
        row[0] = self.looked % 2


class Remembering(PythonConnectFour):
    """Features that depend on which games were dealt, and so on the company."""

    dealt = 0

    def deal(self, draw: Draw) -> np.ndarray:
        self.dealt += 1
        return super().deal(draw)

    def observe(self, position: np.ndarray, row: np.ndarray) -> None:
        super().observe(position, row)
        row[-1] = self.dealt % 2


class Unlikely(Wager):
    def chances(self, position: tuple[str, ...]) -> Sequence[tuple[int, float]]:
        return [(action, chance / 2) for action, chance in super().chances(position)]


class NoGuess(Kuhn):
    """Something is hidden, and nothing guesses it."""

    determinize = PythonGame.determinize


class OpenCards(Kuhn):
    """Guesses that are the truth."""

    def determinize(self, position: tuple[int, ...], draw: Draw) -> tuple[int, ...]:
        return position


class Marked(Kuhn):
    """Three guesses of four are the truth."""

    def determinize(self, position: tuple[int, ...], draw: Draw) -> tuple[int, ...]:
        return super().determinize(position, draw) if draw.below(4) == 0 else position


class Calling(Kuhn):
    """Takes `draw` for a function."""

    def deal(self, draw: Draw) -> tuple[int, ...]:
        return draw(3), draw(3)


class SaidToBeOpen(Kuhn):
    """Says that nothing is hidden, so that nobody guesses."""

    hidden = False


class Graded(Kuhn):
    """Says that it is won or lost, and plays for one chip or for two."""

    won_or_lost = True
