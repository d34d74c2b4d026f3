"""What a game promises: sizes that hold, rules that are the same compiled and plain, a search like the textbook's."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gpuinfer.testing.findings import Examination, Finding, check_options, run_bounded
from gpuinfer.testing.hidden import CompiledAsPython, fault_of_hiding
from gpuinfer.testing.python_games import HIDDEN, check_python_game
from gpuinfer.testing.reference import Table, Thinker, Tree, random_linear
from gpuinfer.workloads.selfplay import arrays, bounded, games, kernels, playthrough, rehearsal
from gpuinfer.workloads.selfplay.game import Game
from gpuinfer.workloads.selfplay.python_game import PythonGame
from gpuinfer.workloads.selfplay.turned import refuse_symmetries

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
    built.append(games.build(name, options))
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
    found = playthrough.played(game, kernels.rules_of(game.rules), range(count), float("inf"), plain=False)
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
            for action, visits in Tree(game, root, model, EXPLORATION).visits(SIMULATIONS).items():
                expected[action] += visits
        found = np.rint(thinker.finish(model) * TREES * (SIMULATIONS - 1))
        if found.tolist() != expected.tolist():
            return (
                f"after {SIMULATIONS} simulations its search visits {_visits(found)}, a plain one {_visits(expected)}. "
                "Rules that answer one position in two ways, or look at more than config and state, do that."
            )
    return None


def _positions(game: Game, count: int) -> Iterator[Table]:
    """Positions with a choice, from random games."""
    moves = random.Random(0)
    for number in range(count):
        table = Table(game, 0, number)
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
