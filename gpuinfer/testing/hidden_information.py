"""Whether a search knows more than the player to move: positions that this player cannot tell apart are searched alike.

Compiled rules are asked from Python here, so that one comparison serves all games.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuinfer.testing.reference_search import random_linear, search_of
from gpuinfer.workloads.selfplay import arrays, kernels
from gpuinfer.workloads.selfplay.draw import Draw, draw_of
from gpuinfer.workloads.selfplay.game import Game
from gpuinfer.workloads.selfplay.python_arena import PythonArena
from gpuinfer.workloads.selfplay.python_game import CHANCE, OVER, Position, PythonGame

PLAYED_S, GAMES = 1.0, 400  # at random, to find positions that look alike
LOOKED_AT = 40  # positions with a choice of one game, at most
KEPT = 4  # positions that look alike, of different games
TOLD_APART, TOLD_S = 60, 3.0  # pairs of positions of which is found whether they differ, and for how long at most
CHAIN = 4  # guesses, each at the guess before: further from the truth than one may be
ALWAYS = 20  # positions, of which at least one is guessed otherwise than it is
PLAYOUTS, PLAYOUT = 3, 400  # by which two positions are told apart, and moves of one
PAIRS, COMPARED_S = 4, 5.0  # pairs of positions that are searched, and for how long at most; guesses too
SLOW_S = 0.02  # of one guess: a game that needs longer is not searched, which takes hundreds of them
TREES, SIMULATIONS = 96, 16  # of each search: a tree for each guess
FAR = 6.0  # standard errors between two means: by chance once in 500 million


def fault_of_hiding(game: PythonGame) -> str | None:
    """What the search can see and the player to move cannot; None where nothing was found."""
    end: float | None
    seen = list(_seen(game))
    groups: dict[bytes, list[Position]] = {}
    for each in seen:
        if len(group := groups.setdefault(each.known, [])) < KEPT:
            group.append(each.position)
    alike = _told_apart(game, ((group[0], other) for group in groups.values() for other in group[1:]))
    if not game.hidden:
        return OPEN if any(differ for _, _, differ in alike) else None
    guesses = list(_told_apart(game, _guessed(game, seen)))
    if len(guesses) >= ALWAYS and not any(differ for _, _, differ in guesses):
        return (
            f"`determinize` gave the true position each of {len(guesses)} times, so its search sees what is hidden. "
            "Draw the hidden part anew; set hidden = False only where every player sees the whole position."
        )
    began = time.monotonic()
    for one, _, _ in guesses[:PAIRS]:
        game.determinize(one, draw_of(0))
    if time.monotonic() - began > PAIRS * SLOW_S:
        return None
    for pairs in (alike, guesses):
        end = None
        for one, other in itertools.islice(((one, other) for one, other, differ in pairs if differ), PAIRS):
            first, second = _searched(game, one), _searched(game, other)
            gap = np.abs(first.mean(0) - second.mean(0))
            error = np.concatenate([first, second]).std(0) * np.sqrt(2 / TREES)
            if bool((gap > FAR * np.maximum(error, 1e-6)).any()):
                return CHEATS
            end = end or time.monotonic() + COMPARED_S
            if time.monotonic() > end:
                break
    return None


CHEATS = (
    "two positions that look alike to the player to move are searched differently, so its search knows something of "
    "what is hidden. `determinize` must draw from what that player knows alone, and keep nothing else of the position."
)
OPEN = (
    "two positions that look alike to the player to move, after the same actions, go on differently, and hidden = "
    "False says that nothing is hidden. Set hidden = True and write `determinize`, or show the difference in `observe`."
)


@dataclass(frozen=True, slots=True)
class PlayerView:
    """A position with a choice, and a digest of all that its mover has seen and what everybody has done."""

    position: Position
    known: bytes


def _seen(game: PythonGame) -> Iterator[PlayerView]:
    """Positions of random games."""
    end: float | None = None  # from the end of the first, which may compile
    for number in range(GAMES):
        draw, moves = draw_of(number), random.Random(number)
        position, done, found = game.deal(draw), hashlib.sha256(), 0
        views = [hashlib.sha256() for _ in range(game.seats)]  # of each seat: what it saw whenever it moved
        for _ in range(PLAYOUT):
            if (mover := game.to_move(position)) == OVER or found == LOOKED_AT:
                break
            if mover == CHANCE:  # whether anybody sees what comes is for `observe` to say
                position = game.apply(position, _outcome(game, position, moves))
                continue
            legal = list(game.legal(position))
            views[mover].update(_view(game, position, mover, legal))
            if len(legal) > 1:
                found += 1
                yield PlayerView(position, bytes([mover]) + done.digest() + views[mover].digest())
            action = moves.choice(legal)
            done.update(repr((mover, action)).encode())
            position = game.apply(position, action)
        end = end or time.monotonic() + PLAYED_S
        if time.monotonic() > end:
            return


def _guessed(game: PythonGame, seen: Sequence[PlayerView]) -> Iterator[tuple[Position, Position]]:
    """Positions, each with a guess at it."""
    draw = draw_of(GAMES)
    for one in seen[:: max(1, len(seen) // TOLD_APART)]:
        guess = one.position
        for _ in range(CHAIN):
            guess = game.determinize(guess, draw)
        yield one.position, guess


def _told_apart(
    game: PythonGame, pairs: Iterable[tuple[Position, Position]]
) -> Iterator[tuple[Position, Position, bool]]:
    """These pairs, and whether the two are different positions."""
    end: float | None = None  # from the end of the first, which may compile
    for one, other in itertools.islice(pairs, TOLD_APART):
        yield one, other, _fates(game, one) != _fates(game, other)
        end = end or time.monotonic() + TOLD_S
        if time.monotonic() > end:
            return


def _fates(game: PythonGame, position: Position) -> list[bytes]:
    """A digest of what is seen in each of some games that go on from there; the same position has the same."""
    return [_fate(game, position, random.Random(number)) for number in range(PLAYOUTS)]


def _fate(game: PythonGame, position: Position, moves: random.Random) -> bytes:
    digest = hashlib.sha256()
    for _ in range(PLAYOUT):
        if (mover := game.to_move(position)) == OVER:
            digest.update(np.round(np.asarray(game.returns(position), float), 4).tobytes())
            break
        if mover == CHANCE:
            digest.update(repr(game.chances(position)).encode())
            position = game.apply(position, _outcome(game, position, moves))
            continue
        legal = list(game.legal(position))
        digest.update(_view(game, position, mover, legal))
        position = game.apply(position, moves.choice(legal))
    return digest.digest()


def _view(game: PythonGame, position: Position, mover: int, legal: Sequence[int]) -> bytes:
    """All that the player to move sees."""
    row = np.zeros(game.features - game.actions, game.feature_dtype)
    game.observe(position, row)
    return repr((mover, legal)).encode() + row.tobytes()


def _outcome(game: PythonGame, position: Position, moves: random.Random) -> int:
    outcomes, chances = zip(*game.chances(position), strict=True)
    drawn: int = moves.choices(outcomes, chances)[0]
    return drawn


def _searched(game: PythonGame, position: Position) -> np.ndarray:
    """The shares of visits of the position's actions, float [TREES, actions]: each row by a tree of its own guess."""
    here = copy.copy(game)
    here.deal = lambda draw: position  # type: ignore[method-assign]
    search = search_of(
        evaluator=arrays.NETWORK, determinizations=1, simulations=SIMULATIONS, noise=0.0, temperature_moves=0
    )
    arena, model = PythonArena(here, search, TREES), random_linear(game)
    arena.add_games(range(TREES))
    logits = values = None
    while rows := arena.play(logits, values):
        found = arena.policies()
        if len(found) == TREES and all(found.values()):
            break
        logits, values = model(arena.features[:rows])
    return np.array([arena.policies()[number][0] for number in range(TREES)], float)


