"""POST /v1/evaluate for models of rows: rows and answers as JSON or safetensors.

Dtype, rank, shape and byte count are checked before anything is used. A value that is not finite is refused, as the
engine refuses NaN and +inf.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from gpuinfer.api import ModelSpec, Result
from gpuinfer.engine.results import CheckedResult
from gpuinfer.http.http_exchange import Exchange
from gpuinfer.models import row_format
from gpuinfer.models.row_format import BITS, MEDIA_TYPE, NotTensors, answer_to_body, is_tensors, rows_from_body
from gpuinfer.serving.layout_reader import LayoutBody, LayoutReader, refuse_unwritable
from gpuinfer.serving.openai.requests import BadRequest, unreadable
from gpuinfer.serving.request import RequestContext, encode, plain_headers
from gpuinfer.serving.service import ModelService, session_arguments

Block = NDArray[Any]
ELEMENTS: Mapping[str, Any] = {
    "float32": float,
    "uint8": Annotated[int, Meta(ge=0, le=255)],
    "int8": Annotated[int, Meta(ge=-128, le=127)],
    BITS: Annotated[int, Meta(ge=0, le=1)],
}


class RowsReader:
    """Parses the rows of one model, in the form of `body`: at most `most` in a request."""

    def __init__(self, spec: ModelSpec, body: Any, most: int) -> None:
        self._body = body
        self._decode: Callable[[bytes], Any] = msgspec.json.Decoder(body).decode
        self._spec, self._most = spec, most
        self._dtype, self._inputs = row_format.row_dtype(spec), spec.inputs
        self._bits, self._floats = spec.input_dtype == BITS, self._dtype.kind == "f"

    def from_json(self, body: bytes) -> tuple[Block, bool, str | None]:
        """The block [rows, …], whether it was one row, given as `x`, and the model named. Raises `BadRequest`."""
        try:
            given = self._decode(body)
        except (ValueError, RecursionError) as error:
            raise unreadable(error, self._body, body, "request") from error
        rows, alone = given.rows, given.x is not None
        if alone == (rows is not None):
            raise BadRequest('one of `rows` and `x` is wanted. Write {"rows": [[…], …]}, or {"x": […]} for one row.')
        rows = (given.x,) if alone else rows
        self._check_count(len(rows))
        for row in rows:
            if len(row) != self._inputs:
                raise BadRequest(
                    f"a row has {len(row)} values, and this model takes {self._inputs}.", "x" if alone else "rows"
                )
        with np.errstate(over="ignore"):  # becomes inf, which is refused
            block = np.array(rows, self._dtype)
        block = np.packbits(block, axis=1, bitorder="little") if self._bits else block
        return self._checked(block), alone, given.model

    def from_tensors(self, body: bytes) -> Block:
        """The block, a view of `body`. Raises `BadRequest`."""
        try:
            block = rows_from_body(body)
        except NotTensors as error:
            raise BadRequest(f"the body is not as it should be: {error}") from error
        return self.from_array(block)

    def from_array(self, block: Block) -> Block:
        """The block, checked. Raises `BadRequest`."""
        wanted = row_format.row_shape(self._spec)
        if block.dtype != self._dtype or block.shape[1:] != wanted:
            raise BadRequest(
                f"a tensor {block.dtype} {list(block.shape)}, and this model takes {self._dtype} "
                f"[rows, {', '.join(map(str, wanted))}]. Send that."
            )
        self._check_count(len(block))
        return self._checked(block)

    def _check_count(self, rows: int) -> None:
        if not 1 <= rows <= self._most:
            raise BadRequest(f"{rows} rows, and a request holds 1 to {self._most}. Send several requests.", "rows")

    def _checked(self, block: Block) -> Block:
        if self._floats:
            flat = block.ravel()
            with np.errstate(over="ignore", invalid="ignore"):
                # the sum of squares is quicker; it is finite only if all are, but overflows for large ones
                finite = math.isfinite(np.dot(flat, flat)) or bool(np.isfinite(block).all())
            if not finite:
                raise BadRequest("a value is NaN, infinite, or too large for the model's rows. Send finite numbers.")
        return block


MANY = 1024  # rows of an answer that is not written out as JSON on the event loop


class EvaluateEndpoint:
    """The route of one service, once its limits are known."""

    def __init__(self, service: ModelService) -> None:
        """Raises `UsageError` for rows that a request cannot hold."""
        self._service, self._session = service, service.session
        self._names: Sequence[str] = ()
        if service.spec.layout is not None:
            refuse_unwritable(service.spec.layout)
            self.body: Any = LayoutBody
            return
        element: Any = ELEMENTS[service.spec.input_dtype]
        rows, row = list[list[element]] | None, list[element] | None  # type: ignore[valid-type]
        fields: Any = [("rows", rows, None), ("x", row, None), ("model", str | None, None)]
        self.body = msgspec.defstruct("EvaluateBody", fields, forbid_unknown_fields=True)
        plays = {"actions", "seats"} <= service.spec.arguments.keys()
        self._names = ("policy", "values") if plays else ()

    @cached_property
    def reader(self) -> RowsReader | LayoutReader:
        """Of this model's rows; to be had once the backend has started and its limits are known."""
        spec, most = self._service.spec, self._service.widest
        if spec.layout is not None:
            return LayoutReader(spec.layout, most, self._session.remote)
        return RowsReader(spec, self.body, most)

    async def __call__(self, exchange: Exchange, asking: RequestContext) -> None:
        """In JSON or safetensors; the answer in the form of the question, unless `Accept` names the other."""
        kind, wanted = exchange.headers.get("content-type", ""), exchange.headers.get("accept", "")
        binary, alone, name = kind.startswith(MEDIA_TYPE), False, None
        if not binary and is_tensors(exchange.body):
            raise BadRequest(
                f"the body is safetensors, and its Content-Type is {kind[:80] or 'not there'}. Send Content-Type: "
                f"{MEDIA_TYPE}."
            )
        if binary:
            block = self.reader.from_tensors(exchange.body)
        else:
            block, alone, name = await self._service.decoded(self.reader.from_json, exchange.body)
        self._service.adapter_of(name or exchange.query.get("model"))  # of rows there are none
        result = await self.answer(block, asking)
        if wanted.startswith(MEDIA_TYPE) or (binary and not wanted.startswith("application/json")):
            exchange.respond(200, answer_to_body(result), MEDIA_TYPE, plain_headers(asking.id))
            return
        written = await asyncio.to_thread(self._json, result, alone) if len(block) > MANY else self._json(result, alone)
        exchange.respond(200, written, headers=plain_headers(asking.id))

    async def answer(self, block: Any, context: RequestContext) -> Result:
        """The model's answer to rows of the reader: an array [rows, …], or a tuple or dict of such."""
        group = self.reader.group_of(block) if isinstance(self.reader, LayoutReader) else None
        result = await self._session(block, rows=len(block), group=group, **session_arguments(context))
        return result.value if isinstance(result, CheckedResult) else result

    def parts(self, result: Result) -> Mapping[str, Any] | None:
        """The arrays of an answer by their names: of a tuple `policy` and `values` or their places; None: it is one
        array.
        """
        if isinstance(result, Mapping):
            return {str(name): one for name, one in result.items()}
        if isinstance(result, Sequence):
            names = self._names if len(self._names) == len(result) else tuple(map(str, range(len(result))))
            return dict(zip(names, result, strict=True))
        return None

    def _json(self, result: Result, alone: bool) -> bytes:
        """`{"outputs": …}`, or `{"y": …}` for one row given as `x`: of one tensor its rows, else each by name. Infinite
        values, as of moves that are not allowed, are null.
        """

        def plain(one: Any) -> Any:
            return one[0].tolist() if alone else one.tolist()

        parts = self.parts(result)
        values = plain(np.asarray(result)) if parts is None else {name: plain(one) for name, one in parts.items()}
        return encode({"y" if alone else "outputs": values})
