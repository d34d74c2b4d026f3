"""Plays a game in Python at random and looks at each thing that its methods say: `playthrough.py` for such rules."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from gpuinfer.host import spoken
from gpuinfer.workloads.selfplay.bounded import OutOfBounds
from gpuinfer.workloads.selfplay.drawing import draw_of
from gpuinfer.workloads.selfplay.game import is_won_or_lost
from gpuinfer.workloads.selfplay.python_game import CHANCE, OVER, Position, PythonGame, raised
from gpuinfer.workloads.selfplay.python_rules import CheckedRules, Length
from gpuinfer.workloads.selfplay.turned import refuse_symmetries

TURNED = 1000  # games of which the beginnings are looked at where a game declares symmetries
LOOKED_AT = 200  # positions of one game, at most: the longest ones have thousands

Seen = tuple[int, list[Any], np.ndarray]
"""All that a position says of itself: who moves, the legal actions or the outcomes of chance, the features."""


def fault_of(game: PythonGame, numbers: Iterable[int], seconds: float, returned: list[list[float]]) -> str | None:
    """What is wrong with it and the cure, as one of these games shows it, or as many of them as the time allows.
    `returned` takes the returns of each.
    """
    end = time.monotonic() + seconds
    try:
        for number in numbers:
            returned.append(PythonPlaythrough(game, number).play())
            if time.monotonic() > end:
                break
        refuse_symmetries(game, TURNED, seconds)
    except OutOfBounds as fault:
        return str(fault)
    except Exception as error:  # noqa: BLE001 (rules may raise anything)
        return spoken.said(raised(game, error))
    return None


class PythonPlaythrough:
    """One game at random; the first two go to the edges: always the first action, always the last."""

    def __init__(self, game: PythonGame, number: int) -> None:
        self.game, self._number = game, number
        self._rules = CheckedRules(game)
        self._moves = random.Random(number)
        self._draw = draw_of(number)

    def play(self) -> list[float]:
        """Its returns, by seat. Raises `OutOfBounds`, and what the game raises."""
        rules, position, length, looked = self._rules, self.game.deal(self._draw), Length(self.game), 0
        mover = rules.to_move(position, "deal")
        while mover != OVER:
            seen = self._seen(position, mover)
            if mover >= 0 and len(seen[1]) > 1 and looked < LOOKED_AT:
                self._guess(position, seen)
            after = rules.apply(position, self._choice(mover, seen[1]))
            length.count(mover)
            mover_after = rules.to_move(after)
            if looked < LOOKED_AT and not _alike(seen, self._seen(position, rules.to_move(position))):
                raise OutOfBounds(
                    "`apply` changes the position that it is given. Make another one: the tree keeps them all."
                )
            looked, position, mover = looked + 1, after, mover_after
        return self._returns(position)

    def _choice(self, mover: int, choices: list[Any]) -> int:
        actions: list[int] = [action for action, _ in choices] if mover == CHANCE else choices
        if self._number < 2:
            return actions[-self._number]
        return self._moves.choice(actions)

    def _seen(self, position: Position, mover: int) -> Seen:
        """A second look must see the same."""
        rules = self._rules
        if mover < 0:
            return mover, rules.chances(position) if mover == CHANCE else [], np.zeros(0)
        row = rules.observe(position)
        if not np.array_equal(row, rules.observe(position)):
            raise OutOfBounds("`observe` writes other features at a second look. Write them from the position alone.")
        return mover, rules.legal(position), row

    def _guess(self, position: Position, seen: Seen) -> None:
        guess = self.game.determinize(position, self._draw)
        if not _alike(seen, self._seen(guess, self._rules.to_move(guess, "determinize"))):
            raise OutOfBounds(
                "`determinize` gives a position that the player to move can tell from the true one: other seat, "
                "actions or features. Change only what that player cannot see."
            )
        if not _alike(seen, self._seen(position, self._rules.to_move(position))):
            raise OutOfBounds("`determinize` changes the position that it is given. Make another one.")

    def _returns(self, position: Position) -> list[float]:
        returns: list[float] = self._rules.returns(position).tolist()
        if self.game.won_or_lost and not is_won_or_lost(returns):
            raise OutOfBounds(
                f"`returns` gives {returns}, and won_or_lost = True says that they are 1 and -1, or 0 for both. Give "
                "those, or leave won_or_lost out."
            )
        return returns


def _alike(one: Seen, other: Seen) -> bool:
    return one[:2] == other[:2] and np.array_equal(one[2], other[2])
