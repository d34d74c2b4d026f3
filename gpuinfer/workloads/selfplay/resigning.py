"""Who may resign, and what comes of it. The search decides when somebody does: `puct.would_resign`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gpuinfer.errors import UsageError
from gpuinfer.positions import records
from gpuinfer.report.resignation import Ended
from gpuinfer.workloads.selfplay.arrays import NOBODY, OF_RESIGNATION
from gpuinfer.workloads.selfplay.game import Game, is_won_or_lost

CHECKED = 0.1  # of all games, as in AlphaGo Zero


def refuse(game: Game, name: str, threshold: float, simulations: int) -> None:
    """Raises `UsageError` for a game in which it is not clear what a player who resigns has lost, or a search that
    looks at no move.
    """
    given = f"--resign {threshold:g}"
    if game.seats != 2:
        seats = "1 player" if game.seats == 1 else f"{game.seats} players"
        raise UsageError(
            f"{given}: game '{name}' has {seats}, and who resigns loses to the one other. Leave --resign out."
        )
    if not game.won_or_lost:
        raise UsageError(
            f"{given}: game '{name}' does not say that it is won or lost, and by how much one loses who resigns is not "
            "known. Set won_or_lost = True in its class if its returns are 1 and -1, or 0 for both; else leave "
            "--resign out."
        )
    if simulations < 2:
        raise UsageError(
            f"{given}: a player resigns by what the best move is worth, and one simulation looks at no move. Ask for "
            "--simulations 2 or more."
        )


def refuse_returns(game: Game, returns: np.ndarray) -> None:
    """Raises `UsageError` for those of a game that was neither won, drawn nor lost. returns: float32 [games, seats]"""
    for one in returns.tolist():
        if not is_won_or_lost(one):
            raise UsageError(
                f"game '{type(game).__name__}' brought {one}, and says that it is won or lost: 1 and -1, or 0 for "
                "both. Leave --resign out, or mend `returns`."
            )


def ended(games: Mapping[str, np.ndarray]) -> dict[int, Sequence[bool | float]]:
    """By number, the fields of an `Ended` of each. `games`: the arrays of `arrays.OF_GAMES`."""
    numbers, rows = games["finished"].tolist(), (games[name] for name in ("returns", *OF_RESIGNATION))
    return {number: list(_ended(*one)) for number, *one in zip(numbers, *rows, strict=True)}


def _ended(returns: np.ndarray, loser: np.int8, checked: np.bool_, lowest: np.ndarray) -> Ended:
    unbeaten = returns >= 0
    return Ended(
        checked=bool(checked),
        resigned=bool(loser != NOBODY),
        false=bool(loser != NOBODY and unbeaten[loser]),
        lowest=float(lowest.min()),
        lowest_false=float(lowest[unbeaten].min()),
    )


def kept(folder: records.Folder) -> Mapping[int, Sequence[bool | float]]:
    """The same of all games in whole shards. Raises one of `records.UNREADABLE`."""
    found: dict[int, Sequence[bool | float]] = {}
    for shard in folder.shards():
        found |= ended(records.read(shard, ["finished", "returns", *OF_RESIGNATION]))
    return found
