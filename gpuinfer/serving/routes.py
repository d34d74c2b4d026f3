"""All routes of one replica, in one table."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
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
from gpuinfer.serving.watched import watched

HIDDEN: Mapping[str, Any] = {"hidden": True}
CHOICES = holding("id", "object", "created", "model", "choices", "usage")


def routes(service: Service) -> list[Route]:
    """Those of models of the other kind are there too: they say which to ask instead."""
    table = [
        _health(service),
        Route("GET", "/v1/models", _models(service), "api", "The model and its limits.", _MODELS),
        *(_text(service) if service.health.kind == "text" else _rows(service)),
        *changing(service),
        *_others(service),
        Route("GET", "/stats", _stats(service), "api", "Counters, times and rates of the last seconds.", _STATS),
        *watched(service),
    ]
    found: list[Route] = []
    found.append(Route("GET", "/openapi.json", _document(found), "api", "This document.", _PLAIN))
    found[:0] = table
    return found


def _health(service: Service) -> Route:
    def now(exchange: Exchange) -> None:
        exchange.respond(service.health.code, encode(service.health.told()))

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


def _models(service: Service) -> Handler:
    """What OpenAI's clients read, and beside it what the model takes."""

    async def handle(exchange: Exchange) -> None:
        own: dict[str, Any] = {
            "id": service.name,
            "object": "model",
            "created": service.created,
            "owned_by": "gpuinfer",
        }
        own |= service.facts()
        adapters = [{**own, "id": name, "parent": service.name} for name in service.session.adapters]
        told = encode({"object": "list", "data": [own, *adapters]})
        exchange.respond(200, told, headers=plain_headers(new_id()))

    return handle


def _stats(service: Service) -> Handler:
    """With `?form=wire` the snapshot itself, as msgpack: for whoever adds up several servers."""

    async def handle(exchange: Exchange) -> None:
        await service.session.refresh()
        snapshot = service.session.snapshot()
        if exchange.query.get("form") == "wire":
            exchange.respond(200, msgspec.msgpack.encode(snapshot.to_wire()), "application/msgpack")
            return
        about = {**service.health.told(), "http": service.http_counts()}
        told = await asyncio.to_thread(lambda: encode(figures(snapshot, service.recent, about)))
        exchange.respond(200, told, headers=plain_headers(new_id()))

    return handle


def _document(table: list[Route]) -> Handler:
    async def handle(exchange: Exchange) -> None:
        exchange.respond(200, encode(openapi.document(table)))

    return handle


def _asked(field: str) -> dict[str, Any]:
    whole = answers("The answers; with `stream` as server-sent events.", CHOICES, "text/event-stream")
    return {"body": RequestBody, "required": [field], "responses": whole}


_MODELS = {"responses": answers("The model, and its adapters.", holding("object", "data"))}
_STATS = {"responses": answers("The counters.", holding("requests", "latency_s", "errors"), "application/msgpack")}
_PLAIN = {"responses": answers("OpenAPI 3.1.", holding("openapi", "paths"))}
