"""The interface of a game whose rules are Python: the search is compiled and batched like any other, the rules are not.

For rules that exist already, in a library or in plain Python. Each position is examined once, when the search first
reaches it; from then on the tree knows it. So a leaf costs a few calls of Python, some microseconds, where compiled
rules cost a fraction of one.

Moves with one legal action are played, not searched, as everywhere. Chance is a player of its own: its outcomes are
drawn in proportion to their probabilities, in the game and in the tree.

`CheckedRules` says what the methods may return, and refuses anything else by name. The search itself checks the results
of many positions at once; if something is wrong there, the same positions are checked here one by one.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gpuinfer.errors import GpuinferError, UsageError, WorkError
from gpuinfer.host import error_text
from gpuinfer.workloads.selfplay.game import Game, OutOfBounds

if TYPE_CHECKING:
    from gpuinfer.workloads.selfplay.draw import Draw  # compiles

OVER, CHANCE = -1, -2  # the mover when no seat moves

Position = Any
"""Any object of the game's own. A position that the search has is never changed: `apply` makes another."""


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
    """Errors of the game's methods become errors that name the game, the method and the line."""
    try:
        yield
    except GpuinferError:
        raise
    except OutOfBounds as fault:
        raise UsageError(f"game '{type(game).__name__}': {fault}") from None
    except Exception as error:
        raise raised(game, error) from error


def raised(game: Game, error: Exception) -> WorkError:
    """The error for what a method of the game raised: which method, and at which line of its file."""
    files = {getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in type(game).__mro__}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files - {__file__}]
    place = f"`{frames[0].name}` ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else "a call"
    message = error_text.short_message(error)
    cure = (
        "Draw with `draw.below(n)`, a whole number from 0 to n - 1, or `draw.unit()`, a number from 0 to 1"
        if "'Draw' object" in message
        else "Mend it there"
    )
    return WorkError(f"game '{type(game).__name__}': {place} raised {message}. {cure}.")


MOST_CHANCES = 10_000  # moves of chance in one game, beside those of the players
CLOSE = 1e-3  # to 1: the sum of an outcome's probabilities, which people round
LARGEST = float(np.finfo(np.float32).max)  # in records
SHOWN = 100  # characters of what a method returned

LIST = "Return a list or an array of whole numbers, each action once, in ascending order"


