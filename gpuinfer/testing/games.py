"""What a game promises: sizes that hold, rules that are the same compiled and plain, a search like the textbook's; and
of a game in Python, positions that stay as they are and the same game in any company.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gpuinfer.testing.findings import Examination, Finding, check_options, run_bounded
from gpuinfer.testing.hidden_information import CompiledAsPython, fault_of_hiding
from gpuinfer.testing.reference_search import ReferenceTable, ReferenceTree, Thinker, random_linear, search_of
from gpuinfer.workloads.selfplay import arrays, games, kernels, playthrough, rehearsal
from gpuinfer.workloads.selfplay import game as bounded
from gpuinfer.workloads.selfplay.game import Game
from gpuinfer.workloads.selfplay.playthrough import fault_of, refuse_symmetries
from gpuinfer.workloads.selfplay.python_arena import PythonArena
from gpuinfer.workloads.selfplay.python_game import PythonGame

PLAYED_S, GAMES = 1.0, 200  # at random, each position looked at
PYTHON_SEARCHED, PYTHON_SIMULATIONS = 3, 12  # games played by search, and simulations of each move
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
        note = (
            f"a return is as large as {most:g}: records keep it, but --exploration and a network's tanh are for -1 … 1."
            " Divide by the most that can be won."
        )
        examiner.add(Finding("returns are between -1 and 1", True, note))
    if examiner.check(COMPANY, lambda: _fault_of_company(game), long_s):
        examiner.check(HIDDEN, lambda: fault_of_hiding(game), long_s)
    else:
        examiner.skip(HIDDEN, f"'{COMPANY}' does not hold")


def _fault_of_company(game: PythonGame) -> str | None:
    """The same games by search, each alone and several at once: the moves that both came to must be the same."""
    alone = {number: moves for each in range(PYTHON_SEARCHED) for number, moves in _searched(game, [each]).items()}
    for number, together in _searched(game, range(PYTHON_SEARCHED)).items():
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
    search = search_of(
        evaluator=arrays.NETWORK, determinizations=2 if game.hidden else 1, simulations=PYTHON_SIMULATIONS
    )
    arena, model = PythonArena(game, search, len(numbers)), random_linear(game)
    arena.add_games(numbers)
    logits = values = None
    for _ in range(MOVES * PYTHON_SIMULATIONS):
        if not (rows := arena.play(logits, values)):
            break
        logits, values = model(arena.features[:rows])
    return arena.policies()


REHEARSED_S = 3.0  # of plain play
TURNED_GAMES, TURNED_S = 1000, 6.0  # of plain play, turned and not
SEARCHED = 4  # positions that the compiled search and the plain one both search
SIMULATIONS, TREES = 24, 2
EXPLORATION = 1.5
COMPILING = 24  # limits that compiling may take

PLAIN = "plays within its sizes, in plain Python with bounds checked"
COMPILED = "plays the same when compiled"
TURNED = "is played alike when it is turned as its symmetries say"
SEARCH = "is searched as a plain search of the textbook would"


def check_game(
    game: type[Game],
    options: Mapping[str, Any] | None = None,
    timeout_s: float = 30.0,
    *,
    examiner: Examination | None = None,
) -> list[Finding]:
    """Every promise of `workloads.selfplay.game`, or of `python_game` there, with these options. The class must be
    importable by its name.

    Compiled rules are only run once they have been played with their bounds checked, in a process of their own.
    """
    name = f"{game.__module__}:{game.__qualname__}"

    def check(examiner: Examination) -> None:
        built: list[Game] = []
        rehearsed: list[rehearsal.Rehearsal] = []
        long_s = COMPILING * examiner.limit_s
        if not examiner.check("builds", lambda: _fault_of_build(name, options or {}, built)):
            return
        check_options(built[0], examiner)
        if isinstance(built[0], PythonGame):
            check_python_game(built[0], examiner, long_s)
            return
        if not examiner.check(PLAIN, lambda: _fault_of_rehearsal(name, options or {}, rehearsed), long_s):
            for other in (COMPILED, SEARCH, HIDDEN):
                examiner.skip(other, "compiled, it would write where it may not")
            return
        examiner.check(COMPILED, lambda: _fault_of_compiling(built[0], rehearsed[0]), long_s)
        examiner.check(SEARCH, lambda: _fault_of_search(built[0]), long_s)
        examiner.check(HIDDEN, lambda: fault_of_hiding(CompiledAsPython(built[0])), long_s)
        if type(built[0]).symmetries is not Game.symmetries:
            examiner.check(TURNED, lambda: _fault_of_turning(built[0]), long_s)

    return run_bounded(check, examiner or Examination(timeout_s))


def _fault_of_build(name: str, options: Mapping[str, Any], built: list[Game]) -> str | None:
    built.append(games.build_game(name, options))
    if built[0].compiled:
        kernels.rules_of(built[0].rules)
    return None


def _fault_of_rehearsal(name: str, options: Mapping[str, Any], rehearsed: list[rehearsal.Rehearsal]) -> str | None:
    rehearsed.append(rehearsal.rehearse(name, options, REHEARSED_S))
    return rehearsed[0].fault


def _fault_of_compiling(game: Game, rehearsed: rehearsal.Rehearsal) -> str | None:
    """The same games again, with the rules as the search calls them."""
    if not rehearsed.plain:
        return None
    count = len(rehearsed.digests)
    found = playthrough.played(game, kernels.rules_of(game.rules), range(count), float("inf"))
    if fault := found["fault"] or found["odd"]:
        return str(fault)
    for number, (plain, compiled) in enumerate(zip(rehearsed.digests, found["digests"], strict=True)):
        if plain != compiled:
            return (
                f"game {number} goes another way compiled than in plain Python: seats, actions, features or returns "
                "differ. Look for integers that overflow, for mixed int64 and uint64, and for memory never written."
            )
    return None


def _fault_of_turning(game: Game) -> str | None:
    in_python = CompiledAsPython(game)
    in_python.symmetries = game.symmetries  # type: ignore[method-assign]
    try:
        refuse_symmetries(in_python, TURNED_GAMES, TURNED_S)
    except bounded.OutOfBounds as fault:
        return str(fault)
    return None


def _fault_of_search(game: Game) -> str | None:
    """Visits, tree by tree, on a model whose answers never tie."""
    model = random_linear(game)
    thinker = Thinker(
        game, evaluator=arrays.NETWORK, determinizations=TREES, simulations=SIMULATIONS, exploration=EXPLORATION
    )
    for table in _positions(game, SEARCHED):
        thinker.begin(table.state)
        expected = np.zeros(game.actions)
        for root in thinker.roots:
            for action, visits in ReferenceTree(game, root, model, EXPLORATION).visits(SIMULATIONS).items():
                expected[action] += visits
        found = np.rint(thinker.finish(model) * TREES * (SIMULATIONS - 1))
        if found.tolist() != expected.tolist():
            return (
                f"after {SIMULATIONS} simulations its search visits {_visits(found)}, a plain one {_visits(expected)}. "
                "Rules that answer one position in two ways, or look at more than config and state, do that."
            )
    return None


def _positions(game: Game, count: int) -> Iterator[ReferenceTable]:
    """Positions with a choice, from random games."""
    moves = random.Random(0)
    for number in range(count):
        table = ReferenceTable(game, 0, number)
        for _ in range(moves.randrange(max(1, game.max_moves // 2))):
            if table.over:
                break
            table.play(moves.choice(table.legal()))
        while not table.over and len(table.legal()) == 1:
            table.play(*table.legal())
        if not table.over:
            yield table


def _visits(counts: np.ndarray) -> str:
    return "{" + ", ".join(f"{action}: {counts[action]:.0f}" for action in np.flatnonzero(counts)[:6]) + "}"
