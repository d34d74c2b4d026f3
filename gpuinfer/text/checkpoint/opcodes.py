"""Reads pickles without an unpickler: there is none here to be talked into anything.

The opcodes are parsed (`pickletools.genops` executes none), and those that build plain values are carried out below.
One that names a class or calls something is refused, unless the name is on the list of those that the reader expects:
then what comes of it is a description (`Made`), and nothing is imported, made or called.
"""

from __future__ import annotations

import pickletools
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

MOST_STEPS = 4_000_000
VALUES = frozenset(
    {"INT", "LONG", "LONG1", "BININT", "BININT1", "BININT2", "FLOAT", "BINFLOAT"}
    | {"UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
)
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
SKIPPED = frozenset({"PROTO", "FRAME"})
MARK = object()
SHOWN = 80  # characters of a name in a message


@dataclass(frozen=True, slots=True)
class Named:
    """A class or a function that a pickle names, "module.name"."""

    name: str


@dataclass(slots=True, eq=False)
class Made:
    """What calling `name` with `arguments` would make, had it been called; `state` is what it would have been given."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Something that the pickle does not hold, by what it is called outside of it."""

    id: Any


def plain_value(data: bytes) -> Any:
    """What the pickle holds. Raises `ValueError` for anything but plain values, and for damage."""
    return described(data, ())


def described(data: bytes, names: Collection[str], most_steps: int | None = None) -> Any:
    """The same, with a `Named` or `Made` where it names or makes one of `names`. Raises `ValueError` for any other."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of texts with an escape that is none
            return _carried_out(data, _Machine(frozenset(names)), most_steps or MOST_STEPS)
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__})") from None


def _carried_out(data: bytes, machine: _Machine, most_steps: int) -> Any:
    for steps, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if steps >= most_steps:
            raise ValueError(f"it takes over {most_steps} steps")
        if opcode.name == "STOP":
            return machine.result()
        machine.step(opcode.name, argument)
    raise ValueError("it has no end")


class _Machine:
    """A stack and a memo, as the pickle protocol has them."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._steps: dict[str, Callable[[Any], None]] = {
            "MARK": lambda _: self._stack.append(MARK),
            "EMPTY_DICT": lambda _: self._stack.append({}),
            "EMPTY_LIST": lambda _: self._stack.append([]),
            "EMPTY_TUPLE": lambda _: self._stack.append(()),
            "DICT": lambda _: self._stack.append(_filled({}, self._marked())),
            "LIST": lambda _: self._stack.append(self._marked()),
            "TUPLE": lambda _: self._stack.append(tuple(self._marked())),
            "TUPLE1": lambda _: self._tuple(1),
            "TUPLE2": lambda _: self._tuple(2),
            "TUPLE3": lambda _: self._tuple(3),
            "SETITEM": lambda _: self._set(self._top(2)),
            "SETITEMS": lambda _: self._set(self._marked()),
            "APPEND": lambda _: self._append(self._top(1)),
            "APPENDS": lambda _: self._append(self._marked()),
            **(self._making() if names else {}),
            "MEMOIZE": lambda _: self._remember(len(self._memo)),
            **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), self._remember),
            **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda number: self._stack.append(self._memo[number])),
        }

    def _making(self) -> dict[str, Callable[[Any], None]]:
        return {
            "GLOBAL": lambda name: self._name(*name.split(" ", 1)),
            "STACK_GLOBAL": lambda _: self._name(*self._top(2)),
            "REDUCE": lambda _: self._make(*self._top(2)),
            "NEWOBJ": lambda _: self._make(*self._top(2)),
            "BUILD": lambda _: self._build(*self._top(1)),
            "BINPERSID": lambda _: self._stack.append(Elsewhere(*self._top(1))),
        }

    def step(self, name: str, argument: Any) -> None:
        if name in VALUES:
            self._stack.append(argument)
        elif name in CONSTANTS:
            self._stack.append(CONSTANTS[name])
        elif name in self._steps:
            self._steps[name](argument)
        elif name not in SKIPPED:
            raise ValueError(f"it asks for {name}, which plain values do not need")

    def result(self) -> Any:
        if len(self._stack) != 1 or self._stack[0] is MARK:
            raise ValueError("it is damaged (more or less than one value)")
        return self._stack[0]

    def _remember(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def _top(self, count: int) -> list[Any]:
        taken = self._stack[-count:]
        if len(taken) != count or any(value is MARK for value in taken):
            raise ValueError("it is damaged (a value is missing)")
        del self._stack[-count:]
        return taken

    def _marked(self) -> list[Any]:
        """All values above the last mark, which goes with them."""
        start = len(self._stack) - 1
        while self._stack[start] is not MARK:
            start -= 1
            if start < 0:
                raise ValueError("it is damaged (no mark)")
        taken = self._stack[start + 1 :]
        del self._stack[start:]
        return taken

    def _tuple(self, count: int) -> None:
        self._stack.append(tuple(self._top(count)))

    def _set(self, items: list[Any]) -> None:
        _filled(self._of(dict), items)

    def _append(self, items: list[Any]) -> None:
        self._of(list).extend(items)

    def _name(self, module: str, name: str) -> None:
        if f"{module}.{name}" not in self._names:
            raise ValueError(f"it names {f'{module}.{name}'[:SHOWN]!r}, which has no business there")
        self._stack.append(Named(f"{module}.{name}"))

    def _make(self, what: Any, arguments: Any) -> None:
        if not isinstance(what, Named) or not isinstance(arguments, tuple):
            raise ValueError("it is damaged (it calls what is no function)")
        self._stack.append(Made(what.name, arguments))

    def _build(self, state: Any) -> None:
        self._of(Made).state = state

    def _of(self, kind: type) -> Any:
        if not isinstance(self._stack[-1], kind):
            raise ValueError(f"it is damaged (no {kind.__name__} to fill)")
        return self._stack[-1]


def _filled(into: dict[Any, Any], items: list[Any]) -> dict[Any, Any]:
    """Keys are texts, whole numbers and descriptions, which are known by identity: to hash a tuple of tuples can take
    for ever.
    """
    if len(items) % 2 or not all(isinstance(key, str | int | Made) for key in items[::2]):
        raise ValueError("it has keys that are no texts or whole numbers")
    into.update(zip(items[::2], items[1::2], strict=True))
    return into
