"""All routes of one replica in one table.

Beside the endpoints of the models: updates of weights and adapters (which need the admin key, since they name paths),
metrics, and the live page.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import Struct

from gpuinfer import __version__
from gpuinfer.errors import UsageError
from gpuinfer.http.http_exchange import Exchange, Handler
from gpuinfer.http.route_table import Route
from gpuinfer.models.row_format import MEDIA_TYPE
from gpuinfer.serving.batch_endpoint import batch_route
from gpuinfer.serving.embedding_endpoint import EmbeddingsBody, embeddings
from gpuinfer.serving.health import replica_stats
from gpuinfer.serving.kserve_endpoint import kserve_routes
from gpuinfer.serving.monitoring.live_page import FILES, LiveEvents, LiveState, send_file
from gpuinfer.serving.monitoring.metrics import (
    CONTENT_TYPE,
    Family,
    Floor,
    exposition,
    models_up_family,
    served_models_family,
    snapshot_families,
)
from gpuinfer.serving.openai.requests import BadRequest, unreadable
from gpuinfer.serving.openai.response_items import ResponsesBody
from gpuinfer.serving.openai.schema import CHANGES, FreeBody, LoadBody, RequestBody, UnloadBody, UpdateBody
from gpuinfer.serving.openapi import json_responses, object_schema, openapi_document
from gpuinfer.serving.profile_endpoint import profile_route
from gpuinfer.serving.request import NoSuchModel, RequestContext, encode, new_id, plain_headers
from gpuinfer.serving.responses_endpoint import responses
from gpuinfer.serving.row_endpoint import EvaluateEndpoint
from gpuinfer.serving.score_endpoints import RerankBody, ScoreBody, pair_scores, rankings
from gpuinfer.serving.service import ModelService, ServedModels, Work
from gpuinfer.serving.text_endpoints import PredictBody, completions, generations, predictions
from gpuinfer.serving.token_endpoints import DetokenizeBody, TokenizeBody, detokenizations, tokenizations

HIDDEN: Mapping[str, Any] = {"hidden": True}
TEXT = {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}


async def replica_families(served: ServedModels, floor: Floor) -> list[Family]:
    """All metrics of a replica, as they are now. `floor`: as `snapshot_families` has it."""
    await served.session.refresh()
    ready = {one.name: one.health.status == "ready" for one in served.services}
    found = await asyncio.to_thread(snapshot_families, served.session.snapshot(), floor)
    return [*found, served_models_family(served.names), models_up_family(ready)]


def monitoring_routes(served: ServedModels) -> list[Route]:
    """Metrics, the live page and its events. The page's files hold nothing of this server, and need no key."""

    async def see() -> LiveState:
        await served.session.refresh()
        about = {
            "model": ", ".join(served.names),
            "status": served.status,
            "version": __version__,
            "up_s": time.monotonic() - served.recent.began,
        }
        return LiveState(served.session.snapshot(), about=about)

    floor: Floor = {}

    async def metrics(exchange: Exchange) -> None:
        families = await replica_families(served, floor)
        exchange.respond(200, await asyncio.to_thread(exposition, families), CONTENT_TYPE)

    watching = LiveEvents(see)
    served.at_drain.append(watching.close)
    return [
        Route("GET", "/metrics", metrics, "api", "Metrics for Prometheus.", {"responses": {"200": TEXT}}),
        Route("GET", "/events", watching, "api", "What the page shows, once a second.", HIDDEN),
        *(Route("GET", path, send_file, "open", "The live page.", HIDDEN) for path in FILES),
    ]


def update_routes(service: ModelService, taken: Collection[str]) -> list[Route]:
    """Each answers 400 with the backend's words for what the backend refuses: the client has the admin key. `taken`:
    the names of models, which no adapter can have.
    """
    session = service.session

    def refuse_taken(adapter: str | None, field: str) -> None:
        if adapter in taken:
            raise BadRequest(f"'{adapter}' is the name of a model here. Give the adapter another.", field)

    async def load(asked: LoadBody) -> dict[str, Any]:
        name = asked.lora_name
        if not asked.load_inplace and name in session.adapters:
            why = f"the adapter '{name}' is loaded. Unload it first, or leave load_inplace out."
            raise BadRequest(why, "lora_name")
        refuse_taken(name, "lora_name")
        version = asked.version or next_version(name, session.adapters)
        await session.update(version, asked.lora_path, adapter=name)
        return {"adapter": f"{name}@{version}"}

    async def unload(asked: UnloadBody) -> dict[str, Any]:
        await session.unload(asked.lora_name)
        return {"adapter": asked.lora_name}

    async def update(asked: UpdateBody) -> dict[str, Any]:
        refuse_taken(asked.adapter, "adapter")
        await session.update(asked.version, asked.weights, adapter=asked.adapter, drain=asked.drain)
        return {"version": asked.version}

    async def free(body: FreeBody) -> dict[str, Any]:
        return dict(await session.free_memory())

    def reading(body: type[Struct], change: Callable[[Any], Awaitable[dict[str, Any]]]) -> Work:
        decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(body)

        async def work(exchange: Exchange, asking: RequestContext) -> None:
            try:
                asked = decoder.decode(exchange.body or b"{}")
            except (ValueError, RecursionError) as error:
                raise unreadable(error, body, exchange.body, "request") from error
            service.adapter_of(asked.model)  # whose name it must be, or one of its adapters'
            try:
                told = await change(asked)
            except UsageError as error:
                raise BadRequest(str(error)) from None
            own = {"model": service.name, "adapters": list(session.adapters)}
            exchange.respond(200, encode(own | told), headers=plain_headers(asking.id))

        return work

    works: Mapping[type[Struct], Any] = {LoadBody: load, UnloadBody: unload, UpdateBody: update, FreeBody: free}
    told = json_responses("What there is now.", object_schema("model", "adapters"))
    return [
        Route(
            "POST",
            url,
            service.handler(reading(body, works[body])),
            "admin",
            summary,
            {"body": body, "responses": told},
        )
        for url, (body, summary) in CHANGES.items()
    ]


