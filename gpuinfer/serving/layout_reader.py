"""Rows of any shape in requests: nested JSON in the form of a row, or safetensors with a tensor for each array."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Raw
from numpy.typing import NDArray

from gpuinfer.errors import RequestError, UsageError
from gpuinfer.models.row_format import NotTensors, from_body
from gpuinfer.models.row_layout import FLOATS, Leaf, RowBatch, RowLayout, batch_payload, full_leaves, padded_leaves
from gpuinfer.serving.openai.requests import BadRequest, unreadable


class LayoutBody(msgspec.Struct, forbid_unknown_fields=True):
    """Rows in the form of the model's row: `rows` with the rows along each array's first dimension, or `x`, one row."""

    rows: Raw | msgspec.UnsetType = msgspec.UNSET
    x: Raw | msgspec.UnsetType = msgspec.UNSET
    model: str | None = None


class LayoutReader:
    """Parses the rows of one model whose rows have a layout: at most `most` in a request. `packed`: they travel on to
    another process.
    """

    def __init__(self, layout: RowLayout, most: int, packed: bool) -> None:
        self._layout, self._most, self._packed = layout, most, packed
        self._decode = msgspec.json.Decoder(LayoutBody).decode
        shown = _shown(layout.form)
        self._cure = (
            f'A row of this model is {layout}: send {{"rows": {shown}}} with the rows along the first dimension of '
            f'each array, or {{"x": {shown}}} for one row.'
        )

    def from_json(self, body: bytes) -> tuple[Any, bool, str | None]:
        """The rows for the session, whether it was one row, given as `x`, and the model named. Raises `BadRequest`."""
        try:
            given = self._decode(body)
        except (ValueError, RecursionError) as error:
            raise unreadable(error, LayoutBody, body, "request") from error
        alone = isinstance(given.x, Raw)
        if alone == isinstance(given.rows, Raw):
            raise BadRequest(f"one of `rows` and `x` is wanted. {self._cure}")
        name = "x" if alone else "rows"
        leaves = [
            self._checked(self._array(raw, leaf, where, alone), leaf, where, alone)
            for raw, leaf, where in self._found(given.x if alone else given.rows, name)
        ]
        return self._payload(leaves), alone, given.model

    def from_tensors(self, body: bytes) -> Any:
        """The rows for the session; arrays are views of `body`. Raises `BadRequest`."""
        try:
            tensors, _ = from_body(body)
        except NotTensors as error:
            raise BadRequest(f"the body is not as it should be: {error}") from error
        return self.from_arrays(tensors)

    def from_arrays(self, tensors: Mapping[str, NDArray[Any]]) -> Any:
        """The rows for the session, of arrays [rows, …] by the leaves' names; that of an only leaf may have any.
        Raises `BadRequest`.
        """
        names = self._layout.names
        if len(names) == 1 and len(tensors) == 1:
            tensors = {names[0]: next(iter(tensors.values()))}
        if tensors.keys() != set(names):
            found = ", ".join(f"'{name[:40]}'" for name in list(tensors)[:8]) or "none"
            raise BadRequest(f"tensors called {found}. Name one tensor for each array of a row: {', '.join(names)}.")
        leaves = zip(self._layout.leaves, names, strict=True)
        return self._payload([self._checked(tensors[name], leaf, f"'{name}'", False) for leaf, name in leaves])

    def _found(self, raw: Any, where: str) -> list[tuple[Raw, Leaf, str]]:
        """The text of each array, in the layout's order."""
        found: list[tuple[Raw, str]] = []

        def look(raw: Any, form: Any, where: str) -> None:
            if form is None:
                found.append((raw, where))
                return
            try:
                parts: Any = msgspec.json.decode(raw, type=dict[str, Raw] if isinstance(form, dict) else list[Raw])
            except (ValueError, RecursionError) as error:
                raise BadRequest(f"`{where}`: {error}. {self._cure}", where.partition("[")[0]) from error
            wanted = list(form) if isinstance(form, dict) else range(len(form))
            given = list(parts) if isinstance(form, dict) else range(len(parts))
            if set(given) != set(wanted):
                told = ", ".join(str(one)[:40] for one in given[:8]) if isinstance(form, dict) else len(parts)
                raise BadRequest(f"`{where}` has {told}. {self._cure}", where.partition("[")[0])
            for part in wanted:
                look(parts[part], form[part], f"{where}[{part!r}]")

        look(raw, self._layout.form, where)
        return [(raw, leaf, where) for (raw, where), leaf in zip(found, self._layout.leaves, strict=True)]

    def _array(self, raw: Raw, leaf: Leaf, where: str, alone: bool) -> NDArray[Any]:
        """One array, [rows, *shape], of its nested lists. Raises `BadRequest` for other depths, values and lengths."""
        field = where.partition("[")[0]
        try:
            lists = values_decoder(leaf.dtype, len(leaf.shape) + (not alone)).decode(raw)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"`{where}`: {error}. {self._cure}", field) from error
        try:
            with np.errstate(over="ignore"):  # becomes inf, which is refused
                if self._layout.ragged == "pad" and leaf.shape and not alone:
                    lists = self._level(lists, leaf)
                array = np.array(lists, leaf.dtype)
                return array[None] if alone else array
        except ValueError as error:
            raise BadRequest(f"`{where}`: lists of different lengths. {self._cure}", field) from error

    def _checked(self, array: NDArray[Any], leaf: Leaf, where: str, alone: bool) -> NDArray[Any]:
        fits = array.shape[1:] == leaf.shape
        if self._layout.ragged and leaf.shape:
            fits = array.ndim == len(leaf.shape) + 1 and array.shape[2:] == leaf.shape[1:]
        if array.dtype != leaf.dtype or not fits or not array.ndim:
            found = list(array.shape[1:] if alone else array.shape)
            raise BadRequest(f"`{where}` is {array.dtype} {found}. {self._cure}", "x" if alone else "rows")
        if leaf.dtype in FLOATS and not np.isfinite(array).all():
            raise BadRequest("a value is NaN, infinite, or too large for the model's rows. Send finite numbers.")
        return array

    def _payload(self, leaves: Sequence[NDArray[Any]]) -> Any:
        rows = len(leaves[0])
        if any(len(leaf) != rows for leaf in leaves):
            told = ", ".join(str(len(leaf)) for leaf in leaves)
            raise BadRequest(f"arrays of {told} rows. Give each array as many rows.", "rows")
        if not 1 <= rows <= self._most:
            raise BadRequest(f"{rows} rows, and a request holds 1 to {self._most}. Send several requests.", "rows")
        if self._layout.ragged and self._packed:
            try:
                leaves = full_leaves(leaves, self._layout, self._layout.pad_value, batch=True)
            except RequestError as error:
                raise BadRequest(f"{error}", "rows") from error
        elif self._layout.ragged == "pad":
            leaves = padded_leaves(leaves, self._layout, self._layout.pad_value, batch=True)
        return batch_payload(leaves, rows, self._layout, self._packed)

    def _level(self, lists: Any, leaf: Leaf) -> Any:
        """Rows of several lengths, as nested lists, filled up to the longest of the request."""
        longest = max(map(len, lists), default=0)
        filling = np.full(leaf.shape[1:], self._layout.pad_value, leaf.dtype).tolist()
        return [[*row, *[filling] * (longest - len(row))] for row in lists]

    def group_of(self, payload: Any) -> Hashable:
        """What rows that share a batch with these have in common: None where that is so of all."""
        if not self._layout.ragged or not isinstance(payload, RowBatch):
            return None
        return tuple(tuple(leaf.shape[1:]) for leaf in payload.leaves)


