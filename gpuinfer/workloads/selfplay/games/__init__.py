"""The built-in games, registered like anyone's, and the way to any game by its name."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpuinfer.config import blame, import_paths, registry
from gpuinfer.config.options import GivenValue, check
from gpuinfer.errors import UnknownName, UsageError
from gpuinfer.workloads.selfplay.game import Game, OutOfBounds, check_sizes
from gpuinfer.workloads.selfplay.python_game import PythonGame

SIZES = ("rules", "seats", "actions", "max_legal", "max_moves", "features", "words", "config")

FLAGS = ("players", "cards", "trump", "scoring")  # options of games that are flags of the command

_classes: dict[str, type[Game]] = {}  # those that a program has given itself, by the names that `name_of` gives them


def name_of(game: type[Game] | Game) -> tuple[str, dict[str, Any]]:
    """The name under which `build_game` has this class in this process, and the options of an object of it.

    Raises `UsageError` for what is no game. An object is made anew by its class and options.
    """
    kind = game if isinstance(game, type) else type(game)
    if not issubclass(kind, Game):
        raise UsageError(
            f"game={game!r} is no game. Give a name such as \"connect-four\", 'module:Class', or a class that derives "
            "from gpuinfer.workloads.selfplay.python_game.PythonGame."
        )
    options = {} if isinstance(game, type) else game.options.model_dump(exclude_unset=True)
    record = blame.record_of(kind)
    if record is not None and record.kind == "games":
        return record.name, options
    name = f"{kind.__module__}:{kind.__qualname__}"
    _classes[name] = kind
    return name, options


def why_local(kind: type[Game]) -> str | None:
    """Why no other process can import this class: where it is defined; None when others can."""
    if "<locals>" in kind.__qualname__:
        return "inside of a function"
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    if not os.path.isfile(file):
        return "in a notebook, or in a program without a file (standard input, python -c)"
    return None


def build_game(name: str, options: Mapping[str, Any]) -> Game:
    """The game of that name, or `module:Class`, with these options; None stands for an option that was not given.

    Of a game that has variants, `NAME:VARIANT`.

    Raises UsageError for an unknown game, and for options that it does not have or cannot play with.
    """
    kind, variant = _found(name)
    given = {
        key: GivenValue(value, f"--{key}" if key in FLAGS else f"--game-options {key}")
        for key, value in options.items()
        if value is not None
    }
    if twice := given.keys() & variant.keys():
        raise UsageError(f"game '{name}' names its {twice.pop()}, and --game-options too. Leave one of them out.")
    given |= variant
    with blame.blaming(kind, "__init__"):
        game: Game = kind(None, **check(kind.Options, given, f"game '{name}'"))
    if missing := [field for field in SIZES if not hasattr(game, field)]:
        raise UsageError(f"game '{name}' does not say its {', '.join(missing)}. Set them in its __init__.")
    try:
        check_sizes(game)
    except OutOfBounds as fault:
        raise UsageError(f"game '{name}': {fault}") from None
    if isinstance(game, PythonGame) and game.hidden and type(game).determinize is PythonGame.determinize:
        raise UsageError(
            f"game '{name}' hides something from its players (hidden = True) and has no `determinize`: its search "
            "would see what they cannot. Write `determinize`; set hidden = False where every player sees the whole "
            "position."
        )
    return game


def _found(name: str) -> tuple[type[Game], dict[str, GivenValue]]:
    """The class that the name means, and the option that it holds, if any."""
    registered, colon, variant = name.partition(":")
    if not colon:
        try:
            return registry.load("games", name), {}
        except UnknownName as error:
            module = name.removesuffix(".py")
            if not (found := import_paths.classes_in(Path(f"{module}.py"), "Game")):
                raise
            said = f"no game is installed as '{name}', but there is one in {module}.py"
            raise UsageError(f"{said}. Give --game {module}:{found[-1]}.") from error
    if any(record.name == registered for record in registry.listing("games")):
        kind: type[Game] = registry.load("games", registered)
        if kind.variant is not None:
            return kind, {kind.variant: GivenValue(variant, f"--game {registered}:…")}
        import_paths.in_working_folder()
        if find_spec(registered) is None:
            raise UsageError(f"game '{registered}' has no variants, and '{variant}' is none. Give --game {registered}.")
    return _imported(name), {}


def _imported(name: str) -> type[Game]:
    """What `module:Class` names; modules in the working folder count, as they do for `python -m`."""
    if name in _classes:
        return _classes[name]
    module, _, attribute = name.partition(":")
    if module.endswith(".py") or "/" in module:
        path = Path(module).with_suffix("")
        there = "" if path.parent == Path() else f", in the folder {path.parent}"
        raise UsageError(
            f"game '{name}' names a file, and a module is wanted. Give --game {path.name}:{attribute}{there}."
        )
    found = import_paths.load_named("game", name, "module:Class")
    if not (isinstance(found, type) and issubclass(found, Game)):
        raise UsageError(f"game '{name}' is not a gpuinfer.workloads.selfplay.game.Game. Derive it from that class.")
    return found
