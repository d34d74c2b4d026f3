"""Who holds which seats where two networks play each other, and what comes of a game.

Games 2k and 2k + 1 are a pair: dealt alike, with the sides swapped, so that neither gains by its cards or its seats.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuinfer.positions import records

PAIR = 2  # games
TIE = 1e-6  # of the largest return: less between two sides is rounding


@dataclass(frozen=True)
class Sides:
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


def points(returns: NDArray[np.float32], ours: NDArray[np.bool_]) -> float:
    """1 for a game that the model's seats win, ½ for a draw, 0 for one that they lose: by the mean return of either
    side. `returns`: float32 [seats].
    """
    values = returns.astype(np.float64)
    ahead = float(values[ours].mean() - values[~ours].mean())
    if abs(ahead) <= TIE * max(1.0, float(np.abs(values).max())):
        return 0.5
    return 1.0 if ahead > 0 else 0.0


def kept(folder: records.Folder) -> Mapping[int, float]:
    """The points of all games in whole shards, by number. Raises one of `records.UNREADABLE`."""
    found: dict[int, float] = {}
    for shard in folder.shards():
        read = records.read(shard, ["finished", "returns", "sides"])
        scored = map(points, read["returns"], read["sides"])
        found.update(zip(read["finished"].tolist(), scored, strict=True))
    return found
