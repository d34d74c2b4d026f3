"""`POST /v1/batch`: several requests in one, each for the route and the model that it names, in the form of the rows of
OpenAI's batches. Each has an answer of its own, so that one that is refused costs no other its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from gpuinfer.http.http_exchange import ENDED, FRESH, Exchange, Handler, Pairs
from gpuinfer.http.parser import HttpHead
from gpuinfer.http.route_table import Route
from gpuinfer.serving.openai.requests import BadRequest, unreadable
from gpuinfer.serving.request import RequestContext, encode, plain_headers
from gpuinfer.serving.service import ServedModels

PATH = "/v1/batch"
MOST_REQUESTS = 256
NOT_PASSED_ON = ("content-length", "content-type", "accept", "x-request-id", "transfer-encoding", "x-gpuinfer-begun")
USED = ("input_tokens", "output_tokens")


class BatchedRequest(Struct, forbid_unknown_fields=True):
    """One request: a `url` of this server, and the body that is sent there, with its `model`."""

    url: str
    body: Raw
    custom_id: str | int | None = None
    method: str = "POST"


class BatchBody(Struct, forbid_unknown_fields=True):
    """The body of `POST /v1/batch`."""

    requests: Annotated[list[BatchedRequest], Meta(min_length=1, max_length=MOST_REQUESTS)]


_decode = msgspec.json.Decoder(BatchBody).decode


class InnerExchange(Exchange):
    """One of several requests in a body, with the headers of the outer one. Its response is kept, as `answer`."""

    __slots__ = ("answer",)

    def __init__(self, outer: Exchange, path: str, body: bytes, number: int) -> None:
        headers = {name: value for name, value in outer.headers.items() if name not in NOT_PASSED_ON}
        if (outer_id := outer.headers.get("x-request-id")) is not None:
            headers["x-request-id"] = f"{outer_id}.{number}"
        head = HttpHead("POST", b"/", outer.minor, headers, len(body), keep=True)
        super().__init__(outer._connection, head, path, outer.peer)
        self.body, self.key, self.answer = body, outer.key, b""

    def respond(
        self, status: int, body: bytes = b"", content_type: str = "application/json", headers: Pairs = ()
    ) -> None:
        self._require(FRESH)
        self.status, self.answer, self._stage = status, body, ENDED

    def begin(self, status: int, content_type: str, headers: Pairs = ()) -> None:
        raise BadRequest("an answer of a batch comes whole. Leave `stream` out, or ask for it by itself.", "stream")


def batch_route(served: ServedModels, routes: Sequence[Route]) -> Route:
    """`routes`: those that answer; of them the ones that take JSON by POST, and need no admin key."""
    handlers: Mapping[str, Handler] = {
        route.path: route.handler
        for route in routes
        if route.method == "POST" and route.access == "api" and "{" not in route.path and "body" in route.openapi
    }

    async def answered(outer: Exchange, number: int, one: BatchedRequest) -> dict[str, Any]:
        inner = InnerExchange(outer, one.url, bytes(one.body), number)
        handler = handlers.get(one.url)
        if handler is None or one.method != "POST":
            inner.refuse(404, f"no request of a batch asks {one.method[:10]} {one.url[:60]}. POST to one of {listed}.")
        else:
            await handler(inner)
        for kind in USED:
            if kind in inner.notes:
                outer.notes[kind] = outer.notes.get(kind, 0) + inner.notes[kind]
        response = {
            "status_code": inner.status,
            "request_id": inner.notes.get("id"),
            "body": Raw(inner.answer or b"null"),
        }
        return {"custom_id": one.custom_id, "response": response}

    listed = ", ".join(handlers)

    async def work(exchange: Exchange, context: RequestContext) -> None:
        try:
            batch = await served.services[0].decoded(_decode, exchange.body)
        except (ValueError, RecursionError) as error:
            raise unreadable(error, BatchBody, exchange.body, "request") from error
        exchange.notes.pop("model", None)  # of the first
        exchange.added = [pair for pair in exchange.added if pair[0] != "X-Gpuinfer-Model"]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answered(exchange, *one)) for one in enumerate(batch.requests, 1)]
        if served.services[0].behind_router and any(kind in exchange.notes for kind in USED):
            counted = " ".join(str(exchange.notes.get(kind, 0)) for kind in USED)
            exchange.added.append(("X-Gpuinfer-Used", counted))
        body = encode({"object": "list", "data": [task.result() for task in tasks]})
        exchange.respond(200, body, headers=plain_headers(context.id))

    schema = {"type": "object", "required": ["object", "data"]}
    responses = {"200": {"description": "The answers.", "content": {"application/json": {"schema": schema}}}}
    summary = "Several requests in one, each for the model that it names."
    return Route(
        "POST", PATH, served.services[0].handler(work), "api", summary, {"body": BatchBody, "responses": responses}
    )