class CompiledAsPython(PythonGame):
    """A compiled game's rules, asked from Python. A position is its state, int64 [words]."""

    def __init__(self, original: Game, setup: Any = None, /, **options: Any) -> None:
        super().__init__(setup, **options)
        self.original = original
        for name in (
            "seats",
            "actions",
            "max_legal",
            "max_moves",
            "features",
            "feature_dtype",
            "hidden",
            "won_or_lost",
        ):
            setattr(self, name, getattr(original, name))
        self._rules = kernels.rules_of(original.rules)
        self._actions = np.zeros(original.max_legal, np.int16)
        self._scratch = np.zeros(original.scratch[0], np.int64), np.zeros(original.scratch[1], np.float64)

    def deal(self, draw: Draw) -> np.ndarray:
        state = np.zeros(self.original.words, np.int64)
        self._rules.deal(self.original.config, state, draw.stream)
        return state

    def to_move(self, position: np.ndarray) -> int:
        return int(self._rules.to_move(self.original.config, position))

    def legal(self, position: np.ndarray) -> list[int]:
        count = self._rules.legal(self.original.config, position, self._actions)
        legal: list[int] = self._actions[:count].tolist()
        return legal

    def apply(self, position: np.ndarray, action: int) -> np.ndarray:
        after = position.copy()
        self._rules.apply(self.original.config, after, np.int16(action))
        return after

    def returns(self, position: np.ndarray) -> list[float]:
        values = np.zeros(self.seats, np.float32)
        self._rules.returns(self.original.config, position, values)
        returns: list[float] = values.tolist()
        return returns

    def observe(self, position: np.ndarray, row: np.ndarray) -> None:
        whole = np.zeros(self.features, self.feature_dtype)
        count = self._rules.legal(self.original.config, position, self._actions)
        self._rules.observe(self.original.config, position, self._actions, count, whole)
        row[:] = whole[self.actions :]

    def determinize(self, position: np.ndarray, draw: Draw) -> np.ndarray:
        samples = np.zeros((1, self.original.words), np.int64)
        self._rules.determinize(self.original.config, position, samples, draw.stream, *self._scratch)
        guess: np.ndarray = samples[0]
        return guess
