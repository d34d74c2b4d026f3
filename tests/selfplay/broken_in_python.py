"""Games in Python that break one promise each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from in_python import Kuhn, PythonConnectFour, Wager

from gpuinfer.workloads.selfplay.draw import Draw
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


class NanReturns(PythonConnectFour):
    def returns(self, position: np.ndarray) -> list[float]:
        return [math.nan, 1.0]


class NanLate(PythonConnectFour):
    """Plays some games as it should, and then does not know who has won."""

    ended, known = itertools.count(), 20

    def returns(self, position: np.ndarray) -> list[float]:
        return [math.nan, 1.0] if next(self.ended) > self.known else super().returns(position)


class NanAtLast(NanLate):
    """Only after more games than a rehearsal plays."""

    known = 400


class NanFeatures(Kuhn):
    def observe(self, position: tuple[int, ...], row: np.ndarray) -> None:
        row[3] = math.nan


class OneShare(Wager):
    def chances(self, position: tuple[str, ...]) -> Sequence[tuple[int, float]]:
        return [(0, math.nan), *super().chances(position)[1:]]


class Mask(PythonConnectFour):
    def legal(self, position: np.ndarray) -> np.ndarray:
        return np.isin(np.arange(self.actions), super().legal(position))


class Halves(PythonConnectFour):
    def legal(self, position: np.ndarray) -> list[float]:
        return [action + 0.5 for action in super().legal(position)]


class Generator(PythonConnectFour):
    def legal(self, position: np.ndarray) -> object:
        return (action for action in super().legal(position))


class NoLegal(PythonConnectFour):
    def legal(self, position: np.ndarray) -> None:
        return None


class NoMover(PythonConnectFour):
    def to_move(self, position: np.ndarray) -> None:
        return None


class NoPosition(Kuhn):
    def determinize(self, position: tuple[int, ...], draw: Draw) -> None:
        return None


class NoApply(Kuhn):
    def apply(self, position: tuple[int, ...], action: int) -> None:
        super().apply(position, action)


class Returning(PythonConnectFour):
    """Gives the features back in place of writing them."""

    def observe(self, position: np.ndarray, row: np.ndarray) -> np.ndarray:
        return np.ones_like(row)


class Endless(PythonConnectFour):
    """Never over: its last move is made again and again."""

    def to_move(self, position: np.ndarray) -> int:
        return max(0, super().to_move(position))

    def legal(self, position: np.ndarray) -> list[int]:
        return super().legal(position) or [0]

    def apply(self, position: np.ndarray, action: int) -> np.ndarray:
        return super().apply(position, action) if super().to_move(position) >= 0 else position.copy()

    def determinize(self, position: np.ndarray, draw: Draw) -> np.ndarray:
        return position


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


class Mirrored(PythonConnectFour):
    """Says truly that it can be mirrored."""

    def symmetries(self) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
        return self.original.symmetries()


class WronglyMirrored(Mirrored):
    """Mirrors actions, and leaves the board as it is."""

    def symmetries(self) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
        [(features, actions)] = super().symmetries()
        return [([*features[:7], *range(7, self.features)], actions)]


class Shifted(Mirrored):
    """A permutation of columns that mirrors nothing."""

    def symmetries(self) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
        return [([*range(1, 7), 0, *range(7, self.features)], [*range(1, 7), 0])]


class ShiftedBoard(Mirrored):
    """The same of the board too: only where four in a row lie at its edge is something else."""

    def symmetries(self) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
        columns = [*range(1, 7), 0]
        rest = range(7, self.features)
        board = [7 + (k - 7) // 42 * 42 + columns[(k - 7) % 42 // 6] * 6 + (k - 7) % 6 for k in rest]
        return [([*columns, *board], columns)]


class Rich(Wager):
    def returns(self, position: tuple[str, ...]) -> Sequence[float]:
        return [100.0 * value for value in super().returns(position)]


class Silent(Wager):
    """Shows nothing."""

    def show(self, position: tuple[str, ...], seat: int) -> None:
        return None