def next_version(name: str, known: Sequence[str]) -> str:
    """One more than the largest version of this name that is a number."""
    versions = (one.removeprefix(f"{name}@") for one in known if one.startswith(f"{name}@"))
    return str(1 + max((int(one) for one in versions if one.isascii() and one.isdecimal()), default=0))


RESPONSE = object_schema("id", "object", "created_at", "model", "output", "status")
CHOICES = object_schema("id", "object", "created", "model", "choices", "usage")


def replica_routes(served: ServedModels) -> list[Route]:
    """All routes. Those of the other kind of model answer with the route to ask instead."""
    each = [
        [
            *(_text(service) if service.health.kind == "text" else _rows(service)),
            *update_routes(service, [name for one in served.services for name in one.names]),
            *_others(service),
        ]
        for service in served.services
    ]
    of_models = each[0] if len(each) == 1 else _chosen(served, each)
    table = [
        _health(served),
        Route("GET", "/v1/models", _models(served), "api", "The models and their limits.", _MODELS),
        *of_models,
        batch_route(served, of_models),
        *kserve_routes(served),
        Route("GET", "/stats", _stats(served), "api", "Counters, times and rates of the last seconds.", _STATS),
        *monitoring_routes(served),
        profile_route(),
    ]

    async def document(exchange: Exchange) -> None:
        exchange.respond(200, encode(openapi_document(table)))

    table.append(Route("GET", "/openapi.json", document, "api", "This document.", _PLAIN))
    return table


def _chosen(served: ServedModels, each: Sequence[Sequence[Route]]) -> list[Route]:
    """One route for each path, answered by the model that the request names."""
    found: dict[str, Route] = {}
    handlers: dict[str, dict[str, Handler]] = {}
    for service, table in zip(served.services, each, strict=True):
        for route in table:
            handlers.setdefault(route.path, {})[service.name] = route.handler
            known = found.get(route.path)
            if known is None or known.openapi.get("hidden"):
                found[route.path] = route
    of_all = ("rows", "text")  # every model has weights and memory
    kinds: Mapping[str, Sequence[str]] = {
        "/v1/evaluate": ("rows",),
        "/v1/update_weights": of_all,
        "/v1/free_memory": of_all,
    }
    return [
        replace(route, handler=served.choosing(handlers[path], kinds.get(path, ("text",))))
        for path, route in found.items()
    ]


def _health(served: ServedModels) -> Route:
    def now(exchange: Exchange) -> None:
        exchange.respond(served.code, encode(served.told()))

    async def handle(exchange: Exchange) -> None:
        now(exchange)

    told = {"description": "Whether it is ready.", "content": {"application/json": {"schema": object_schema("status")}}}
    own = {"responses": {"200": told, "503": told}}
    return Route("GET", "/health", handle, "open", "Alive, ready, busy or stuck.", own, immediate=now)


OF_TEXT: Sequence[tuple[str, Callable[[ModelService], Work], str, type[Struct], Sequence[str]]] = (
    (
        "/v1/embeddings",
        embeddings,
        "Embeddings of texts, as OpenAI has it.",
        EmbeddingsBody,
        ("object", "data", "usage"),
    ),
    *(
        (url, pair_scores, "How likely one text follows another.", ScoreBody, ("object", "data", "usage"))
        for url in ("/v1/score", "/score")
    ),
    *(
        (url, rankings, "Documents by how likely a query follows them.", RerankBody, ("results", "usage"))
        for url in ("/v1/rerank", "/rerank", "/v2/rerank")
    ),
    ("/tokenize", tokenizations, "The tokens of a text or a chat.", TokenizeBody, ("count", "tokens")),
    ("/detokenize", detokenizations, "The text of tokens.", DetokenizeBody, ("prompt",)),
)
"""Routes of models of text whose answer is one JSON object: url, work, summary, body, what the answer holds."""


