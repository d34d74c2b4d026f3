"""The interface of a game: a `Game` declares its sizes, a module of compiled rules how it is played.

Rules that are Python, such as those of another library, come in by `python_game.py` instead: batched alike, and slower.

The rules module holds seven Numba functions. A position is `state`, int64 [words], laid out as the game likes; `config`
is the game's own int64 vector; `stream` is a random stream for `bits.random_below` and its kin.

    deal(config, state, stream)                         write the first position of a game
    to_move(config, state) -> seat                      -1 when the game is over
    legal(config, state, actions) -> count              write the legal actions, int16, in ascending order
    apply(config, state, action)                        play it
    returns(config, state, values)                      float32 [seats], of a finished game
    observe(config, state, actions, count, row)         write the features [features] that the player to move may see;
                                                        the first `Game.actions` of them are the mask of legal actions
    determinize(config, state, samples, stream, integers, floats)
                                                        write full positions, int64 [n, words], drawn from those
                                                        that are consistent with what the player to move knows

`integers` (int64) and `floats` (float64) are scratch of the sizes that the game asks for. Values and features are from
the point of view of the player to move wherever a network sees them: column k of its values is the k-th seat after it.

`check_sizes` refuses sizes that cannot be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from gpuinfer.api import Plugin


def is_won_or_lost(returns: Sequence[float]) -> bool:
    """Whether one of two seats won what the other lost, or neither did."""
    return sorted(returns) in ([-1.0, 1.0], [0.0, 0.0])


def is_own_module(module: str) -> bool:
    """Whether this module is one of gpuinfer's own: of those a version says when they have changed."""
    return module.partition(".")[0] == "gpuinfer"


class Game(Plugin):
    """How large a game is, given its options. A subclass sets these in `__init__`, or raises UsageError."""

    compiled: ClassVar[bool] = True  # False: its rules are Python, see `python_game.py`
    variant: ClassVar[str | None] = None  # the option that follows the name and a colon: `--game NAME:VALUE`
    rules: ClassVar[str]  # the module of compiled rules
    rules_version: ClassVar[int] = 1  # of gpuinfer's own games, raised when they are played otherwise
    feature_dtype: ClassVar[str] = "uint8"
    hidden: ClassVar[bool] = True  # whether players know less than the whole position
    won_or_lost: ClassVar[bool] = False  # two seats, returns of 1 and -1, or 0 for both: who resigns has lost

    seats: int
    actions: int  # the width of the policy
    max_legal: int  # at one position
    max_moves: int  # in one game
    features: int  # in one row
    words: int  # in one position
    config: np.ndarray  # int64
    scratch: tuple[int, int] = (1, 1)  # integers, floats

    def symmetries(self) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
        """How positions can be turned or mirrored and are played alike, without the identity: training learns from
        turned ones too, with the same values.

        Of each, from where the features of the turned row come, a permutation of [features], and from where its actions
        come, one of [actions]. The mask of legal actions, which stands first in a row, is turned as actions are.
        """
        return ()

    def show(self, position: Any, seat: int) -> str:
        """The position as text, as the player in this seat may see it, for `gpuinfer play`: to be overridden.

        `position` is the state, int64 [words], of a game with compiled rules.
        """
        raise NotImplementedError

    def action_name(self, position: Any, action: int) -> str:
        """What people call an action that is legal there, and type to play it."""
        return str(action)


WIDEST = 127  # seats: records keep the player in an int8
MOST_ACTIONS = 32_767  # an action is an int16


class OutOfBounds(Exception):
    """What a game does wrong, and the cure."""


def check_sizes(game: Game) -> None:
    """Raises `OutOfBounds` for a size that cannot be."""
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
