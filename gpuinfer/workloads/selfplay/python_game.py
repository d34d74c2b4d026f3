"""The seam for a game whose rules are Python: its search is compiled and batched as any, its rules are asked.

For rules that exist already, in a library or in plain Python. Each position is looked at once, when the search first
comes to it; from then on the tree knows it. So a leaf costs a few calls of Python, some microseconds, where compiled
rules cost a fraction of one.

Moves with one legal action are played, not searched, as everywhere. Chance is a player of its own: its outcomes are
drawn in proportion to their probabilities, in the game and in the tree.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gpuinfer.errors import GpuinferError, UsageError, WorkError
from gpuinfer.host import spoken
from gpuinfer.workloads.selfplay.bounded import OutOfBounds
from gpuinfer.workloads.selfplay.game import Game

if TYPE_CHECKING:
    from gpuinfer.workloads.selfplay.drawing import Draw  # compiles

OVER, CHANCE = -1, -2  # who moves when nobody does

Position = Any
"""Whatever the game likes. One that has been given to the search is never changed: `apply` makes another."""


class PythonGame(Game):
    """A subclass sets `seats`, `actions`, `max_legal`, `max_moves` and `features` in `__init__`, as of any game.

    Methods may be called from one thread at a time, in several processes. What they raise ends the run.
    """

    compiled: ClassVar[bool] = False
    rules: ClassVar[str] = ""
    feature_dtype: ClassVar[str] = "float32"
    words = 1
    config = np.zeros(1, np.int64)

    max_legal: int  # of `legal` alone, not of `chances`
    position_bytes: int = 2048  # about, of one position: how many games are played at once depends on it

    @abstractmethod
    def deal(self, draw: Draw) -> Position:
        """The first position of a game."""

    @abstractmethod
    def to_move(self, position: Position) -> int:
        """The seat that moves, `OVER`, or `CHANCE`."""

    @abstractmethod
    def legal(self, position: Position) -> Sequence[int]:
        """The legal actions of the seat that moves, at least one, in ascending order: a list or an array."""

    def chances(self, position: Position) -> Sequence[tuple[int, float]]:
        """Where chance moves: each outcome with its probability."""
        raise NotImplementedError

    @abstractmethod
    def apply(self, position: Position, action: int) -> Position:
        """The position after it. The one before stays as it is."""

    @abstractmethod
    def returns(self, position: Position) -> Sequence[float]:
        """What a finished game brought each seat. Best between -1 and 1, since `--exploration` is on that scale."""

    @abstractmethod
    def observe(self, position: Position, row: np.ndarray) -> None:
        """Write what the player to move may see into `row`, [features - actions], which is zero. The mask of legal
        actions, which stands before it, is there already.
        """

    def determinize(self, position: Position, draw: Draw) -> Position:
        """A position drawn from those that the player to move thinks possible: to be overridden, with `hidden`."""
        return position


@contextlib.contextmanager
def calling(game: Game) -> Iterator[None]:
    """What its methods raise in here is told as `raised` has it, and with its name what they return and must not."""
    try:
        yield
    except GpuinferError:
        raise
    except OutOfBounds as fault:
        raise UsageError(f"game '{type(game).__name__}': {fault}") from None
    except Exception as error:
        raise raised(game, error) from error


def raised(game: Game, error: Exception) -> WorkError:
    """What one of its methods raised: which one, and at which line of its file."""
    files = {getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in type(game).__mro__}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files - {__file__}]
    place = f"`{frames[0].name}` ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else "a call"
    said = spoken.in_short(error)
    cure = (
        "Draw with `draw.below(n)`, a whole number from 0 to n - 1, or `draw.unit()`, a number from 0 to 1"
        if "'Draw' object" in said
        else "Mend it there"
    )
    return WorkError(f"game '{type(game).__name__}': {place} raised {said}. {cure}.")
