"""What a game in Python promises: sizes that hold, positions that stay as they are, the same game in any company."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuinfer.testing.findings import Examination
from gpuinfer.testing.hidden import fault_of_hiding
from gpuinfer.testing.reference import random_linear, search_of
from gpuinfer.workloads.selfplay import arrays
from gpuinfer.workloads.selfplay.drawing import Draw, seed_stream
from gpuinfer.workloads.selfplay.game import is_won_or_lost
from gpuinfer.workloads.selfplay.python_arena import PythonArena
from gpuinfer.workloads.selfplay.python_game import CHANCE, OVER, Position, PythonGame, raised

PLAYED_S, GAMES = 1.0, 200  # at random, each position looked at
LOOKED_AT = 200  # positions of one game, at most: the longest ones have thousands
SEARCHED, SIMULATIONS = 3, 12  # games played by search, and simulations of each move
MOVES = 20  # of each, at most

PLAYS = "plays within its sizes, and leaves positions as they are"
COMPANY = "is played the same in any company"
HIDDEN = "is searched without what is hidden from the player to move"


class Broken(Exception):
    """What a game does wrong, and the cure."""


def check_python_game(game: PythonGame, examiner: Examination, long_s: float) -> None:
    """Every promise of `workloads.selfplay.python_game`; `long_s`: what each check may take."""
    if not examiner.check(PLAYS, lambda: _fault_of_play(game), long_s):
        for other in (COMPANY, HIDDEN):
            examiner.skip(other, "its rules do not hold")
        return
    if examiner.check(COMPANY, lambda: _fault_of_company(game), long_s):
        examiner.check(HIDDEN, lambda: fault_of_hiding(game), long_s)
    else:
        examiner.skip(HIDDEN, f"'{COMPANY}' does not hold")


def _fault_of_play(game: PythonGame) -> str | None:
    end = time.monotonic() + PLAYED_S
    try:
        for number in range(GAMES):
            Playthrough(game, number).play()
            if time.monotonic() > end:
                break
    except Broken as fault:
        return str(fault)
    except Exception as error:  # noqa: BLE001 (rules may raise anything)
        return str(raised(game, error))
    return None


class Playthrough:
    """One game at random; the first two go to the edges: always the first action, always the last."""

    def __init__(self, game: PythonGame, number: int) -> None:
        self.game, self._number = game, number
        self._moves = random.Random(number)
        stream = np.zeros(2, np.uint64)
        seed_stream(stream, 0, number)
        self._draw = Draw(stream)

    def play(self) -> None:
        """Raises `Broken`."""
        game, position, made, looked = self.game, self.game.deal(self._draw), 0, 0
        while (mover := self._mover(position)) != OVER:
            actions = self._outcomes(position) if mover == CHANCE else self._legal(position, mover)
            action = (
                actions[0] if self._number == 0 else actions[-1] if self._number == 1 else self._moves.choice(actions)
            )
            before = self._seen(position, mover, actions) if looked < LOOKED_AT else None
            if before is not None and mover >= 0 and len(actions) > 1:
                self._guess(position, mover, before)
            after = game.apply(position, action)
            if before is not None and not _alike(before, self._seen(position, self._mover(position), actions)):
                raise Broken(
                    "`apply` changes the position that it is given. Make another one: the tree keeps them all."
                )
            looked, position = looked + 1, after
            if mover >= 0:
                made += 1
            if made > game.max_moves:
                raise Broken(f"a game goes on after {game.max_moves} moves. Declare max_moves of the longest one.")
        self._returns(position)

    def _mover(self, position: Position) -> int:
        mover = self.game.to_move(position)
        if not (isinstance(mover, int) and CHANCE <= mover < self.game.seats):
            raise Broken(
                f"`to_move` says {mover!r} where seats = {self.game.seats}. Say a seat, counted from 0, OVER or CHANCE."
            )
        return mover

    def _outcomes(self, position: Position) -> list[int]:
        outcomes = self.game.chances(position)
        total = sum(chance for _, chance in outcomes)
        if not outcomes or not math.isclose(total, 1.0, abs_tol=1e-3) or any(chance <= 0 for _, chance in outcomes):
            raise Broken(f"`chances` adds up to {total:g}. Name each outcome that can happen; together they are 1.")
        return [action for action, _ in outcomes]

    def _legal(self, position: Position, mover: int) -> list[int]:
        game, legal = self.game, list(self.game.legal(position))
        if not 1 <= len(legal) <= game.max_legal:
            cure = "Say OVER in `to_move`" if not legal else f"Declare max_legal = {len(legal)} or more"
            raise Broken(f"`legal` names {len(legal)} actions of seat {mover}; max_legal = {game.max_legal}. {cure}.")
        if legal != sorted(set(legal)) or not 0 <= legal[0] <= legal[-1] < game.actions:
            raise Broken(
                f"`legal` names {legal[:8]}. Name each action once, in ascending order, 0 … {game.actions - 1}."
            )
        return legal

    def _seen(self, position: Position, mover: int, actions: Sequence[int]) -> tuple[Any, ...]:
        """All that the position says of itself; a second look must say the same."""
        if mover < 0:
            return mover, list(actions), np.zeros(0)
        game = self.game
        rows = np.zeros((2, game.features - game.actions), game.feature_dtype)
        for row in rows:
            game.observe(position, row)
        if not np.array_equal(*rows):
            raise Broken("`observe` writes other features at a second look. Write them from the position alone.")
        if not np.isfinite(rows.astype(float)).all():
            raise Broken("`observe` writes features that are not finite. A network answers NaN to those.")
        return mover, list(game.legal(position)), rows[0]

    def _guess(self, position: Position, mover: int, seen: tuple[Any, ...]) -> None:
        guess = self.game.determinize(position, self._draw)
        guessed = self._mover(guess)
        if guessed != mover or not _alike(seen, self._seen(guess, guessed, ())):
            raise Broken(
                "`determinize` gives a position that the player to move can tell from the true one: other seat, "
                "actions or features. Change only what that player cannot see."
            )
        if not _alike(seen, self._seen(position, mover, ())):
            raise Broken("`determinize` changes the position that it is given. Make another one.")

    def _returns(self, position: Position) -> None:
        returns = list(self.game.returns(position))
        if len(returns) != self.game.seats or not all(map(math.isfinite, returns)):
            raise Broken(f"`returns` gives {returns[:8]} for seats = {self.game.seats}. Give each a finite number.")
        if self.game.won_or_lost and not is_won_or_lost(returns):
            raise Broken(
                f"`returns` gives {returns}, and won_or_lost = True says that they are 1 and -1, or 0 for both. Give "
                "those, or leave won_or_lost out."
            )


def _alike(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return one[0] == other[0] and one[1] == other[1] and np.array_equal(one[2], other[2])


def _fault_of_company(game: PythonGame) -> str | None:
    """The same games by search, each alone and several at once: the moves that both came to must be the same."""
    alone = {number: moves for each in range(SEARCHED) for number, moves in _searched(game, [each]).items()}
    for number, together in _searched(game, range(SEARCHED)).items():
        for move, (one, other) in enumerate(zip(alone[number], together, strict=False)):
            if not np.array_equal(one, other):
                return (
                    f"at move {move} of game {number} its search goes another way when other games are played beside "
                    "it. Rules that remember something from one position to the next do that: answer from the position "
                    "alone."
                )
    return None


def _searched(game: PythonGame, numbers: Sequence[int]) -> dict[int, list[np.ndarray]]:
    """The policies of each game, move by move, as far as it got."""
    search = search_of(evaluator=arrays.NETWORK, determinizations=2 if game.hidden else 1, simulations=SIMULATIONS)
    arena, model = PythonArena(game, search, len(numbers)), random_linear(game)
    arena.add_games(numbers)
    logits = values = None
    for _ in range(MOVES * SIMULATIONS):
        if not (rows := arena.play(logits, values)):
            break
        logits, values = model(arena.features[:rows])
    return arena.policies()
