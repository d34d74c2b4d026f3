"""Rows of any shape: one tensor, or tuples and dicts of tensors, described once and checked row by row.

A row has one or more *leaves*, arrays of a shape and a dtype; `RowLayout` says where each is. In this process a row
travels as its leaves. To other processes rows travel packed, as uint8 [rows, row_bytes]: the leaves' bytes one behind
the other, each from a multiple of `ALIGNMENT` on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gpuinfer.api import ModelSpec
from gpuinfer.errors import RequestError, UsageError

ALIGNMENT = 16  # bytes: processors load whole vectors from there
MOST_LEAVES = 64
ANY_MODEL = ""  # as the name of a model: the one that a server has
PACKED = "packed"
"""The `ModelSpec.input_dtype` of rows that travel packed."""

Ragged = Literal["pad", "group"] | None
Path = tuple[str | int, ...]

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
ARRAY_DTYPES = tuple(name for name in ITEM_BYTES if name != "bfloat16")  # those that NumPy knows
FLAT_DTYPES = ("uint8", "int8", "float32", "bits")  # of rows that are flat features
MOST_VALUES = 1 << 24  # of one array of a row
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a row: where it is in the row, its shape and its dtype (torch's names)."""

    path: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        place = "".join(f"[{part!r}]" for part in self.path)
        return f"{place and place + ' '}{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class RowLayout:
    """What a row looks like. `form`: None for a leaf, a tuple of forms, or a dict of forms (as sorted pairs).

    With `ragged` the first dimension of each leaf that has one may differ from row to row: rows are padded at their end
    to a few lengths ("pad"), or share batches with rows of their own shapes alone ("group").
    """

    form: Any
    leaves: tuple[Leaf, ...]
    kind: Literal["torch", "numpy"] = "torch"  # what a row is made of, and so an answer
    ragged: Ragged = None
    pad_value: float = 0  # of rows that a server pads; a batcher has its own
    check: bool = True  # whether answers with NaN or +inf are refused

    def __str__(self) -> str:
        return " and ".join(map(str, self.leaves))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each leaf begins in a packed row, in bytes."""
        places, at = [], 0
        for leaf in self.leaves:
            places.append(at)
            at += -(-leaf.nbytes // ALIGNMENT) * ALIGNMENT
        return (*places, at)

    @property
    def row_bytes(self) -> int:
        return self.offsets[-1]

    def arrange(self, leaves: Sequence[Any]) -> Any:
        """The leaves (of one row, or of a batch) in the form of a row."""
        iterator = iter(leaves)

        def built(form: Any) -> Any:
            if form is None:
                return next(iterator)
            if isinstance(form, dict):
                return {name: built(one) for name, one in form.items()}
            return tuple(built(one) for one in form)

        return built(self.form)

    @property
    def names(self) -> tuple[str, ...]:
        """Of each leaf, for formats without nesting: its path with dots, such as `ids` or `0.mask`."""
        return tuple(".".join(map(str, leaf.path)) or "rows" for leaf in self.leaves)

    def to_wire(self) -> list[dict[str, Any]]:
        """Each leaf as plain values: `path`, names and numbers; `shape`; `dtype`."""
        return [{"path": list(leaf.path), "shape": list(leaf.shape), "dtype": leaf.dtype} for leaf in self.leaves]

    @classmethod
    def from_wire(cls, wire: Any) -> RowLayout:
        """Raises `ValueError` for anything that `to_wire` does not make."""
        try:
            leaves = tuple(Leaf(tuple(one["path"]), tuple(one["shape"]), one["dtype"]) for one in wire)
            sizes = [size for leaf in leaves for size in leaf.shape]
            if not 1 <= len(leaves) <= MOST_LEAVES or not all(type(size) is int and size >= 0 for size in sizes):
                raise ValueError
            if not all(leaf.dtype in ITEM_BYTES and len(leaf.path) <= 16 for leaf in leaves):
                raise ValueError
            return cls(_form_of_paths([leaf.path for leaf in leaves]), leaves, "numpy")
        except (TypeError, KeyError, IndexError, ValueError) as error:
            raise ValueError("no description of rows") from error


def _form_of_paths(paths: Sequence[Path]) -> Any:
    """The form whose leaves lie at these paths, in their order. Raises `ValueError` where there is none."""
    if list(paths) == [()]:
        return None
    parts: dict[str | int, list[Path]] = {}
    for first, *rest in paths:
        parts.setdefault(first, []).append(tuple(rest))
    if all(type(part) is str for part in parts) and list(parts) == sorted(map(str, parts)):
        return {str(name): _form_of_paths(found) for name, found in parts.items()}
    if list(parts) != list(range(len(parts))):
        raise ValueError("paths that no row has")
    return tuple(map(_form_of_paths, parts.values()))


class SingleRow:
    """One row on its way to the model: its leaves, arrays [*shape]."""

    __slots__ = ("leaves",)

    def __init__(self, leaves: Sequence[Any]) -> None:
        self.leaves = leaves

    def __len__(self) -> int:
        return 1


class RowBatch:
    """Rows that one caller brings together: their leaves, arrays [rows, *shape]."""

    __slots__ = ("leaves", "rows")

    def __init__(self, leaves: Sequence[Any], rows: int) -> None:
        self.leaves, self.rows = leaves, rows

    def __len__(self) -> int:
        return self.rows


def leaves_of(row: Any) -> list[Any]:
    """The arrays of a row, in the order of its layout: dicts by sorted names."""
    if isinstance(row, Mapping):
        return [leaf for name in sorted(row, key=str) for leaf in leaves_of(row[name])]
    if isinstance(row, tuple):
        return [leaf for one in row for leaf in leaves_of(one)]
    return [row]


def layout_of_row(row: Any, ragged: Ragged = None) -> RowLayout:
    """The layout of rows like this one. Raises `RequestError` for what cannot be a row."""
    leaves: list[Leaf] = []
    kinds: set[str] = set()

    def form_of(value: Any, path: Path) -> Any:
        if isinstance(value, Mapping):
            if not value or not all(isinstance(name, str) for name in value):
                raise RequestError(
                    f"{_where(path)} is a dict {_shown(value)}. Give it one or more names, all of them text."
                )
            return {name: form_of(value[name], (*path, name)) for name in sorted(value)}
        if isinstance(value, tuple):
            if not value:
                raise RequestError(f"{_where(path)} is an empty tuple. Put the arrays of a row into it.")
            return tuple(form_of(one, (*path, place)) for place, one in enumerate(value))
        array = as_array(value, path)
        kinds.add("torch" if is_tensor(array) else "numpy")
        leaves.append(Leaf(path, tuple(array.shape), dtype_name(array, path)))
        return None

    form = form_of(row, ())
    if len(leaves) > MOST_LEAVES:
        raise RequestError(f"a row of {len(leaves)} arrays; at most {MOST_LEAVES} are taken. Join some of them.")
    return RowLayout(form, tuple(leaves), "torch" if "torch" in kinds else "numpy", ragged)


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor of torch, which is not imported for the question."""
    return type(value).__module__.partition(".")[0] == "torch" or hasattr(value, "untyped_storage")


