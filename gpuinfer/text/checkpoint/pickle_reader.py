"""Reads what training scripts save with `torch.save`: plain values and tensors only, mapped into memory, not copied.

Pickles that torch does not read (an alphabet, the metadata of a distributed checkpoint) go through an unpickler that
makes plain values, and records of the classes that its caller allows. Nothing that a pickle names is imported or run.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.checkpoint import Digests, DigestSource, tensor_digests
from gpuinfer.text.checkpoint.tensor_layout import StoredTensor

OPCODES = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT LONG LONG1 BININT BININT1 BININT2 FLOAT BINFLOAT
    UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS
    MEMOIZE PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD
"""  # those of plain values and records: all others are refused
SHOWN = 80  # characters of a name in a message


class PickledRecord:
    """What stands for an instance of a class that a pickle names: the class's name, constructor arguments and state.

    A subclass of this one stands for the class itself.
    """

    name = ""  # "module.name"
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> PickledRecord:
        record = super().__new__(cls)
        record.arguments, record.state = arguments, None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


@cache
def _record_class(name: str) -> type[PickledRecord]:
    return type("PickledRecord", (PickledRecord,), {"name": name})


def _refusal_of(opcode: str) -> Callable[[Any], None]:
    def refuse(_: Any) -> None:
        raise ValueError(f"it asks for {opcode}, which plain values do not need")

    return refuse


_PythonUnpickler: Any = pickle._Unpickler  # C's has no table of opcodes, and a memo that a pickle can make fill memory


class _RecordUnpickler(_PythonUnpickler):  # type: ignore[misc]
    """Python's own unpickler, for plain values and records alone."""

    dispatch = dict(_PythonUnpickler.dispatch)  # noqa: RUF012

    def __init__(self, data: bytes, names: Collection[str]) -> None:
        super().__init__(io.BytesIO(data))
        self._names = names

    def find_class(self, module: str, name: str) -> type[PickledRecord]:
        if f"{module}.{name}" not in self._names:
            raise ValueError(f"it names {f'{module}.{name}'[:SHOWN]!r}, which has no business there")
        return _record_class(f"{module}.{name}")

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._fill([key, value])

    def load_setitems(self) -> None:
        self._fill(self.pop_mark())

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._fill(items)

    def _fill(self, items: list[Any]) -> None:
        """Keys are texts, whole numbers and records, which are hashed by identity: to hash a tuple of tuples of tuples
        can take for ever.
        """
        if not all(isinstance(key, str | int | PickledRecord) for key in items[::2]):
            raise ValueError("it has keys that are no texts or whole numbers")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    dispatch |= {pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems, pickle.DICT[0]: load_dict}
    dispatch |= {ord(one.code): _refusal_of(one.name) for one in pickletools.opcodes if one.name not in OPCODES.split()}


def read_pickle(data: bytes, names: Collection[str] = ()) -> Any:
    """What the pickle holds: plain values, and a `PickledRecord` for each class of `names`, written "module.name".

    Raises `ValueError` for anything else, and for damage. Time and memory are bounded by the length of `data`.
    """
    try:
        return _RecordUnpickler(data, names).load()
    except (pickle.UnpicklingError, EOFError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"it is damaged ({type(error).__name__})") from None


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
        content = load_tensors(path)
    except ValueError as error:
        raise UsageError(f"cannot read {path}: {error}. {SAVE_AGAIN}") from None
    if not isinstance(content, Mapping):
        raise UsageError(f"{path} holds no mapping with 'model' and 'model_args'. Save it as nanoGPT's train.py does.")
    return dict(content)


def load_tensors(file: Path | BinaryIO) -> Any:
    """What `torch.save` wrote. From a path tensors are mapped into memory, unless torch before 1.6 wrote the file.

    Raises `ValueError` for damage, and for anything but tensors and plain values.
    """
    try:
        mapped = isinstance(file, Path) and zipfile.is_zipfile(file)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:  # torch's text advises to open the file all the same: not passed on
        code = any(sign in str(error) for sign in CODE)
        why = "it would run code when opened: it holds" if code else "it is damaged, or holds"
        raise ValueError(f"{why} more than tensors and plain values") from None
    except Exception as error:  # noqa: BLE001 - each kind of damage raises a kind of its own
        reason = str(error).strip().partition("\n")[0][:200]
        raise ValueError(f"it is damaged ({type(error).__name__}: {reason})") from None


class TensorStore:
    def __init__(self, where: str, tensors: Mapping[str, Tensor]) -> None:
        self.where, self._tensors = where, tensors
        self.tensors = {name: StoredTensor(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    def read(self, name: str, into: Tensor) -> None:
        into.copy_(self._tensors[name])

    def digests(self, names: Collection[str]) -> Digests:
        return tensor_digests({name: _source(self._tensors[name]) for name in names})


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
