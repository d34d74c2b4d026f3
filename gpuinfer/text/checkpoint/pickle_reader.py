"""Reads what training scripts save with `torch.save`: plain values and tensors only, mapped rather than read whole.

Pickles are read without an unpickler: opcodes are parsed, and those that build plain values are followed.
"""

from __future__ import annotations

import pickletools
import warnings
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.checkpoint import Digests, DigestSource, digests_of
from gpuinfer.text.checkpoint.tensor_layout import StoredTensor

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
class PickledName:
    """A class or a function that a pickle names, "module.name"."""

    name: str


@dataclass(slots=True, eq=False)
class PickledCall:
    """What calling `name` with `arguments` would make, had it been called; `state` is what it would have been given."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True, slots=True)
class PickledReference:
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
            "BINPERSID": lambda _: self._stack.append(PickledReference(*self._top(1))),
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
        self._stack.append(PickledName(f"{module}.{name}"))

    def _make(self, what: Any, arguments: Any) -> None:
        if not isinstance(what, PickledName) or not isinstance(arguments, tuple):
            raise ValueError("it is damaged (it calls what is no function)")
        self._stack.append(PickledCall(what.name, arguments))

    def _build(self, state: Any) -> None:
        self._of(PickledCall).state = state

    def _of(self, kind: type) -> Any:
        if not isinstance(self._stack[-1], kind):
            raise ValueError(f"it is damaged (no {kind.__name__} to fill)")
        return self._stack[-1]


def _filled(into: dict[Any, Any], items: list[Any]) -> dict[Any, Any]:
    """Keys are texts, whole numbers and descriptions, which are known by identity: to hash a tuple of tuples can take
    for ever.
    """
    if len(items) % 2 or not all(isinstance(key, str | int | PickledCall) for key in items[::2]):
        raise ValueError("it has keys that are no texts or whole numbers")
    into.update(zip(items[::2], items[1::2], strict=True))
    return into


CODE = ("Unsupported global", "Unsupported class", "Trying to ")  # torch's words for what is not allowed
SAVE_AGAIN = (
    "Save it again with plain values: torch.save({'model': model.state_dict(), 'model_args': dict(…)}, 'model.pt')."
)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def read_torch_file(path: Path) -> dict[str, Any]:
    """The mapping in the file; tensors are mapped into memory, so that an optimiser's state costs nothing.

    Raises `UsageError` for a file that is absent, damaged, or asks for code to be run.
    """
    if not path.is_file():
        raise UsageError(f"there is no checkpoint file {path}. Check --checkpoint.")
    try:
        content = _load(path)
    except Exception as error:  # noqa: BLE001 - each kind of damage raises a kind of its own
        if type(error).__name__ == "UnpicklingError":  # torch's text advises to open it all the same: not passed on
            code = any(sign in str(error) for sign in CODE)
            why = "would run code when opened: it holds" if code else "cannot be read: it is damaged, or holds"
            raise UsageError(f"{path} {why} more than tensors and plain values. {SAVE_AGAIN}") from None
        reason = str(error).strip().partition("\n")[0][:200]
        raise UsageError(
            f"cannot read {path} as plain tensors ({type(error).__name__}: {reason}). {SAVE_AGAIN}"
        ) from None
    if not isinstance(content, Mapping):
        raise UsageError(f"{path} holds no mapping with 'model' and 'model_args'. Save it as nanoGPT's train.py does.")
    return dict(content)


def _load(path: Path) -> Any:
    if zipfile.is_zipfile(path):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return torch.load(path, map_location="cpu", weights_only=True)  # as torch saved before 1.6


class TensorStore:
    """Tensors that a file was read into."""

    def __init__(self, where: str, tensors: Mapping[str, Tensor]) -> None:
        self.where, self._tensors = where, tensors
        self.tensors = {name: StoredTensor(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    def read(self, name: str, into: Tensor) -> None:
        into.copy_(self._tensors[name])

    def digests(self, names: Collection[str]) -> Digests:
        return digests_of({name: _source(self._tensors[name]) for name in names})


def _source(tensor: Tensor) -> DigestSource:
    values: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    content = memoryview(values)
    return DigestSource(content.nbytes, lambda start, length: content[start : start + length])


def plain_tensors(content: Mapping[Any, Any], where: str) -> dict[str, Tensor]:
    """`content` as a state dict of dense floating-point tensors. Raises `UsageError` when it is something else."""
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise UsageError(f"{where}: 'model' holds more than named tensors. Save model.state_dict() in it.")
        if tensor.layout != torch.strided or tensor.dtype not in FLOATS or tensor.device.type != "cpu":
            raise UsageError(
                f"{where}: tensor '{name[:80]}' is {tensor.dtype} on {tensor.device} ({tensor.layout}), not plain "
                "floating-point numbers. Save model.state_dict() of the model as it was trained."
            )
    return dict(content)