def as_array(value: Any, path: Path = (), keep: Collection[Any] = ()) -> Any:
    """A leaf as a tensor on the CPU or on a device of `keep`, or as a NumPy array. Raises `RequestError` for what is
    neither and cannot be one.

    Python's own numbers, and lists of them, become float32, int64 or bool.
    """
    if is_tensor(value):
        if value.device.type != "cpu" and value.device not in keep:
            return value.detach().cpu()
        return value.detach() if value.requires_grad else value
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if isinstance(value, bool | int | float | list):
        try:
            array = np.asarray(value)
        except ValueError:
            array = np.asarray(None)
        if array.dtype.kind in "biuf":
            return array.astype(np.float32) if array.dtype.kind == "f" else array
    raise RequestError(
        f"{_where(path)} is {_shown(value)}, and a row is made of tensors, arrays and numbers, in tuples and dicts. "
        "Turn it into one of these first."
    )


def dtype_name(array: Any, path: Path = ()) -> str:
    """Torch's name of an array's dtype. Raises `RequestError` for one that no model takes."""
    name = str(array.dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise RequestError(f"{_where(path)} is of {name}. Convert it to one of {', '.join(ITEM_BYTES)}.")
    return name


def checked_leaves(row: Any, layout: RowLayout, keep: Collection[Any] = ()) -> list[Any]:
    """The leaves of a row that is like the others; tensors stay on devices of `keep`. Raises `RequestError` for one
    that is not, with the cure.
    """
    found = leaves_of(row)
    if len(found) == len(layout.leaves):
        for place, (value, leaf) in enumerate(zip(found, layout.leaves, strict=True)):
            if type(value) in (bool, int, float, list):  # Python's numbers are of no dtype until it is known
                array = as_array(value, leaf.path)
                if leaf.dtype in FLOATS or array.dtype.kind in "bi":
                    cast = array.astype("float32" if leaf.dtype == "bfloat16" else leaf.dtype)
                    if leaf.dtype not in FLOATS and not np.array_equal(cast, array):
                        raise RequestError(f"{_where(leaf.path)} is {_shown(value)}, which {leaf.dtype} cannot hold.")
                    array = cast
                found[place] = value = array
            elif not isinstance(value, np.ndarray):
                found[place] = value = as_array(value, leaf.path, keep)
            shape = value.shape
            as_long = len(shape) == len(leaf.shape) and shape[1:] == leaf.shape[1:]
            if tuple(shape) != leaf.shape and not (layout.ragged and as_long):
                raise _unlike(row, layout)
            if str(value.dtype).removeprefix("torch.") != leaf.dtype:
                raise _unlike(row, layout)
        if _same_form(row, layout.form):
            return found
    raise _unlike(row, layout)


def first_row(rows: Any) -> Any:
    """The first row of a batch. Raises `RequestError` where there is none."""
    if isinstance(rows, Mapping):
        return {name: first_row(one) for name, one in rows.items()}
    if isinstance(rows, tuple):
        return tuple(map(first_row, rows))
    if isinstance(rows, list) and any(isinstance(one, Mapping | tuple) or hasattr(one, "shape") for one in rows):
        raise RequestError(
            "a list of rows is no batch, which is one array with the rows along its first dimension. Stack them "
            "(torch.stack, np.stack), or give them to map."
        )
    array = rows if is_tensor(rows) else as_array(rows)
    if not array.shape or not array.shape[0]:
        raise RequestError("a batch without rows asks for nothing. Give arrays with rows along their first dimension.")
    return array[0]


def batch_leaves(rows: Any, layout: RowLayout, keep: Collection[Any] = ()) -> list[Any]:
    """The leaves of a batch of rows of this layout, arrays [rows, *shape]; tensors stay on devices of `keep`. Raises
    `RequestError` for another one.
    """
    alone = [tuple(getattr(leaf, "shape", ())) for leaf in leaves_of(rows)] == [leaf.shape for leaf in layout.leaves]
    if alone and any(leaf.shape for leaf in layout.leaves):
        raise RequestError(f"that is one row ({layout}) without the axis of the rows. Give row[None], or several rows.")
    checked_leaves(first_row(rows), layout, keep)
    leaves = [as_array(leaf, keep=keep) for leaf in leaves_of(rows)]
    for one, leaf in zip(leaves, layout.leaves, strict=True):
        if dtype_name(one) != leaf.dtype:
            cast = f".to(torch.{leaf.dtype})" if is_tensor(one) else f".astype(np.{leaf.dtype})"
            found = f"rows{_place(leaf.path)} is of {dtype_name(one)}"
            raise RequestError(f"{found}, and a row is {layout}. Convert it: {cast}.")
    if any(len(leaf) != len(leaves[0]) for leaf in leaves):
        raise RequestError(f"arrays of {', '.join(str(len(leaf)) for leaf in leaves)} rows. Give each as many.")
    return leaves


def _same_form(row: Any, form: Any) -> bool:
    if form is None:
        return not isinstance(row, Mapping | tuple)
    if isinstance(form, dict):
        return (
            isinstance(row, Mapping)
            and row.keys() == form.keys()
            and all(_same_form(row[key], form[key]) for key in form)
        )
    return isinstance(row, tuple) and len(row) == len(form) and all(map(_same_form, row, form))


def _unlike(row: Any, layout: RowLayout) -> RequestError:
    """What is different about this row, and the cure."""
    found = layout_of_row(row)
    takes = f"this row is {found}, and the first one was {layout}."
    if found.form != layout.form:
        return RequestError(f"{takes} Give all rows the same names and places.")
    for one, wanted in zip(found.leaves, layout.leaves, strict=True):
        if one.dtype != wanted.dtype:
            cast = f".to(torch.{wanted.dtype})" if found.kind == "torch" else f".astype(np.{wanted.dtype})"
            return RequestError(f"{takes} Convert it: row{_place(one.path)}{cast}.")
        if one.shape != wanted.shape:
            batch = one.shape[1:] == wanted.shape
            if batch:
                return RequestError(f"{takes} That is a batch of {one.shape[0]} rows: give it to predict_batch.")
            if one.shape[1:] == wanted.shape[1:] and one.shape and wanted.shape and not layout.ragged:
                return RequestError(
                    f'{takes} Rows of several lengths need ragged="pad" or ragged="group" when the batcher is made.'
                )
            return RequestError(f"{takes} Give all rows the same shape.")
    return RequestError(f"{takes} Give all rows alike.")


def packed_rows(leaves: Sequence[Any], layout: RowLayout, rows: int, target: NDArray[np.uint8]) -> None:
    """Write the leaves of so many rows, arrays [rows, *shape], to packed rows: uint8 [rows, row_bytes]."""
    for leaf, at, value in zip(layout.leaves, layout.offsets, leaves, strict=False):
        if is_tensor(value):
            import torch

            raw = value.contiguous().view(rows, -1).view(torch.uint8).numpy()
        else:
            raw = np.ascontiguousarray(value).reshape(rows, -1).view(np.uint8)
        target[:, at : at + leaf.nbytes] = raw


def array_spec(name: str, weights: str | None, features: int | str, dtype: str) -> ModelSpec:
    """The spec of a model by its name, whose rows are one array: flat, of so many features, or of a shape (`3x32x32`).
    Raises `UsageError` for a dtype that such rows cannot have.
    """
    shape = parsed_shape(str(features))
    if math.prod(shape) > MOST_VALUES:
        raise UsageError(f"--features {features}: a row of {math.prod(shape):,} values; {MOST_VALUES:,} are the most.")
    if len(shape) == 1 and dtype in FLAT_DTYPES:
        return ModelSpec(name, weights, shape[0], dtype)
    if dtype not in ARRAY_DTYPES:
        raise UsageError(
            f"--input-dtype {dtype}: rows of {features} are of another kind. Choose from {', '.join(ARRAY_DTYPES)}."
        )
    layout = RowLayout(None, (Leaf((), shape, dtype),), "numpy")
    return ModelSpec(name, weights, layout.row_bytes, PACKED, layout=layout)


def named_spec(
    name: str, layout: RowLayout, weights: str | None = None, arguments: Mapping[str, Any] | None = None
) -> ModelSpec:
    """The spec of a model by its name, for rows of this layout."""
    return ModelSpec(name, weights, layout.row_bytes, PACKED, {**(arguments or {})}, layout=layout, strict=True)


def batch_payload(leaves: Sequence[Any], rows: int, layout: RowLayout, packed: bool) -> Any:
    """The leaves of so many rows, arrays [rows, *shape], as they travel: in this process as a `RowBatch`, else packed,
    uint8 [rows, row_bytes].
    """
    if not packed:
        return RowBatch(leaves, rows)
    block = np.zeros((rows, layout.row_bytes), np.uint8)
    packed_rows(leaves, layout, rows, block)
    return block


def unpacked_arrays(block: NDArray[np.uint8], layout: RowLayout) -> list[NDArray[Any]]:
    """The leaves of packed rows, uint8 [rows, row_bytes], as arrays [rows, *shape]. Raises `RequestError` for bfloat16,
    which NumPy does not know.
    """
    found = []
    for leaf, at in zip(layout.leaves, layout.offsets, strict=False):
        if leaf.dtype not in ARRAY_DTYPES:
            raise RequestError(f"a row of {leaf} does not travel to a server. Convert it to float32.")
        raw = np.ascontiguousarray(block[:, at : at + leaf.nbytes])
        found.append(raw.view(leaf.dtype).reshape(len(block), *leaf.shape))
    return found


def drawn_rows(layout: RowLayout, rows: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """So many packed rows: floating point normally distributed, whole numbers and bool zeros and ones."""
    leaves = [
        random.standard_normal((rows, *leaf.shape)).astype(leaf.dtype)
        if leaf.dtype in FLOATS
        else random.integers(0, 2, (rows, *leaf.shape)).astype(leaf.dtype)
        for leaf in layout.leaves
    ]
    block = np.zeros((rows, layout.row_bytes), np.uint8)
    packed_rows(leaves, layout, rows, block)
    return block


def unpacked_leaves(block: Any, layout: RowLayout) -> list[Any]:
    """The leaves of packed rows, tensors [rows, *shape] on the block's memory: uint8 [rows, row_bytes], of torch."""
    import torch

    rows = len(block)
    found = []
    for leaf, at in zip(layout.leaves, layout.offsets, strict=False):
        raw = block[:, at : at + leaf.nbytes]
        dtype = getattr(torch, leaf.dtype)
        found.append((raw if leaf.nbytes else raw.contiguous()).view(dtype).view(rows, *leaf.shape))
    return found


def padded_length(length: int) -> int:
    """The length that a ragged row is padded to: a power of two, or one and a half of it. Less than a third is padding.

    Rows of one padded length share batches (bucketing by length).
    """
    if length <= 4:
        return max(1, length)
    power = 1 << (length - 1).bit_length()
    return power * 3 // 4 if length <= power * 3 // 4 else power


def padded_leaves(leaves: Sequence[Any], layout: RowLayout, value: float, batch: bool = False) -> list[Any]:
    """The leaves of a ragged row, or of a `batch` of such, each filled up at its end to its padded length."""
    lengths = [
        padded_length(array.shape[batch]) if leaf.shape else 0
        for array, leaf in zip(leaves, layout.leaves, strict=True)
    ]
    whole = zip(leaves, layout.leaves, lengths, strict=True)
    return [_longer(array, length, value, int(batch)) if leaf.shape else array for array, leaf, length in whole]


def full_leaves(leaves: Sequence[Any], layout: RowLayout, value: float, batch: bool = False) -> list[Any]:
    """The leaves of a ragged row, or of a `batch` of such, each filled up to its length in the layout. Raises
    `RequestError` for a longer one.
    """
    found = []
    for array, leaf in zip(leaves, layout.leaves, strict=True):
        length = array.shape[batch] if leaf.shape else 0
        if leaf.shape and length > leaf.shape[0]:
            raise RequestError(
                f"this row has {length} where the example has {leaf.shape[0]}, to which all are padded. Give the "
                "longest row as the example when the batcher is made."
            )
        found.append(_longer(array, leaf.shape[0], value, int(batch)) if leaf.shape else array)
    return found


def _longer(array: Any, length: int, value: float, axis: int = 0) -> Any:
    """An array filled up at the end of this axis to this length."""
    if array.shape[axis] == length:
        return array
    shape = (*array.shape[:axis], length, *array.shape[axis + 1 :])
    longer = array.new_full(shape, value) if is_tensor(array) else np.full(shape, value, array.dtype)
    longer[(slice(None),) * axis + (slice(array.shape[axis]),)] = array
    return longer


def parsed_shape(text: str) -> tuple[int, ...]:
    """A shape as the command line has it: `32`, `3x32x32`. Raises `UsageError`."""
    parts = text.lower().split("x")
    if len(text) > 80 or not all(part.isdecimal() and part.isascii() and int(part) > 0 for part in parts):
        raise UsageError(f"'{text}' is no shape. Write whole numbers with x between them, such as 3x32x32.")
    return tuple(map(int, parts))


def _where(path: Path) -> str:
    return f"row{_place(path)}" if path else "this row"


def _place(path: Path) -> str:
    return "".join(f"[{part!r}]" for part in path)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 60 else text[:57] + '…'}"
