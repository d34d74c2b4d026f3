"""Models in KServe's inference protocol v2 (Open Inference Protocol, as KServe's and Triton's documentation state it):
metadata, readiness and inference, for models of rows and of text. Rows go through the queue as those of /v1/evaluate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.api import Priority
from gpuinfer.errors import BadResult
from gpuinfer.http.http_exchange import Exchange, Handler
from gpuinfer.http.route_table import Route
from gpuinfer.models.row_format import BITS
from gpuinfer.models.row_layout import Leaf
from gpuinfer.serving.kserve_health import health_routes, own_openapi
from gpuinfer.serving.kserve_tensors import (
    BINARY_OUTPUT,
    BINARY_TYPE,
    BYTES,
    DATATYPES,
    DTYPES,
    HEADER_LENGTH,
    PRIORITY,
    TIMEOUT,
    InferBody,
    InferRequest,
    Tensor,
    check_outputs,
    read_infer_request,
    refuse_parameters,
    write_infer_response,
)
from gpuinfer.serving.layout_reader import LayoutReader
from gpuinfer.serving.openai.requests import BadRequest, PromptDefaults, RequestReader
from gpuinfer.serving.request import MOST_PROMPTS, NoSuchModel, RequestContext, check_request, encode, plain_headers
from gpuinfer.serving.row_endpoint import MANY, EvaluateEndpoint
from gpuinfer.serving.service import LARGE, ModelService, ServedModels, Work
from gpuinfer.serving.text_endpoints import USUAL, keyed_prompts, send_whole

VERSION = "1"  # of every model: weights change under it
TEXT_INPUT, TEXT_OUTPUT = "text_input", "text_output"
ONE_OUTPUT = "outputs"  # the name of an answer that is one array
CLASSES = {0: Priority.NORMAL, 1: Priority.HIGH, 2: Priority.NORMAL, 3: Priority.LOW}
"""Triton's numbers, where 1 is the most urgent and 0 the default."""
URL = "/v1/completions"  # whose fields are the parameters of a request for text
NOT_PARAMETERS = ("prompt", "messages", "model", "stream", "stream_options")

Array = NDArray[Any]
TensorFacts = dict[str, Any]
"""`name`, `datatype` and `shape` (-1: any size), as the protocol describes a tensor."""


