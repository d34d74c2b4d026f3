"""All routes of one replica, in one table."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from gpuinfer.http.exchange import Exchange, Handler
from gpuinfer.http.paths import Route
from gpuinfer.models.bodies import MEDIA_TYPE
from gpuinfer.openai.schema import RequestBody
from gpuinfer.serving import openapi
from gpuinfer.serving.answers import NoSuchModel, encode, plain_headers
from gpuinfer.serving.asking import Asking, new_id
from gpuinfer.serving.changes import changing
from gpuinfer.serving.chats import Chats
from gpuinfer.serving.evaluate import Evaluate
from gpuinfer.serving.figures import figures
from gpuinfer.serving.generations import Generations
from gpuinfer.serving.openapi import answers, holding
from gpuinfer.serving.predict import Predict, PredictBody
from gpuinfer.serving.service import Service
from gpuinfer.serving.several import Served
from gpuinfer.serving.watched import watched

HIDDEN: Mapping[str, Any] = {"hidden": True}
CHOICES = holding("id", "object", "created", "model", "choices", "usage")


def routes(served: Served) -> list[Route]:
    """Those of models of the other kind are there too: they say which to ask instead."""
    each = [_of_a_model(service) for service in served.services]
    table = [
        _health(served),
        Route("GET", "/v1/models", _models(served), "api", "The models and their limits.", _MODELS),
        *(each[0] if len(each) == 1 else _chosen(served, each)),
        Route("GET", "/stats", _stats(served), "api", "Counters, times and rates of the last seconds.", _STATS),
        *watched(served),
    ]
    found: list[Route] = []
    found.append(Route("GET", "/openapi.json", _document(found), "api", "This document.", _PLAIN))
    found[:0] = table
    return found


def _of_a_model(service: Service) -> list[Route]:
    own = _text(service) if service.health.kind == "text" else _rows(service)
    return [*own, *changing(service), *_others(service)]


def _chosen(served: Served, each: Sequence[Sequence[Route]]) -> list[Route]:
    """One route for each path, which the model answers that a request names."""
    found: dict[str, Route] = {}
    handlers: dict[str, dict[str, Handler]] = {}
    for service, table in zip(served.services, each, strict=True):
        for route in table:
            handlers.setdefault(route.path, {})[service.name] = route.handler
            known = found.get(route.path)
            if known is None or known.openapi.get("hidden"):
                found[route.path] = route
    kinds: Mapping[str, Sequence[str]] = {"/v1/evaluate": ("rows",)}
    return [
        replace(route, handler=served.choosing(handlers[path], kinds.get(path, ("text",))))
        for path, route in found.items()
    ]


def _health(served: Served) -> Route:
    def now(exchange: Exchange) -> None:
        exchange.respond(served.code, encode(served.told()))

    async def handle(exchange: Exchange) -> None:
        now(exchange)

    told = {"description": "Whether it is ready.", "content": {"application/json": {"schema": holding("status")}}}
    own = {"responses": {"200": told, "503": told}}
    return Route("GET", "/health", handle, "open", "Alive, ready, busy or stuck.", own, immediate=now)


def _text(service: Service) -> list[Route]:
    chats = Chats(service)
    made = [
        Route("POST", url, service.handler(chats.answer(url)), "api", summary, _asked(field))
        for url, field, summary in (
            ("/v1/completions", "prompt", "Go on with a text, as OpenAI has it."),
            ("/v1/chat/completions", "messages", "Answer a chat, as OpenAI has it."),
        )
    ]
    predicted = {"body": PredictBody, "responses": answers("The answers.", holding("samples"))}
    return [
        *made,
        Route("POST", "/predict", service.handler(Predict(service)), "api", "So many answers to one text.", predicted),
        Route("POST", "/v1/generations", service.handler(Generations(service)), "api", "In frames of msgpack.", HIDDEN),
    ]


def _rows(service: Service) -> list[Route]:
    evaluate = Evaluate(service)
    own = {
        "body": evaluate.body,
        "content": {MEDIA_TYPE: {"schema": {"type": "string", "contentMediaType": MEDIA_TYPE}}},
        "responses": answers("The model's answers.", {"type": "object"}, MEDIA_TYPE),
    }
    return [Route("POST", "/v1/evaluate", service.handler(evaluate), "api", "The model's answers to rows.", own)]


def _others(service: Service) -> list[Route]:
    """What the other kind of model would answer."""
    if service.health.kind == "text":
        urls, instead = ["/v1/evaluate"], "continues text: POST /v1/completions"
    else:
        urls, instead = (
            ["/v1/completions", "/v1/chat/completions", "/predict", "/v1/generations"],
            ("takes rows: POST /v1/evaluate"),
        )

    async def work(exchange: Exchange, asking: Asking) -> None:
        raise NoSuchModel(f"the model here, '{service.name}', {instead}.")

    return [Route("POST", url, service.handler(work), "api", "Not of this model.", HIDDEN) for url in urls]


def _models(served: Served) -> Handler:
    """What OpenAI's clients read, and beside it what each model takes."""

    async def handle(exchange: Exchange) -> None:
        told = encode({"object": "list", "data": [one for service in served.services for one in _listed(service)]})
        exchange.respond(200, told, headers=plain_headers(new_id()))

    return handle


def _listed(service: Service) -> list[dict[str, Any]]:
    """A model, and its adapters."""
    own: dict[str, Any] = {"id": service.name, "object": "model", "created": service.created, "owned_by": "gpuinfer"}
    own |= {"ready": service.health.status == "ready", **service.facts()}
    return [own, *({**own, "id": name, "parent": service.name} for name in service.session.adapters)]


def _stats(served: Served) -> Handler:
    """With `?form=wire` the snapshot itself, as msgpack: for whoever adds up several servers; with `model=NAME` that of
    one of several models.
    """

    async def handle(exchange: Exchange) -> None:
        await served.session.refresh()
        one = next((one for one in served.services if one.name == exchange.query.get("model")), None)
        snapshot = served.session.snapshot() if one is None else one.session.own.snapshot()
        if exchange.query.get("form") == "wire":
            exchange.respond(200, msgspec.msgpack.encode(snapshot.to_wire()), "application/msgpack")
            return
        about = {**served.told(), "http": served.http_counts()}
        told = await asyncio.to_thread(lambda: encode(figures(snapshot, served.recent, about)))
        exchange.respond(200, told, headers=plain_headers(new_id()))

    return handle


def _document(table: list[Route]) -> Handler:
    async def handle(exchange: Exchange) -> None:
        exchange.respond(200, encode(openapi.document(table)))

    return handle


def _asked(field: str) -> dict[str, Any]:
    whole = answers("The answers; with `stream` as server-sent events.", CHOICES, "text/event-stream")
    return {"body": RequestBody, "required": [field], "responses": whole}


_MODELS = {"responses": answers("The models, and their adapters.", holding("object", "data"))}
_STATS = {"responses": answers("The counters.", holding("requests", "latency_s", "errors"), "application/msgpack")}
_PLAIN = {"responses": answers("OpenAPI 3.1.", holding("openapi", "paths"))}
