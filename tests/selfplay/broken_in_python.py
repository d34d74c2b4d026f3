"""Games in Python that break one promise each, and some that keep theirs. Commands import them by name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from in_python import Kuhn, PythonConnectFour, Wager

from gpuinfer.workloads.selfplay.draw import Draw
from gpuinfer.workloads.selfplay.python_game import PythonGame


def _game(name, base, **changed):
    """`base` with other methods, to each of which the method that it replaces is given first; or other attributes."""
    attributes = {"__module__": __name__}
    for key, one in changed.items():
        before = getattr(base, key)
        attributes[key] = _replacing(one, before) if callable(one) and not isinstance(one, type) else one
    return type(name, (base,), attributes)


def _replacing(one, before):
    return lambda self, *given: one(before, self, *given)


def _overwriting(before, self, position, action):
    position[:] = before(self, position, action)
    return position


def _nan_feature(before, self, position, row):
    row[3] = math.nan


def _endless_apply(before, self, position, action):
    over = PythonConnectFour.to_move(self, position) < 0
    return position.copy() if over else before(self, position, action)


NAN = [math.nan, 1.0]
Overwriting = _game("Overwriting", PythonConnectFour, apply=_overwriting)
Unsorted = _game("Unsorted", PythonConnectFour, legal=lambda before, *given: before(*given)[::-1])
OneReturn = _game("OneReturn", PythonConnectFour, returns=lambda before, *given: before(*given)[:1])
NanReturns = _game("NanReturns", PythonConnectFour, returns=lambda *given: NAN)
NanFeatures = _game("NanFeatures", Kuhn, observe=_nan_feature)
Halves = _game("Halves", PythonConnectFour, legal=lambda before, *given: [one + 0.5 for one in before(*given)])
Beyond = _game("Beyond", PythonConnectFour, legal=lambda before, *given: [one + 90 for one in before(*given)])
Mask = _game("Mask", PythonConnectFour, legal=lambda before, *given: np.isin(np.arange(7), before(*given)))
Generator = _game("Generator", PythonConnectFour, legal=lambda before, *given: (one for one in before(*given)))
NoLegal = _game("NoLegal", PythonConnectFour, legal=lambda *given: None)
NoMover = _game("NoMover", PythonConnectFour, to_move=lambda *given: None)
Crowded = _game("Crowded", PythonConnectFour, to_move=lambda before, *given: before(*given) + 2)
NoPosition = _game("NoPosition", Kuhn, determinize=lambda *given: None)
NoApply = _game("NoApply", Kuhn, apply=lambda *given: None)
Returning = _game("Returning", PythonConnectFour, observe=lambda before, self, position, row: np.ones_like(row))
Unlikely = _game("Unlikely", Wager, chances=lambda before, *given: [(one, p / 2) for one, p in before(*given)])
OneShare = _game("OneShare", Wager, chances=lambda before, *given: [(0, math.nan), *before(*given)[1:]])
Rich = _game("Rich", Wager, returns=lambda before, *given: [100.0 * value for value in before(*given)])
NoGuess = type("NoGuess", (Kuhn,), {"__module__": __name__, "determinize": PythonGame.determinize})
OpenCards = _game("OpenCards", Kuhn, determinize=lambda before, self, position, draw: position)
SaidToBeOpen = _game("SaidToBeOpen", Kuhn, hidden=False)
Graded = _game("Graded", Kuhn, won_or_lost=True)  # and is for one chip or for two
Peeking = _game(  # guesses at positions that cannot be
    "Peeking", PythonConnectFour, determinize=lambda before, self, at, draw: self.apply(at, self.legal(at)[0])
)
Marked = _game(  # three guesses of four are the truth
    "Marked", Kuhn, determinize=lambda before, self, at, draw: before(self, at, draw) if draw.below(4) == 0 else at
)
Endless = _game(  # its last move is made again and again
    "Endless",
    PythonConnectFour,
    to_move=lambda before, *given: max(0, before(*given)),
    legal=lambda before, *given: before(*given) or [0],
    apply=_endless_apply,
    determinize=lambda before, self, position, draw: position,
)


class Short(PythonConnectFour):
    """Says that it is shorter, and may say that fewer actions are ever legal."""

    changed = ("max_moves", 6)

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        setattr(self, *self.changed)
        self._actions = np.zeros(7, np.int16)


class Wide(Short):
    changed = ("max_legal", 3)


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


class NanLate(PythonConnectFour):
    """Plays some games as it should, and then does not know who has won."""

    ended, known = itertools.count(), 20

    def returns(self, position: np.ndarray) -> list[float]:
        return NAN if next(self.ended) > self.known else super().returns(position)


class NanAtLast(NanLate):
    """Only after more games than a rehearsal plays."""

    known = 400


class Calling(Kuhn):
    """Takes `draw` for a function."""

    def deal(self, draw: Draw) -> tuple[int, ...]:
        return draw(3), draw(3)


class Mirrored(PythonConnectFour):
    """Says truly that it can be mirrored."""

    def symmetries(self) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
        return self.original.symmetries()


COLUMNS = [*range(1, 7), 0]  # a permutation that mirrors nothing
BOARD = [7 + (k - 7) // 42 * 42 + COLUMNS[(k - 7) % 42 // 6] * 6 + (k - 7) % 6 for k in range(7, 91)]
WronglyMirrored = _game(  # mirrors actions, and leaves the board as it is
    "WronglyMirrored", Mirrored, symmetries=lambda *given: [([*range(6, -1, -1), *range(7, 91)], [*range(6, -1, -1)])]
)
ShiftedBoard = _game("ShiftedBoard", Mirrored, symmetries=lambda *given: [([*COLUMNS, *BOARD], COLUMNS)])
