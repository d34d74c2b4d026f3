"""How a game's positions can be turned or mirrored, as its records say it: training learns from them turned, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import UsageError


@dataclass(frozen=True, slots=True, eq=False)
class Symmetries:
    """Permutations, one of either a symmetry; the identity is none of them. A turned row has `row[features[k]]`, and
    `policy[actions[k]]` in the place of what it had.
    """

    features: NDArray[np.int64]  # [symmetries, features]
    actions: NDArray[np.int64]  # [symmetries, actions]

    def __len__(self) -> int:
        return len(self.actions)

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"features": self.features.tolist(), "actions": self.actions.tolist()}


def checked(pairs: Sequence[Any], features: int, actions: int, who: str) -> Symmetries | None:
    """Those of `Game.symmetries`, pairs of permutations of features and of actions; None where there are none.

    Raises `UsageError`, which names `who` declares them, for what is no symmetry of such rows.
    """
    for number, pair in enumerate(pairs):
        try:
            rows, moves = (np.asarray(part) for part in pair)
            fits = _permutes(rows, features) and _permutes(moves, actions) and (rows[:actions] == moves).all()
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise UsageError(
                f"{who}: symmetry {number} is no permutation of {features} features with one of {actions} actions that "
                "has the first features, the mask of legal actions, permuted alike. Mend `symmetries`."
            )
    if not len(pairs):
        return None
    whole = [np.array(parts, np.int64) for parts in zip(*pairs, strict=True)]
    return Symmetries(features=whole[0], actions=whole[1])


def _permutes(places: NDArray[Any], count: int) -> bool:
    return places.shape == (count,) and places.dtype.kind in "iu" and set(places.tolist()) == set(range(count))
