"""Which positions are trained on in which step, and which are kept apart to see how well that goes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gpuinfer.gradients import TrainingBatch
from gpuinfer.positions.reading import Positions
from gpuinfer.positions.symmetries import Symmetries

ORDER, APART, TURNED = 1, 2, 3  # streams of random numbers
MOST_VALIDATED = 8192  # positions: more would tell little more


class Batches:
    """The batch of each step, by the seed and the step alone: so a run that goes on takes those it would have taken.

    Each position comes once an epoch, in an order of the epoch's own; what fills no batch at its end is left out. Where
    there are symmetries each is turned by one of them or by none, at random, as AlphaGo Zero does (Silver et al. 2017).
    """

    def __init__(
        self,
        positions: Positions,
        size: int,
        seed: int,
        validation_share: float,
        symmetries: Symmetries | None = None,
    ) -> None:
        self._symmetries = symmetries
        self._positions, self._seed = positions, seed
        apart = _games_apart(positions.game, validation_share, seed)
        self.rows = np.flatnonzero(~apart)
        self.validation = np.flatnonzero(apart)[:MOST_VALIDATED]
        self.size = min(size, len(self.rows))
        self.an_epoch = len(self.rows) // self.size
        self._epoch, self._order = -1, self.rows

    def at(self, step: int) -> TrainingBatch:
        """Without weights; the first step is 0."""
        epoch, place = divmod(step, self.an_epoch)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, ORDER, epoch]).permutation(self.rows)
            self._epoch = epoch
        batch = self._made(self._order[place * self.size : (place + 1) * self.size])
        if self._symmetries is not None:
            self._turn(batch, self._symmetries, step)
        return batch

    def _turn(self, batch: TrainingBatch, symmetries: Symmetries, step: int) -> None:
        drawn = np.random.default_rng([self._seed, TURNED, step]).integers(
            len(symmetries) + 1, size=len(batch.features)
        )
        for number, (features, actions) in enumerate(zip(symmetries.features, symmetries.actions, strict=True)):
            rows = np.flatnonzero(drawn == number)
            batch.features[rows] = batch.features[np.ix_(rows, features)]
            for name in ("policy", "legal"):
                batch.targets[name][rows] = batch.targets[name][np.ix_(rows, actions)]

    def validating(self) -> Iterator[TrainingBatch]:
        """The positions that are kept apart."""
        for start in range(0, len(self.validation), self.size):
            yield self._made(self.validation[start : start + self.size])

    def _made(self, rows: NDArray[np.int64]) -> TrainingBatch:
        of = self._positions
        return TrainingBatch(
            of.observation[rows],
            {"policy": of.policy[rows], "value": of.value[rows], "legal": of.legal[rows]},
        )


def _games_apart(game: NDArray[np.int64], share: float, seed: int) -> NDArray[np.bool_]:
    """Whole games: positions of one game are alike, and would tell what has been learnt by heart."""
    games = np.unique(game)
    count = round(share * len(games))
    if share > 0 and len(games) > 1:
        count = min(max(1, count), len(games) - 1)
    drawn = np.random.default_rng([seed, APART]).permutation(games)[:count]
    return np.isin(game, drawn)
