"""Which files may hold tests of a marker, told by their text: the others need not be imported to find that they do not.

A test has no marker that stands, as pytest.mark.NAME, neither in its file nor in a helper of the tests that the file
imports. All tests of a file have those of its `pytestmark`. Whoever collects asks `is_surprised_by` whether that holds.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
DECISIVE = frozenset({"thorough", "soak", "gpu", "system", "vllm", "docs", "binary", "dist", "real"})
"""Markers that are given by name alone: what an expression says of others, any file may hold."""
GIVES = {"sample": "thorough"}  # to all cases of a test but its first: conftest.py
GIVEN = re.compile(r"pytest\.mark\.(\w+)")
IMPORT = re.compile(r"^\s*(?:from|import) .*", re.M)
EITHER = frozenset({True, False})


@dataclass(frozen=True)
class Markers:
    """Those that tests of a file may have, and those that all of them have."""

    some: frozenset[str]
    all: frozenset[str]


def may_hold(file: Path, expression: str) -> bool:
    """Whether a test of the file may be one that `pytest -m expression` runs."""
    try:
        asked = ast.parse(expression.strip() or "True", mode="eval").body
    except SyntaxError:
        return True  # pytest's grammar knows more than Python's
    return True in outcomes(asked, markers_of(file))


def outcomes(asked: ast.expr, markers: Markers) -> frozenset[bool]:
    """What the expression may be for tests that have some of these markers."""
    match asked:
        case ast.Constant(bool(value)):
            return frozenset({value})
        case ast.Name(name):
            return frozenset({name in markers.all, name in markers.some or name not in DECISIVE})
        case ast.UnaryOp(ast.Not(), one):
            return frozenset(not value for value in outcomes(one, markers))
        case ast.BoolOp(kind, parts):
            join = all if isinstance(kind, ast.And) else any
            each = [outcomes(part, markers) for part in parts]
            least, most = join(False not in one for one in each), join(True in one for one in each)
            return frozenset({least, most})
    return EITHER


@functools.cache
def markers_of(file: Path) -> Markers:
    text = file.read_text(encoding="utf-8")
    some = named_in(file)
    return Markers(some | {given for name, given in GIVES.items() if name in some} & DECISIVE, given_to_all(text))


@functools.cache
def named_in(file: Path) -> frozenset[str]:
    """The markers that the file names, and those that the helpers name that it imports, or they do."""
    seen: set[Path] = set()
    found: set[str] = set()
    pending = [file]
    while pending:
        one = pending.pop()
        if one not in seen:
            seen.add(one)
            names, imported = said_in(one)
            found |= names
            pending += imported
    return frozenset(found)


@functools.cache
def said_in(file: Path) -> tuple[frozenset[str], tuple[Path, ...]]:
    """The markers that the file itself names, and the helpers that it imports, which many files do."""
    text = file.read_text(encoding="utf-8")
    words = {word for line in IMPORT.findall(text) for word in re.findall(r"\w+", line)}
    names = frozenset({*GIVEN.findall(text)} & {*DECISIVE, *GIVES})
    return names, tuple(path for path in helpers() if path.stem in words)


@functools.cache
def helpers() -> tuple[Path, ...]:
    """What tests import of one another: all of their Python files that hold no tests."""
    return tuple(path for path in TESTS.rglob("*.py") if not path.name.startswith("test_") and path != Path(__file__))


def given_to_all(text: str) -> frozenset[str]:
    """What `pytestmark` of a module says: a marker, or a list of them."""
    if "\npytestmark" not in text:
        return frozenset()
    return (
        frozenset(
            name
            for statement in ast.parse(text).body
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "pytestmark"
            for mark in (statement.value.elts if isinstance(statement.value, ast.List) else [statement.value])
            for name in GIVEN.findall(ast.unparse(mark))[:1]
        )
        & DECISIVE
    )


def is_surprised_by(file: Path, names: Iterable[str]) -> bool:
    """Whether a test with these markers is another than its file's text says."""
    markers, own = markers_of(file), DECISIVE.intersection(names)
    return not markers.all <= own <= markers.some