def _text(service: ModelService) -> list[Route]:
    answers = json_responses("The answers; with `stream` as server-sent events.", CHOICES, "text/event-stream")
    asked = {"body": RequestBody, "responses": answers}
    told = json_responses("The response; with `stream` as server-sent events.", RESPONSE, "text/event-stream")
    predicted = {"body": PredictBody, "responses": json_responses("The answers.", object_schema("samples"))}
    predict, generate = service.handler(predictions(service)), service.handler(generations(service))
    return [
        *(
            Route("POST", url, service.handler(completions(service, url)), "api", summary, own)
            for url, summary, own in (
                ("/v1/completions", "Continue a text, as OpenAI has it.", {**asked, "required": ["prompt"]}),
                ("/v1/chat/completions", "Answer a chat, as OpenAI has it.", {**asked, "required": ["messages"]}),
            )
        ),
        Route(
            "POST",
            "/v1/responses",
            service.handler(responses(service)),
            "api",
            "Answer a chat, as OpenAI's Responses API has it.",
            {"body": ResponsesBody, "responses": told},
        ),
        Route("POST", "/predict", predict, "api", "Several answers to one text.", predicted),
        Route("POST", "/v1/generations", generate, "api", "In frames of msgpack.", HIDDEN),
        *(
            Route(
                "POST",
                url,
                service.handler(work(service)),
                "api",
                summary,
                {"body": body, "responses": json_responses("The answer.", object_schema(*told))},
            )
            for url, work, summary, body, told in OF_TEXT
        ),
    ]


def _rows(service: ModelService) -> list[Route]:
    evaluate = EvaluateEndpoint(service)
    own = {
        "body": evaluate.body,
        "content": {MEDIA_TYPE: {"schema": {"type": "string", "contentMediaType": MEDIA_TYPE}}},
        "responses": json_responses("The model's answers.", {"type": "object"}, MEDIA_TYPE),
    }
    return [Route("POST", "/v1/evaluate", service.handler(evaluate), "api", "The model's answers to rows.", own)]


def _others(service: ModelService) -> list[Route]:
    """The routes of the other kind of model."""
    urls, instead = ["/v1/evaluate"], "continues text: POST /v1/completions"
    if service.health.kind != "text":
        urls = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/predict", "/v1/generations"]
        urls += [*(one[0] for one in OF_TEXT)]
        instead = "takes rows: POST /v1/evaluate"

    async def work(exchange: Exchange, asking: RequestContext) -> None:
        raise NoSuchModel(f"the model here, '{service.name}', {instead}.")

    return [Route("POST", url, service.handler(work), "api", "Not of this model.", HIDDEN) for url in urls]


def _models(served: ServedModels) -> Handler:
    """The models and their adapters, as OpenAI's clients read them, and the limits of each model."""

    async def handle(exchange: Exchange) -> None:
        listed: list[dict[str, Any]] = []
        for service in served.services:
            own: dict[str, Any] = {"id": service.name, "object": "model", "created": service.created}
            own |= {"owned_by": "gpuinfer", "ready": service.health.status == "ready", **service.facts()}
            listed += [own, *({**own, "id": name, "alias_of": service.name} for name in service.aliases)]
            listed += [{**own, "id": name, "parent": service.name} for name in service.session.adapters]
        exchange.respond(200, encode({"object": "list", "data": listed}), headers=plain_headers(new_id()))

    return handle


def _stats(served: ServedModels) -> Handler:
    """With `?form=wire` the snapshot itself as msgpack, to be added to other servers'; with `model=NAME` that of one of
    several models.
    """

    async def handle(exchange: Exchange) -> None:
        await served.session.refresh()
        one = next((one for one in served.services if exchange.query.get("model") in one.names), None)
        snapshot = served.session.snapshot() if one is None else one.session.own.snapshot()
        if exchange.query.get("form") == "wire":
            exchange.routine = True  # a fleet's supervisor asks each second
            exchange.respond(200, msgspec.msgpack.encode(snapshot.to_wire()), "application/msgpack")
            return
        about = {**served.told(), "http": served.http_counts()}
        told = await asyncio.to_thread(lambda: encode(replica_stats(snapshot, served.recent, about)))
        exchange.respond(200, told, headers=plain_headers(new_id()))

    return handle


_MODELS = {"responses": json_responses("The models, and their adapters.", object_schema("object", "data"))}
_STATS = {
    "responses": json_responses(
        "The counters.", object_schema("requests", "latency_s", "errors"), "application/msgpack"
    )
}
_PLAIN = {"responses": json_responses("OpenAPI 3.1.", object_schema("openapi", "paths"))}
