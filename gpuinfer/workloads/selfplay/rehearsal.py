"""A game is played in a child process before a run plays it. Compiled code would write beyond its arrays where a size
is too small, which corrupts memory or kills; rules in Python would put what is no number into records.

A game of ours is not rehearsed: its tests do that. One of yours is, once for each version of its rules and its sizes.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuinfer.errors import UsageError
from gpuinfer.host import children
from gpuinfer.workloads.selfplay import games, rules_digest
from gpuinfer.workloads.selfplay.game import Game, is_own_module
from gpuinfer.workloads.selfplay.python_game import PythonGame

SECONDS = 1.0  # of play before a run
GAMES = 200  # at most
GRACE_S = 20.0  # beyond the time of play, for one call that takes long
START_S = 60.0  # to import Numba on a busy machine, and to compile the rules where need be
LOOKING = ("playthrough.py", "python_game.py")

HOW = {True: {"NUMBA_DISABLE_JIT": "1"}, False: {"NUMBA_BOUNDSCHECK": "1"}, None: {}}
"""What the child is told of Numba, where compiled rules are played plain, compiled, or not at all."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What came of it. `digests` are those of the games played, to be compared with compiled play."""

    fault: str | None
    games: int = 0
    positions: int = 0
    digests: tuple[str, ...] = ()
    plain: bool = True  # False: compiled with bounds checked, as the rules use what plain Python does not have


_played_here: weakref.WeakSet[type[Game]] = weakref.WeakSet()  # classes that no child process can import


def is_due(game: Game) -> bool:
    """Whether rules that are not ours have not been rehearsed as they are now."""
    if _is_of_this_process(game):
        return type(game) not in _played_here
    return not is_own_module(type(game).__module__) and not _mark(game).exists()


def ensure(game: Game, name: str, options: Mapping[str, Any]) -> None:
    """Rehearse it, and remember that. Blocks for a few seconds. Raises `UsageError` for what would harm the run."""
    here = _is_of_this_process(game)
    fault = _fault_here(game) if here else rehearse(name, options, in_python=not game.compiled).fault
    if fault is not None:
        raise UsageError(f"game '{name}' is not played, since it does what it must not: {fault}")
    if here:
        _played_here.add(type(game))
    else:
        _mark(game).touch()


def _is_of_this_process(game: Game) -> bool:
    """Whether a child process cannot import it: it is defined in the program itself."""
    return type(game).__module__ == "__main__" or games.why_local(type(game)) is not None


def _fault_here(game: Game) -> str | None:
    """What is wrong with it, as games in a thread of this process show. Raises `UsageError` for compiled rules."""
    if not isinstance(game, PythonGame):
        raise UsageError(
            f"game '{type(game).__name__}' has compiled rules, which are first tried in a process of their own, and "
            "that cannot import a class of the program itself. Write it into a file of its own, such as mygame.py."
        )
    from gpuinfer.workloads.selfplay.playthrough import fault_of  # imports Numba

    found: list[str | None] = []
    thread = threading.Thread(
        target=lambda: found.append(fault_of(game, range(GAMES), SECONDS, [])), name="gpuinfer rehearsal", daemon=True
    )
    thread.start()
    thread.join(SECONDS + GRACE_S)
    return found[0] if found else f"it did not come back within {SECONDS + GRACE_S:g} s"


def rehearse(
    name: str, options: Mapping[str, Any], seconds: float = SECONDS, count: int = GAMES, *, in_python: bool = False
) -> Rehearsal:
    """Play it for so long: in plain Python, or compiled with bounds checked where plain Python cannot. `in_python`: the
    rules are Python by themselves.
    """
    order: dict[str, Any] = {
        "game": name,
        "options": dict(options),
        "seconds": seconds,
        "games": count,
        "limit_s": seconds + GRACE_S,
    }
    if in_python:
        found = _child({**order, "plain": None})
        return Rehearsal(found["odd"] if "odd" in found else found["fault"])
    found = _child({**order, "plain": True})
    plain = found.get("odd") is None
    if not plain:
        odd = found["odd"]
        found = _child({**order, "plain": False, "limit_s": order["limit_s"] + START_S})
        if found.get("odd") is not None:
            found["fault"] = f"{odd}. Compiled, with bounds checked: {found['odd']}."
    digests = tuple(found.get("digests", ()))
    return Rehearsal(found.get("fault"), found.get("games", 0), found.get("positions", 0), digests, plain)


def _child(order: Mapping[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="gpuinfer-rehearsal-") as cache:
        how = HOW[order["plain"]] | ({"NUMBA_CACHE_DIR": cache} if order["plain"] is False else {})
        limit_s = order["limit_s"] + START_S
        program = [sys.executable, "-m", "gpuinfer.workloads.selfplay.playthrough"]
        done = children.run_program(program, limit_s, json.dumps(order).encode(), children.with_our_path(**how))
    if done.code is None:
        return {"odd": f"TimeoutError: it did not come back within {limit_s:g} s"}
    try:
        found: dict[str, Any] = json.loads(done.out)
    except ValueError:
        return {"odd": f"its process ended with {done.code}: {done.last_words}"}
    return found


def _mark(game: Game) -> Path:
    """The file that says that this game was rehearsed, where compiled code is kept."""
    from gpuinfer.models import kernel_cache  # which needs Numba: half a second, and ours are never asked

    looked_at = [Path(__file__).with_name(name).read_bytes() for name in LOOKING]  # what looks at more is to look again
    known = [rules_digest.game_digest(game), repr(game.scratch), repr(game.options.model_dump())]
    return kernel_cache.cache_folder([text.encode() for text in known] + looked_at) / "rehearsed"