class CheckedRules:
    """The methods of one game, each result checked. All raise `OutOfBounds`, and what the game raises."""

    def __init__(self, game: PythonGame) -> None:
        self.game = game

    def to_move(self, position: Position, made_by: str = "apply") -> int:
        """`made_by`: the method that returned this position, named where the position is None."""
        mover = _call(self.game.to_move, position, made_by)
        if not isinstance(mover, int | np.integer | np.bool_) or not CHANCE <= mover < self.game.seats:
            raise OutOfBounds(
                f"`to_move` returned {_shown(mover)} where seats = {self.game.seats}. Return a seat, counted from 0, "
                "OVER or CHANCE."
            )
        return int(mover)

    def legal(self, position: Position, made_by: str = "apply") -> list[int]:
        found = _call(self.game.legal, position, made_by)
        legal = _whole_numbers(found)
        if legal is None:
            mask = isinstance(found, np.ndarray) and found.dtype == np.bool_
            cure = "Return the numbers of the legal actions, as np.flatnonzero(mask) has them" if mask else LIST
            raise OutOfBounds(f"`legal` returned {_shown(found)}. {cure}.")
        if not 1 <= len(legal) <= self.game.max_legal:
            cure = "Return OVER from `to_move`" if not legal else f"Declare max_legal = {len(legal)} or more"
            raise OutOfBounds(f"`legal` names {len(legal)} actions; max_legal = {self.game.max_legal}. {cure}.")
        if legal != sorted(set(legal)):
            raise OutOfBounds(f"`legal` returned {_shown(found)}. Name each action once, in ascending order.")
        if not 0 <= legal[0] <= legal[-1] < self.game.actions:
            raise OutOfBounds(
                f"`legal` returned {_shown(found)} where actions = {self.game.actions}. Actions count from 0."
            )
        return legal

    def chances(self, position: Position) -> list[tuple[int, float]]:
        """The outcomes with a probability above 0."""
        found = _call(self.game.chances, position, "apply")
        try:
            outcomes = [(action, float(chance)) for action, chance in found] if _is_sequence(found) else []
            actions = _whole_numbers([action for action, _ in outcomes])
        except (TypeError, ValueError):
            actions = None
        if not actions:
            raise OutOfBounds(f"`chances` returned {_shown(found)}. Return a list of pairs: outcome, probability.")
        total = sum(chance for _, chance in outcomes)
        if not abs(total - 1.0) <= CLOSE or min(chance for _, chance in outcomes) < 0:
            raise OutOfBounds(
                f"`chances` returned {_shown(found)}, which adds up to {total:g}. Name each outcome that can "
                "happen; together they are 1, and none is less than 0."
            )
        return [(action, chance) for action, (_, chance) in zip(actions, outcomes, strict=True) if chance > 0]

    def apply(self, position: Position, action: int) -> Position:
        return self.game.apply(position, action)

    def returns(self, position: Position) -> np.ndarray:
        """float32 [seats]"""
        found = _call(self.game.returns, position, "apply")
        try:
            returns = np.asarray(found, np.float64)
        except (TypeError, ValueError, OverflowError):
            returns = np.zeros(0)
        if returns.shape != (self.game.seats,) or not np.abs(returns).max() <= LARGEST:
            raise OutOfBounds(
                f"`returns` gave {_shown(found)} for seats = {self.game.seats}. Give each seat a finite number."
            )
        return returns.astype(np.float32)

    def observe(self, position: Position) -> np.ndarray:
        """The row, [features - actions] of the game's dtype."""
        row = np.zeros(self.game.features - self.game.actions, self.game.feature_dtype)
        found = _call(lambda one: self.game.observe(one, row), position, "apply")
        if found is not None and found is not row and not row.any():
            raise OutOfBounds(f"`observe` returned {_shown(found)} and wrote nothing. Write the features into `row`.")
        if len(odd := np.flatnonzero(~np.isfinite(row.astype(float)))):
            raise OutOfBounds(
                f"`observe` wrote {row[odd[0]]} to feature {odd[0]} of `row`, counted from 0. A network answers NaN to "
                "features that are not finite."
            )
        return row

    def check_position(self, position: Position, made_by: str) -> None:
        """Call and check every method that applies to the position."""
        mover = self.to_move(position, made_by)
        if mover == CHANCE:
            self.chances(position)
        elif mover == OVER:
            self.returns(position)
        else:
            self.legal(position, made_by)
            self.observe(position)


class GameLength:
    """Counts the moves of a game: of its players `max_moves` at most."""

    def __init__(self, game: PythonGame) -> None:
        self._game, self._moves, self._chances = game, 0, 0

    def count(self, mover: int) -> None:
        """One more move, by this seat or by chance. Raises `OutOfBounds` for one that is too many."""
        if mover == CHANCE:
            self._chances += 1
            if self._chances > MOST_CHANCES:
                raise OutOfBounds(f"`to_move` said CHANCE more than {MOST_CHANCES} times in one game. Let it end.")
        else:
            self._moves += 1
            refuse_long(self._game, self._moves)


def refuse_long(game: PythonGame, moves: int) -> None:
    """Raises `OutOfBounds` for a game of so many moves of its players."""
    if moves > game.max_moves:
        raise OutOfBounds(
            f"a game goes on after {game.max_moves} moves. Declare max_moves of the longest one; `to_move` returns "
            "OVER where it ends."
        )


def _call(method: Callable[[Position], Any], position: Position, made_by: str) -> Any:
    try:
        return method(position)
    except Exception:
        if position is None:
            raise OutOfBounds(f"`{made_by}` returned None. Return the position.") from None
        raise


def _is_sequence(found: Any) -> bool:
    return hasattr(found, "__len__") and hasattr(found, "__getitem__") and not isinstance(found, str | bytes | dict)


def _whole_numbers(found: Any) -> list[int] | None:
    """As a list of int; None for anything but a list or array of whole numbers."""
    if not _is_sequence(found):
        return None
    try:
        array = np.asarray(found)
    except ValueError:
        return None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        return None
    numbers: list[int] = array.tolist()
    return numbers


def _shown(found: Any) -> str:
    if type(found) in (list, tuple) and all(isinstance(one, np.generic) for one in found):
        found = [one.item() for one in found]
    text = " ".join(error_text.safe_repr(found).split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}…"