class KServeModel:
    """One model behind the protocol."""

    def __init__(self, service: ModelService) -> None:
        self._service = service
        self._text = service.health.kind == "text"
        self._evaluate = None if self._text else EvaluateEndpoint(service)
        self._outputs: list[TensorFacts] | None = None  # once they are known
        self._reader: RequestReader | None = None

    # What it takes and answers

    @property
    def inputs(self) -> list[TensorFacts]:
        """Of a row each array; of text the prompts."""
        spec = self._service.spec
        if self._text:
            return [{"name": TEXT_INPUT, "datatype": BYTES, "shape": [-1]}]
        if spec.layout is None:
            datatype = "BOOL" if spec.input_dtype == BITS else DATATYPES[spec.input_dtype]
            return [{"name": "rows", "datatype": datatype, "shape": [-1, spec.inputs]}]
        ragged = spec.layout.ragged is not None
        return [
            {
                "name": name,
                "datatype": DATATYPES[leaf.dtype],
                "shape": [-1, *([-1, *leaf.shape[1:]] if ragged and leaf.shape else leaf.shape)],
            }
            for name, leaf in zip(spec.layout.names, spec.layout.leaves, strict=True)
        ]

    async def outputs(self) -> list[TensorFacts]:
        """Of a model of rows by its answer to one row of ones, as it is tried when it is opened."""
        if self._text:
            return [{"name": TEXT_OUTPUT, "datatype": BYTES, "shape": [-1]}]
        if self._outputs is None:
            ones = {
                one["name"]: np.ones([1, *self._shape(leaf, one)], DTYPES[one["datatype"]])
                for one, leaf in zip(self.inputs, self._leaves(), strict=True)
            }
            found = await self._answered(ones, RequestContext(f"{self._service.name}-metadata"))
            self._outputs = [
                {"name": name, "datatype": DATATYPES[one.dtype.name], "shape": [-1, *one.shape[1:]]}
                for name, one in found.items()
            ]
        return self._outputs

    def _leaves(self) -> Sequence[Leaf | None]:
        layout = self._service.spec.layout
        return (None,) if layout is None else layout.leaves

    @staticmethod
    def _shape(leaf: Leaf | None, facts: TensorFacts) -> Sequence[int]:
        return facts["shape"][1:] if leaf is None else leaf.shape

    async def metadata(self, exchange: Exchange, context: RequestContext) -> None:
        """The work of `GET /v2/models/MODEL`."""
        self._check_version(exchange)
        answer = {"name": self._service.name, "versions": [VERSION], "platform": "gpuinfer"}
        found = {**answer, "inputs": self.inputs, "outputs": await self.outputs()}
        exchange.respond(200, encode(found), headers=plain_headers(context.id))

    async def config(self, exchange: Exchange, context: RequestContext) -> None:
        """The work of `GET /v2/models/MODEL/config`: what of Triton's model configuration there is here."""
        self._check_version(exchange)

        def described(tensors: Sequence[TensorFacts]) -> list[dict[str, Any]]:
            return [
                {
                    "name": one["name"],
                    "data_type": "TYPE_STRING" if one["datatype"] == BYTES else f"TYPE_{one['datatype']}",
                    "dims": one["shape"][1:] or [1],
                }
                for one in tensors
            ]

        answer = {
            "name": self._service.name,
            "platform": "gpuinfer",
            "backend": "gpuinfer",
            "max_batch_size": self._service.widest,
            "input": described(self.inputs),
            "output": described(await self.outputs()),
            "dynamic_batching": {},
        }
        exchange.respond(200, encode(answer), headers=plain_headers(context.id))

    async def statistics(self, exchange: Exchange, context: RequestContext) -> None:
        """The work of `GET /v2/models/MODEL/stats`, as far as it is counted here: times are sums in nanoseconds."""
        self._check_version(exchange)
        counted = self._service.session.own.snapshot()

        def spent(count: int, seconds: float) -> dict[str, int]:
            return {"count": count, "ns": round(1e9 * seconds)}

        answer = {
            "name": self._service.name,
            "version": VERSION,
            "inference_count": counted.rows,
            "execution_count": sum(counted.batches.values()),
            "inference_stats": {
                "success": spent(counted.requests, counted.latency.get("total", 0.0)),
                "fail": spent(sum(counted.errors.values()), 0.0),
                "queue": spent(counted.requests, counted.queue_wait.get("total", 0.0)),
            },
        }
        exchange.respond(200, encode({"model_stats": [answer]}), headers=plain_headers(context.id))

    async def ready(self, exchange: Exchange, context: RequestContext) -> None:
        """The work of `GET /v2/models/MODEL/ready`."""
        self._check_version(exchange)
        health = self._service.health
        exchange.respond(health.code, encode({"name": self._service.name, "ready": health.code == 200}))

    @staticmethod
    def _check_version(exchange: Exchange) -> None:
        if (version := exchange.parameters.get("version", VERSION)) != VERSION:
            raise NoSuchModel(f"there is no version '{version[:20]}' of this model. Its version is {VERSION}.")

    # Inference

    async def infer(self, exchange: Exchange, context: RequestContext) -> None:
        """The work of `POST /v2/models/MODEL/infer`."""
        self._check_version(exchange)
        if (coding := exchange.headers.get("content-encoding", "identity")) != "identity":
            raise BadRequest(f"the body is compressed ({coding[:20]}), which is not read here. Send it as it is.")
        length = exchange.headers.get(HEADER_LENGTH.lower())

        def read(body: bytes) -> InferRequest:
            return read_infer_request(body, length)

        # bytes are read in place: only JSON takes its time
        quick = length is not None and len(length) < 8 and length.isdecimal() and int(length) <= LARGE
        request = read(exchange.body) if quick else await self._service.decoded(read, exchange.body)
        _set_class_and_timeout(request.parameters, context)
        if request.outputs:  # before anything is computed
            check_outputs(request, [one["name"] for one in await self.outputs()])
        outputs: Mapping[str, Tensor]
        if self._text:
            name, outputs = await self._generated(request, exchange, context)
        else:
            refuse_parameters(request.parameters, (PRIORITY, TIMEOUT, BINARY_OUTPUT), "the request")
            name, outputs = self._service.name, await self._answered(request.tensors, context)
        rows = max(map(len, outputs.values()), default=0)
        if rows <= MANY or request.wants_binary(None):
            body, header = write_infer_response(request, name, VERSION, outputs)
        else:
            body, header = await asyncio.to_thread(write_infer_response, request, name, VERSION, outputs)
        more = () if header is None else ((HEADER_LENGTH, str(header)),)
        kind = "application/json" if header is None else BINARY_TYPE
        exchange.respond(200, body, kind, plain_headers(context.id, more))

    async def _answered(self, tensors: Mapping[str, Tensor], context: RequestContext) -> dict[str, Array]:
        """The outputs for rows, in arrays [rows, …]. Raises `BadRequest`, and `BadResult` for no arrays of numbers."""
        if (evaluate := self._evaluate) is None:
            raise RuntimeError("a model of text answers no arrays.")
        arrays, reader = self._checked(tensors), evaluate.reader
        if isinstance(reader, LayoutReader):
            block = reader.from_arrays(arrays)
        else:
            (array,) = arrays.values()
            if self._service.spec.input_dtype == BITS:
                array = np.packbits(array, axis=1, bitorder="little")
            block = reader.from_array(array)
        result = await evaluate.answer(block, context)
        parts = evaluate.parts(result)
        found = {ONE_OUTPUT: np.asarray(result)} if parts is None else dict(parts)
        if odd := [name for name, one in found.items() if getattr(one, "dtype", np.dtype("O")).name not in DATATYPES]:
            raise BadResult(f"the answer's part '{odd[0]}' is no array of numbers")
        return found

    def _checked(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """The inputs by the names that this model has for them. Raises `BadRequest`, in the protocol's words."""
        wanted = self.inputs
        if len(wanted) == len(tensors) == 1:
            tensors = {wanted[0]["name"]: next(iter(tensors.values()))}
        takes = " and ".join(f"'{one['name']}' {one['datatype']} {one['shape']}" for one in wanted)
        if tensors.keys() != {one["name"] for one in wanted}:
            named = ", ".join(f"'{name[:40]}'" for name in list(tensors)[:8]) or "none"
            raise BadRequest(f"inputs called {named}, and this model takes {takes}. Send these.", "inputs")
        for one in wanted:
            found, shape = tensors[one["name"]], one["shape"]
            datatype = BYTES if isinstance(found, list) else DATATYPES[found.dtype.name]
            sizes = [] if isinstance(found, list) else list(found.shape)
            fits = len(sizes) == len(shape) and all(
                size in (-1, actual) for size, actual in zip(shape, sizes, strict=False)
            )
            if datatype != one["datatype"] or not fits:
                raise BadRequest(
                    f"input '{one['name']}' is {datatype} {sizes}, and this model takes {takes}, where -1 is any size "
                    "and rows come first. Send that.",
                    "inputs",
                )
        return {one["name"]: tensors[one["name"]] for one in wanted}

    async def _generated(
        self, request: InferRequest, exchange: Exchange, context: RequestContext
    ) -> tuple[str, Mapping[str, Tensor]]:
        """The name that answers, and the texts: `n` for each prompt, one behind the other."""
        texts = request.tensors.get(TEXT_INPUT)
        if len(request.tensors) != 1 or not isinstance(texts, list) or not texts:
            raise BadRequest(f"this model takes the input '{TEXT_INPUT}', BYTES [-1], and no other. Send it.", "inputs")
        own = {
            name: value for name, value in request.parameters.items() if name not in (PRIORITY, TIMEOUT, BINARY_OUTPUT)
        }
        if odd := [name for name in own if name in NOT_PARAMETERS]:
            raise BadRequest(f"`{odd[0]}` is no parameter here. Leave it out, or ask POST {URL}.", "parameters")
        try:
            prompts = [text.decode() for text in texts]
        except UnicodeDecodeError:
            raise BadRequest(f"an element of '{TEXT_INPUT}' is not UTF-8. Send texts.", "inputs") from None
        reader = self._reader
        if reader is None:  # the defaults are known once the model is loaded
            reader = self._reader = RequestReader(PromptDefaults(self._service.usual(USUAL[URL])))
        body = encode({**own, "prompt": prompts})
        each = await self._service.decoded(lambda body: reader.read_all(body, URL, MOST_PROMPTS), body)
        adapter = self._service.adapter_of(exchange.parameters["model"])
        for one in each:
            check_request(one.prompt, self._service.widest)
        answers = await send_whole(self._service, exchange, context, keyed_prompts(each, context, adapter))
        return adapter or self._service.name, {TEXT_OUTPUT: [one.text.encode() for one in answers.completions]}


def _set_class_and_timeout(parameters: Mapping[str, Any], context: RequestContext) -> None:
    """Triton's `priority`, and its `timeout` in microseconds. Raises `BadRequest`."""
    if (priority := parameters.get(PRIORITY)) is not None:
        if type(priority) is not int or priority not in CLASSES:
            raise BadRequest("`priority` is 1 (high), 2 (normal, as is 0) or 3 (low). Send one of them.", "parameters")
        context.priority = CLASSES[priority]
    if (timeout := parameters.get(TIMEOUT)) is not None:
        if type(timeout) is not int or timeout < 0:
            raise BadRequest("`timeout` is no number of microseconds. Send a whole number.", "parameters")
        if timeout:
            context.timeout_s = min(context.timeout_s, timeout / 1e6)


# Routes

NAME = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
VERSIONED = {"name": "version", "in": "path", "required": True, "schema": {"type": "string"}}
_ANSWERS = {
    "200": {
        "description": "The outputs; as bytes behind the JSON where that is wanted.",
        "content": {"application/json": {"schema": {"type": "object"}}, BINARY_TYPE: {}},
    }
}


def kserve_routes(served: ServedModels) -> list[Route]:
    """All routes of the protocol."""
    models = {service.name: KServeModel(service) for service in served.services}

    def chosen(work: Callable[[KServeModel], Work]) -> Handler:
        handlers = {one.name: one.handler(work(models[one.name])) for one in served.services}
        return served.choosing(handlers, ())

    async def index(exchange: Exchange) -> None:
        listed = []
        for one in served.services:
            state = "READY" if one.health.status == "ready" else "UNAVAILABLE"
            listed.append({"name": one.name, "version": VERSION, "state": state, "reason": ""})
        exchange.respond(200, encode(listed))

    works: Sequence[tuple[str, str, Callable[[KServeModel], Work], str, Mapping[str, Any]]] = (
        ("GET", "", lambda one: one.metadata, "The model's inputs and outputs (KServe).", {}),
        ("GET", "/ready", lambda one: one.ready, "Whether the model is ready (KServe).", {}),
        ("GET", "/config", lambda one: one.config, "The model's configuration, as Triton has it.", {}),
        ("GET", "/stats", lambda one: one.statistics, "What the model has answered, as Triton counts it.", {}),
        (
            "POST",
            "/infer",
            lambda one: one.infer,
            "The model's answers to tensors (KServe).",
            {"body": InferBody, "responses": _ANSWERS, "content": {BINARY_TYPE: {}}},
        ),
    )
    listed = {"200": {"description": "The models.", "content": {"application/json": {"schema": {"type": "array"}}}}}
    return [
        *health_routes(lambda: not any(one.health.dead for one in served.services), lambda: served.status == "ready"),
        *(
            Route(method, f"/v2/models/{{model}}{place}{path}", chosen(work), "api", summary, own)
            for method, path, work, summary, more in works
            for place, where in (("", [NAME]), ("/versions/{version}", [NAME, VERSIONED]))
            for own in [own_openapi(parameters=where, **more)]
        ),
        Route("POST", "/v2/repository/index", index, "api", "The models (KServe).", own_openapi(responses=listed)),
    ]
