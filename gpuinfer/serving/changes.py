"""Other weights and adapters while a replica serves: for whoever has the admin key, as it is paths that name them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from gpuinfer.errors import UsageError
from gpuinfer.http.exchange import Exchange
from gpuinfer.http.paths import Route
from gpuinfer.openai.changing import CHANGES, LoadBody, UnloadBody, UpdateBody
from gpuinfer.openai.requests import BadRequest, unreadable
from gpuinfer.serving.answers import encode, plain_headers
from gpuinfer.serving.asking import Asking
from gpuinfer.serving.openapi import answers, holding
from gpuinfer.serving.service import Service, Work


def changing(service: Service) -> list[Route]:
    changes = _Changes(service)
    works: Mapping[type[Struct], Any] = {
        LoadBody: changes.load,
        UnloadBody: changes.unload,
        UpdateBody: changes.update,
    }
    told = answers("What there is now.", holding("model", "adapters"))
    found = []
    for url, (body, summary) in CHANGES.items():
        handler = service.handler(changes.reading(body, works[body]))
        found.append(Route("POST", url, handler, "admin", summary, {"body": body, "responses": told}))
    return found


class _Changes:
    """Each refuses with 400 what the backend refuses, with its words: they are for whoever may change what runs."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def load(self, asked: LoadBody) -> dict[str, Any]:
        name, known = asked.lora_name, self._service.session.adapters
        if not asked.load_inplace and name in known:
            raise BadRequest(
                f"the adapter '{name}' is loaded. Unload it first, or leave load_inplace out.", "lora_name"
            )
        version = asked.version or next_version(name, known)
        await self._service.session.update(version, asked.lora_path, adapter=name)
        return {"adapter": f"{name}@{version}"}

    async def unload(self, asked: UnloadBody) -> dict[str, Any]:
        await self._service.session.unload(asked.lora_name)
        return {"adapter": asked.lora_name}

    async def update(self, asked: UpdateBody) -> dict[str, Any]:
        session = self._service.session
        await session.update(asked.version, asked.weights, adapter=asked.adapter, drain=asked.drain)
        return {"version": asked.version}

    def reading(self, body: type[Struct], work: Callable[[Any], Awaitable[dict[str, Any]]]) -> Work:
        """The work of a route: its body understood, and done."""
        decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(body)

        async def handle(exchange: Exchange, asking: Asking) -> None:
            try:
                asked = decoder.decode(exchange.body)
            except (ValueError, RecursionError) as error:
                raise unreadable(error, body, exchange.body, "request") from error
            self._service.adapter_of(asked.model)  # whose name it must be, or one of its adapters'
            try:
                told = await work(asked)
            except UsageError as error:
                raise BadRequest(str(error)) from None
            own = {"model": self._service.name, "adapters": list(self._service.session.adapters)}
            exchange.respond(200, encode(own | told), headers=plain_headers(asking.id))

        return handle


def next_version(name: str, known: Sequence[str]) -> str:
    """One more than the largest number that is a version of it."""
    versions = (one.removeprefix(f"{name}@") for one in known if one.startswith(f"{name}@"))
    return str(1 + max((int(one) for one in versions if one.isascii() and one.isdecimal()), default=0))
