"""By which rules games were played and whose networks they asked, as digests: records of others are not to be mixed.

The same source has the same digest wherever it lies, in whatever order it was imported and whatever its comments say.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, resolve_name
from pathlib import Path

from gpuinfer.workloads.selfplay.game import Game, is_own_module

SIZES = ("seats", "actions", "max_legal", "max_moves", "features", "words", "feature_dtype", "hidden", "won_or_lost")
INSTALLED = {"site-packages", "dist-packages"}  # folders whose modules have nothing to do with one another


def game_digest(game: Game) -> str:
    """Of its sizes and its rules: their source, or of our own games their version."""
    parts = [repr([(name, _plain(getattr(game, name))) for name in SIZES]).encode(), game.config.tobytes()]
    theirs = [kind.__module__ for kind in type(game).__mro__ if not is_own_module(kind.__module__)]
    theirs = [module for module in theirs if module not in sys.stdlib_module_names]
    parts.append(type(game).__qualname__.encode())  # a file may have several games
    parts += source_of(theirs) if theirs else [str(game.rules_version).encode()]
    parts += [_source_of_cell(kind) for kind in type(game).__mro__ if _is_of_cell(kind)]
    if game.compiled and not is_own_module(game.rules):
        from gpuinfer.workloads.selfplay import kernels  # which needs Numba: half a second, and ours are never asked

        files, constants = kernels.reached(kernels.rules_of(game.rules), ours=False)
        parts += sorted(_normal(Path(file)) for file in files) + sorted(constants)
    return _digest(parts)


def _is_of_cell(kind: type) -> bool:
    """Whether it is defined in a notebook or at a prompt: its module has no file."""
    return kind.__module__ == "__main__" and not getattr(sys.modules["__main__"], "__file__", None)


def _source_of_cell(kind: type) -> bytes:
    """As far as Python has it."""
    try:
        return ast.unparse(ast.parse(inspect.cleandoc(inspect.getsource(kind)))).encode()
    except (OSError, TypeError, SyntaxError):
        return b""


def network_digest(model: str | None) -> str | None:
    """Of the source of `module:factory`; None of a name of ours, which means the same everywhere."""
    if model is None or ":" not in model:
        return None
    return _digest(source_of([model.partition(":")[0]]))


def source_of(modules: Iterable[str]) -> list[bytes]:
    """That of these modules, and of those that they import from the same package or, outside of one, from the same
    folder. Imports no more than the packages above them.
    """
    pending, found = list(modules), dict[str, bytes]()
    homes = {home for name in pending if (home := _home(name)) is not None}
    packages = {name.partition(".")[0] for name in pending}
    while pending:
        name = pending.pop()
        if name in found or is_own_module(name) or (spec := _spec(name)) is None or not spec.origin:
            continue
        if name.partition(".")[0] not in packages and _home(name) not in homes:
            continue
        file = Path(spec.origin)
        if not file.is_file():
            continue
        found[name] = _normal(file)
        if file.suffix == ".py":
            pending += _imported(file, name if spec.submodule_search_locations else name.rpartition(".")[0])
    return [name.encode() + b"\n" + found[name] for name in sorted(found)]


def _imported(file: Path, package: str) -> Iterator[str]:
    """The modules that a file may mean: of `from a import b` both a and a.b."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _above(alias.name)
        elif isinstance(node, ast.ImportFrom):
            try:
                whole = resolve_name("." * node.level + (node.module or ""), package or None)
            except ImportError:
                continue
            yield from _above(whole)
            yield from (f"{whole}.{alias.name}" for alias in node.names)


def _above(name: str) -> Iterator[str]:
    """The module and the packages that it lies in."""
    parts = name.split(".")
    return (".".join(parts[: count + 1]) for count in range(len(parts)))


def _home(name: str) -> Path | None:
    """The folder in which a module of no package, or its outermost package, lies; None where it is installed."""
    top = _spec(name.partition(".")[0])
    if top is None or not (top.origin or top.submodule_search_locations):
        return None
    within = list(top.submodule_search_locations or [])
    folder = Path(within[0]).parent if within else Path(top.origin or "").parent
    return None if INSTALLED & set(folder.parts) else folder


def _spec(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name)
    except (ImportError, ValueError, AttributeError):
        file = getattr(sys.modules.get(name), "__file__", None)  # such as `__main__`
        return ModuleSpec(name, None, origin=file) if file else None
    except Exception:  # noqa: BLE001  a package may raise anything
        return None


def _normal(file: Path) -> bytes:
    """The source without comments and blank lines; of what is no Python all of it."""
    content = file.read_bytes()
    try:
        return ast.unparse(ast.parse(content)).encode()
    except (SyntaxError, ValueError, RecursionError):
        return content


def _plain(value: object) -> object:
    """A size, by its number alone: 2 and np.int64(2) are the same."""
    return value if isinstance(value, str | bool) else int(value)  # type: ignore[call-overload]


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:16]
