"""Whether positions are played alike once they are turned as a game's `symmetries` say.

A turned position is known by its features alone. So it is looked for among those that random games came to. Where it
is, its legal actions must be the turned ones, and each must lead to what is as good for whoever moves; and from the
first position on both are played, turned and not, to their ends. Nothing is said of a game whose features do not tell
its positions apart, nor of one that hides something.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.positions.symmetries import checked
from gpuinfer.workloads.selfplay.bounded import OutOfBounds
from gpuinfer.workloads.selfplay.drawing import draw_of
from gpuinfer.workloads.selfplay.python_game import CHANCE, OVER, Position, PythonGame
from gpuinfer.workloads.selfplay.python_rules import CheckedRules

CURE = "Turn features and actions alike, or leave it out."


@dataclass(frozen=True, slots=True)
class Known:
    """A position in which somebody moves; what its actions lead to is told as it is however the board is turned."""

    position: Position
    mover: int
    leads: dict[int, tuple[Any, ...]]  # by legal action
    row: NDArray[Any]  # what `observe` writes


@dataclass(frozen=True, slots=True)
class Turn:
    """One of the symmetries; the last one stands for the position as it is."""

    number: int
    row: NDArray[np.int64]  # from where the features of `observe` come
    actions: NDArray[np.int64]


def refuse_symmetries(game: PythonGame, games: int, seconds: float) -> None:
    """Raises `OutOfBounds` for a symmetry that is none. Plays so many games, or as many as half of the time allows. The
    time is the processor's: a busy machine looks at as much.
    """
    symmetries = None if game.hidden else checked(game.symmetries(), game.features, game.actions, "the game")
    if symmetries is None:
        return
    first = game.actions  # the mask of legal actions stands before what is observed
    both = zip(symmetries.features, symmetries.actions, strict=True)
    turns = [Turn(number, features[first:] - first, actions) for number, (features, actions) in enumerate(both)]
    began, rules = time.thread_time(), CheckedRules(game)
    found = _reached(rules, games, began + seconds / 2)
    if found is None:
        return
    pool, starts = found
    pairs = [
        (one, there, turn)
        for turn in turns
        for one in pool.values()
        if (there := pool.get(one.row[turn.row].tobytes())) is not None
    ]
    for one, there, turn in pairs:
        _refuse(one, there, turn)
    at_first = [pair for pair in pairs if pair[0].row.tobytes() in starts]
    as_it_is = Turn(len(turns), np.arange(game.features - first), np.arange(game.actions))
    for number in range(games if at_first else 0):
        _play_both(rules, *at_first[number % len(at_first)], [*turns, as_it_is], random.Random(number))
        if time.thread_time() > began + seconds:
            break


def _reached(rules: CheckedRules, games: int, end: float) -> tuple[dict[bytes, Known], set[bytes]] | None:
    """Positions of random games by their features, and which of them are first ones. None where two have the same
    features and are played otherwise.
    """
    pool, starts = dict[bytes, Known](), set[bytes]()
    for number in range(games):
        moves, one = random.Random(number), _known(rules, rules.game.deal(draw_of(number)))
        if one is not None:
            starts.add(one.row.tobytes())
        while one is not None:
            if pool.setdefault(one.row.tobytes(), one).leads != one.leads:
                return None
            one = _known(rules, rules.apply(one.position, moves.choice(list(one.leads))))
        if time.thread_time() > end:
            break
    return pool, starts


def _play_both(
    rules: CheckedRules, one: Known, other: Known, turn: Turn, turns: list[Turn], moves: random.Random
) -> None:
    """Play on in both, as long as one is seen to be the other one turned."""
    at: tuple[Known, Known, Turn] | None = (one, other, turn)
    while at is not None:
        one, other, turn = at
        _refuse(one, other, turn)
        place = moves.choice(list(other.leads))
        after = _known(rules, rules.apply(one.position, int(turn.actions[place])))
        there = _known(rules, rules.apply(other.position, place))
        if after is None or there is None:
            return
        first = [turn, *turns]  # whoever moves next may see the board from another side
        at = next(((after, there, by) for by in first if np.array_equal(after.row[by.row], there.row)), None)


def _known(rules: CheckedRules, position: Position) -> Known | None:
    """None where nobody moves."""
    if (mover := rules.to_move(position)) < 0:
        return None
    leads = {action: _leads(rules, rules.apply(position, action), mover) for action in rules.legal(position)}
    return Known(position, mover, leads, rules.observe(position))


def _leads(rules: CheckedRules, position: Position, mover: int) -> tuple[Any, ...]:
    after = rules.to_move(position)
    if after == OVER:
        return OVER, tuple(np.roll(rules.returns(position), -mover).round(4).tolist())
    if after == CHANCE:
        return CHANCE, len(rules.chances(position))
    return (after - mover) % rules.game.seats, len(rules.legal(position))


def _refuse(one: Known, there: Known, turn: Turn) -> None:
    turned = {place: one.leads[action] for place, action in enumerate(turn.actions.tolist()) if action in one.leads}
    if turned.keys() != there.leads.keys():
        raise OutOfBounds(
            f"symmetry {turn.number} of `symmetries` turns a position into another one and its legal actions into "
            f"{_short(list(turned))}; there {_short(list(there.leads))} are legal. {CURE}"
        )
    for place, leads in turned.items():
        if leads != there.leads[place]:
            raise OutOfBounds(
                f"symmetry {turn.number} of `symmetries` turns action {turn.actions[place]} into {place}, and they "
                f"lead to different things: {_told(leads)}; {_told(there.leads[place])}. {CURE}"
            )


def _told(leads: tuple[Any, ...]) -> str:
    kind, said = leads
    if kind == OVER:
        return f"the end, with returns {list(said)} from the mover on"
    return f"chance with {said} outcomes" if kind == CHANCE else f"{said} legal actions of another position"


def _short(actions: list[int]) -> str:
    return str(actions) if len(actions) < 9 else f"[{', '.join(map(str, actions[:8]))}, …]"
