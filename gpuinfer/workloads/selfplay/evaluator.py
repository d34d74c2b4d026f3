"""From a block of leaves to its evaluations: by the run's own model, by two networks that play each other, each for the
seats of its side, or without any network.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.api import Infer, ModelSpec
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.workloads.selfplay import arrays
from gpuinfer.workloads.selfplay.arena import GameSlots
from gpuinfer.workloads.selfplay.game import Game

PAIR = 2  # games
TIE = 1e-6  # of the largest return: less between two sides is rounding


@dataclass(frozen=True)
class Pairing:
    """How the seats of every game are divided, half and half: by the game's number and the seed alone.

    Where they are an odd number, one side has a seat more, and the other has it in the pair's other game. Which seats
    the first game of a pair gives to whom is drawn at random.
    """

    seats: int
    seed: int

    def of(self, number: int) -> NDArray[np.bool_]:
        """bool [seats]: the run's own model has these, the opponent the others."""
        pair, swapped = divmod(number, PAIR)
        ours = np.zeros(self.seats, np.bool_)
        ours[random.Random(f"{self.seed}/{pair}").sample(range(self.seats), self.seats // 2)] = True
        return ~ours if swapped else ours


def points_of_pairing(returns: NDArray[np.float32], ours: NDArray[np.bool_]) -> float:
    """1 for a game that the model's seats win, ½ for a draw, 0 for one that they lose: by the mean return of either
    side. `returns`: float32 [seats].
    """
    values = returns.astype(np.float64)
    ahead = float(values[ours].mean() - values[~ours].mean())
    if abs(ahead) <= TIE * max(1.0, float(np.abs(values).max())):
        return 0.5
    return 1.0 if ahead > 0 else 0.0


OF_POINTS = ("finished", "returns", "sides")  # arrays


def points_of_games(games: Mapping[str, np.ndarray]) -> dict[int, float]:
    """The points of all games of a shard, by number, from the arrays of `OF_POINTS`."""
    scored = map(points_of_pairing, games["returns"], games["sides"])
    return dict(zip(games["finished"].tolist(), scored, strict=True))


Answers = tuple[np.ndarray, np.ndarray]  # policy logits float32 [rows, actions], values float32 [rows, seats]
Ask = Callable[[int], Coroutine[Any, Any, Answers]]
"""The answers to the first rows of an arena's block, as many as it says. They may lie in memory that the next call
writes anew."""

Answer = Callable[[NDArray[np.intp], np.ndarray, np.ndarray], Coroutine[Any, Any, None]]
"""Put the answers to these rows of the block into the same rows of logits and values."""


def network(game: Game, name: str, weights: str | None) -> ModelSpec:
    """The model of that name for this game; `weights`: the file that holds them."""
    return ModelSpec(
        name=name,
        weights=weights,
        inputs=game.features,
        input_dtype=game.feature_dtype,
        arguments={"actions": game.actions, "seats": game.seats},
    )


def rows_in_place(infer: Infer, game: Game, rows: int) -> np.ndarray | None:
    """Where the backend reads rows in place, if anywhere. Raises WorkError when that is not made for this game."""
    block = infer.block(rows)
    if block is None:
        return None
    if (block.shape, block.dtype) != ((rows, game.features), game.feature_dtype):
        raise WorkError(
            f"the backend gave room for {block.dtype} {list(block.shape)} where {game.feature_dtype} "
            f"{[rows, game.features]} was asked for. Mend its block(), or let it return None."
        )
    return np.asarray(block)


def as_answers(result: Any, rows: int, game: Game, who: str = "the model") -> Answers:
    """(policy logits float32 [rows, actions], values float32 [rows, seats]) of a model's answer."""
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise UsageError(
            f"{who} answered with {type(result).__name__}, not (policy logits, values). Return these two tensors."
        )
    logits, values = (np.require(part, np.float32, ("C", "A", "W")) for part in result)  # as the kernel is compiled
    expected = (rows, game.actions), (rows, game.seats)
    if (logits.shape, values.shape) != expected:
        raise WorkError(
            f"{who} answered with shapes {logits.shape} and {values.shape} where {expected[0]} and {expected[1]} "
            "were due. Mend the model, or choose the game that it was made for."
        )
    if not np.isfinite(values).all():  # the engine lets -inf pass, for the sake of the logits
        raise WorkError(f"{who} answered with -inf among its values {expected[1]}. Check its weights and inputs.")
    return logits, values


@contextlib.contextmanager
def one_network(infer: Infer, arena: GameSlots) -> Iterator[Ask]:
    """All rows go to the run's own model, from where they lie."""
    with infer.client() as me:

        async def ask(rows: int) -> Answers:
            return as_answers(await infer(arena.features[:rows], rows=rows, client=me), rows, arena.game)

        yield ask


@contextlib.contextmanager
def two_sides(
    arena: GameSlots, sides: Pairing, ours: AbstractContextManager[Answer], theirs: AbstractContextManager[Answer]
) -> Iterator[Ask]:
    """Each row goes to the side whose seat moves at the root of its tree."""
    rows_of_block, seats = len(arena.features), arena.game.seats
    known = np.full(arena.slots, arrays.IDLE, np.int64)  # the games for which `seats_of_ours` holds
    seats_of_ours = np.zeros((arena.slots, seats), np.bool_)
    all_logits = np.zeros((rows_of_block, arena.game.actions), np.float32)
    all_values = np.zeros((rows_of_block, seats), np.float32)

    with ours as answer, theirs as others:

        async def ask(rows: int) -> Answers:
            games = arena.games
            for slot in np.flatnonzero((games != known) & (games != arrays.IDLE)):
                seats_of_ours[slot], known[slot] = sides.of(int(games[slot])), games[slot]
            slots, movers = arena.roots()
            mine = np.asarray(seats_of_ours[slots, movers])  # bool [rows]: the run's own model moves there
            logits, values = all_logits[:rows], all_values[:rows]
            async with asyncio.TaskGroup() as group:
                for evaluate, whose in ((answer, mine), (others, ~mine)):
                    if len(places := np.flatnonzero(whose)):
                        group.create_task(evaluate(places, logits, values))
            return logits, values

        yield ask


@contextlib.contextmanager
def network_evaluator(infer: Infer, arena: GameSlots, who: str = "the model") -> Iterator[Answer]:
    """One of two sides that ask models."""
    mine = rows_in_place(infer, arena.game, len(arena.features))
    room = np.empty_like(arena.features) if mine is None else mine
    with infer.client() as me:

        async def answer(rows: NDArray[np.intp], logits: np.ndarray, values: np.ndarray) -> None:
            count = len(rows)
            block = room[:count]
            np.take(arena.features, rows, axis=0, out=block, mode="clip")  # which writes to `out` without a copy
            result = await infer(block, rows=count, client=me)
            logits[rows], values[rows] = as_answers(result, count, arena.game, who)

        yield answer


def _equal(arena: GameSlots, rows: NDArray[np.intp], logits: np.ndarray, values: np.ndarray) -> None:
    """Equal priors and values of 0, as inside the search."""
    logits[rows] = values[rows] = 0.0


WITHOUT_NETWORK: Mapping[str, Callable[[GameSlots, NDArray[np.intp], np.ndarray, np.ndarray], None]] = {
    "uniform": _equal,
    "rollout": lambda arena, *rows: arena.play_out(*rows),  # equal priors, and the returns of a random playout each
}
"""What answers these rows of an arena's block, into the same rows of logits and values, by the name of an opponent."""
