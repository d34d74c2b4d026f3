"""What a game in Python promises: sizes that hold, positions that stay as they are, the same game in any company."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpuinfer.testing.findings import Examination, Finding
from gpuinfer.testing.hidden import fault_of_hiding
from gpuinfer.testing.reference import random_linear, search_of
from gpuinfer.workloads.selfplay import arrays
from gpuinfer.workloads.selfplay.python_arena import PythonArena
from gpuinfer.workloads.selfplay.python_game import PythonGame
from gpuinfer.workloads.selfplay.python_playthrough import fault_of

PLAYED_S, GAMES = 1.0, 200  # at random, each position looked at
SEARCHED, SIMULATIONS = 3, 12  # games played by search, and simulations of each move
MOVES = 20  # of each, at most

PLAYS = "plays within its sizes, and leaves positions as they are"
COMPANY = "is played the same in any company"
HIDDEN = "is searched without what is hidden from the player to move"


def check_python_game(game: PythonGame, examiner: Examination, long_s: float) -> None:
    """Every promise of `workloads.selfplay.python_game`; `long_s`: what each check may take."""
    returned: list[list[float]] = []
    if not examiner.check(PLAYS, lambda: fault_of(game, range(GAMES), PLAYED_S, returned), long_s):
        for other in (COMPANY, HIDDEN):
            examiner.skip(other, "its rules do not hold")
        return
    if (most := max(abs(one) for returns in returned for one in returns)) > 1:
        said = (
            f"a return is as large as {most:g}: records keep it, but --exploration and a network's tanh are for -1 … 1."
            " Divide by the most that can be won."
        )
        examiner.add(Finding("returns are between -1 and 1", True, said))
    if examiner.check(COMPANY, lambda: _fault_of_company(game), long_s):
        examiner.check(HIDDEN, lambda: fault_of_hiding(game), long_s)
    else:
        examiner.skip(HIDDEN, f"'{COMPANY}' does not hold")


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