def refuse_unwritable(layout: RowLayout) -> None:
    """Raises `UsageError` for rows that a request cannot hold."""
    if len(set(layout.names)) < len(layout.names):
        raise UsageError(f"a row with the names {', '.join(layout.names)}: two are alike. Take the dots out of them.")
    if odd := next((leaf for leaf in layout.leaves if leaf.dtype == "bfloat16"), None):
        raise UsageError(f"a row of {odd}: JSON and NumPy have no bfloat16. Give an example in float32.")


def _shown(form: Any) -> str:
    """A form as JSON, with … for its arrays."""
    if isinstance(form, dict):
        return f"{{{', '.join(f'{json.dumps(name)}: {_shown(one)}' for name, one in form.items())}}}"
    return f"[{', '.join(map(_shown, form))}]" if isinstance(form, tuple) else "[…]"


@cache
def values_decoder(dtype: str, depth: int) -> msgspec.json.Decoder[Any]:
    """Of lists nested so deep, of values that fit the dtype."""
    kind: Any
    if dtype in FLOATS:
        kind = float
    elif dtype == "bool":
        kind = bool | Annotated[int, Meta(ge=0, le=1)]
    else:
        info = np.iinfo(dtype)
        kind = Annotated[int, Meta(ge=int(info.min), le=int(info.max))]
    for _ in range(depth):
        kind = list[kind]
    return msgspec.json.Decoder(kind)
