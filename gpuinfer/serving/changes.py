"""Other weights and adapters while a replica serves: for whoever has the admin key, as they are named by their paths.

Loading and unloading of adapters have vLLM's names and fields.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from gpuinfer.errors import UsageError
from gpuinfer.http.exchange import Exchange
from gpuinfer.http.paths import Route
from gpuinfer.openai.requests import BadRequest, unreadable
from gpuinfer.serving.answers import encode, plain_headers
from gpuinfer.serving.asking import Asking
from gpuinfer.serving.openapi import answers, holding
from gpuinfer.serving.service import Service, Work

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Place = Annotated[str, Meta(min_length=1, max_length=4096)]


class LoadBody(Struct, forbid_unknown_fields=True):
    """An adapter of this name is loaded from a folder of the server's machine; under way or not, it takes the place of
    the one that the name means now.
    """

    lora_name: Name
    lora_path: Place
    version: Name | None = None  # none: the next whole number
    load_inplace: bool = True  # of vLLM: a name that is loaded already is loaded again
    lora_int_id: int | None = None  # of vLLM: not used


class UnloadBody(Struct, forbid_unknown_fields=True):
    """`policy` with all its versions, or one of them, `policy@7`."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=257)]
    lora_int_id: int | None = None


class UpdateBody(Struct, forbid_unknown_fields=True):
    """As `Backend.update`: other weights of the model, or with `adapter` those of an adapter."""

    version: Name
    weights: Place
    adapter: Name | None = None
    drain: bool = True


def changing(service: Service) -> list[Route]:
    changes = _Changes(service)
    table = (
        ("/v1/load_lora_adapter", LoadBody, changes.load, "Load an adapter, or another version of it."),
        ("/v1/unload_lora_adapter", UnloadBody, changes.unload, "Unload an adapter."),
        ("/v1/update_weights", UpdateBody, changes.update, "Compute with other weights, or another adapter."),
    )
    told = answers("What there is now.", holding("model", "adapters"))
    return [
        Route(
            "POST",
            url,
            service.handler(changes.reading(body, work)),
            "admin",
            summary,
            {"body": body, "responses": told},
        )
        for url, body, work, summary in table
    ]


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
