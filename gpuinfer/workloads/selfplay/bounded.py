"""The sizes that a game declares: whether they are any, and arrays that notice when somebody reaches beyond them."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuinfer.workloads.selfplay.game import Game

WIDEST = 127  # seats: records keep the player in an int8
MOST_ACTIONS = 32_767  # an action is an int16


class OutOfBounds(Exception):
    """What a game does wrong, and the cure."""


class Sized(np.ndarray):
    """An array that says which of the game's sizes it was made by when somebody reaches beyond it."""

    made_by = ""  # such as "words"

    def __array_finalize__(self, other: Any) -> None:
        self.made_by = getattr(other, "made_by", "")

    def __getitem__(self, key: Any) -> Any:
        try:
            return super().__getitem__(key)
        except IndexError:
            raise self._beyond(key) from None

    def __setitem__(self, key: Any, value: Any) -> None:
        self._refuse_what_does_not_fit(value)
        try:
            super().__setitem__(key, value)
        except IndexError:
            raise self._beyond(key) from None

    def _beyond(self, key: Any) -> OutOfBounds:
        index: Any = key[-1] if isinstance(key, tuple) else key
        counts = isinstance(index, int | np.integer) and index >= 0
        needed = f" Declare {self.made_by} = {int(index) + 1} or more." if counts else ""
        return OutOfBounds(
            f"reaches for number {index} where {self.made_by} = {self.shape[-1]} says there are so many.{needed}"
        )

    def _refuse_what_does_not_fit(self, value: Any) -> None:
        if self.dtype.kind not in "iu" or not isinstance(value, int | np.integer):
            return
        info = np.iinfo(self.dtype)
        if not info.min <= int(value) <= info.max:
            raise OutOfBounds(
                f"writes {int(value)} into {self.made_by}, which are {self.dtype}. Keep to {info.min}…{info.max}."
            )


def check_sizes(game: Game) -> None:
    """Raises `Fault` for a size that is none."""
    for name in ("seats", "actions", "max_legal", "max_moves", "features", "words"):
        value = getattr(game, name)
        if not isinstance(value, int | np.integer) or value < 1:
            raise OutOfBounds(f"{name} is {value!r}. Set a whole number, at least 1.")
    if game.seats > WIDEST or game.actions > MOST_ACTIONS:
        raise OutOfBounds(
            f"seats = {game.seats}, actions = {game.actions}. At most {WIDEST} and {MOST_ACTIONS} can be kept."
        )
    if game.features < game.actions:
        raise OutOfBounds(
            f"features = {game.features} is less than actions = {game.actions}: the first features are the mask of "
            f"legal actions. Declare features = {game.actions} or more."
        )
    if not (isinstance(game.config, np.ndarray) and game.config.dtype == np.int64 and game.config.ndim == 1):
        raise OutOfBounds("config is no vector of int64. Set np.array([…], np.int64).")
    if len(game.scratch) != 2 or min(game.scratch) < 1:
        raise OutOfBounds(f"scratch is {game.scratch!r}. Set how many integers and floats, at least 1 each: (1, 1).")
