"""All models of one replica: which of them a request means, and how they are together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gpuinfer.http.exchange import Exchange, Handler
from gpuinfer.models.bodies import MEDIA_TYPE
from gpuinfer.openai.requests import BadRequest
from gpuinfer.runtime.session import Session
from gpuinfer.serving.answers import NoSuchModel
from gpuinfer.serving.asking import Asking, bytes_begun
from gpuinfer.serving.figures import Recent
from gpuinfer.serving.service import LARGE, Service

SEVERAL = "several"  # kinds of model in one server
WITHOUT_JSON = "/v1/generations"  # which has frames of msgpack for a body


class _Named(msgspec.Struct):
    """Of a body, what says which model is meant."""

    model: Any = None


_decode = msgspec.json.Decoder(_Named).decode


@dataclass
class Served:
    """What one replica serves. `session` is the first model's, which counts all of them."""

    services: Sequence[Service]
    recent: Recent = field(default_factory=Recent)  # of all of them
    http_counts: Callable[[], Mapping[str, int]] = dict
    at_drain: list[Callable[[], None]] = field(default_factory=list)  # ends what would go on for ever

    @property
    def session(self) -> Session:
        return self.services[0].session

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.services]

    @property
    def in_flight(self) -> int:
        """Requests that wait for their answers."""
        return sum(one.health.in_flight for one in self.services)

    def become(self, phase: Any) -> None:
        """All of them are in this phase of their lives."""
        for one in self.services:
            one.health.phase = phase

    # How they are

    @property
    def code(self) -> int:
        """200, or 503 where one of them is not well."""
        return max(one.health.code for one in self.services)

    @property
    def status(self) -> str:
        """The first that is not ready is how all are."""
        return next((one.health.status for one in self.services if one.health.status != "ready"), "ready")

    def told(self) -> dict[str, Any]:
        """What `GET /health` answers: of one model its own word, of several what holds for all, and each one's."""
        each = [one.health.told() for one in self.services]
        if len(each) == 1:
            return each[0]
        kinds = {one["kind"] for one in each}
        return {
            "server": each[0]["server"],
            "status": self.status,
            **{name: all(one[name] for one in each) for name in ("alive", "ready")},
            **{name: any(one[name] for one in each) for name in ("busy", "stuck")},
            "heartbeat_age_s": max(one["heartbeat_age_s"] for one in each),
            **{name: sum(one[name] for one in each) for name in ("in_flight", "waiting_rows")},
            "model": ", ".join(self.names),
            "kind": kinds.pop() if len(kinds) == 1 else SEVERAL,
            "models": [{name: value for name, value in one.items() if name != "server"} for one in each],
        }

    # Which is meant

    def chosen(self, name: str | None, kinds: Sequence[str]) -> Service:
        """The model that a request means which names this one; `kinds` of model answer it.

        One that names none means the only one of its kind. Raises `BadRequest` where there are several, and
        `NoSuchModel` for a name that is none of theirs.
        """
        if name is None:
            fitting = [one for one in self.services if one.health.kind in kinds]
            if len(fitting) > 1:
                raise BadRequest(f"which model? Name one of {self._listed(fitting)} as `model`.", "model")
            return (fitting or self.services)[0]
        for one in self.services:
            if name == one.name:
                return one
        owners = [one for one in self.services if name in one.session.adapters]
        if len(owners) > 1:
            words = " or ".join(f"'{one.name}:{name}'" for one in owners)
            raise BadRequest(f"several models have an adapter of that name. Write {words}.", "model")
        own = [one for one in self.services if name.removeprefix(f"{one.name}:") in one.session.adapters]
        if not owners and not own:
            known = self._listed(self.services)
            raise NoSuchModel(f"there is no model of that name here. This server has {known} (GET /v1/models).")
        return (owners or own)[0]

    @staticmethod
    def _listed(services: Sequence[Service]) -> str:
        return ", ".join(f"'{one.name}'" for one in services)

    def choosing(self, handlers: Mapping[str, Handler], kinds: Sequence[str]) -> Handler:
        """A handler that hands a request to the one of the model that it means; `handlers` are by the models' names."""

        async def handle(exchange: Exchange) -> None:
            try:
                service = self.chosen(await self._named(exchange), kinds)
            except (BadRequest, NoSuchModel) as error:
                await self.services[0].handler(_raising(error))(exchange)
            else:
                await handlers[service.name](exchange)

        return handle

    async def _named(self, exchange: Exchange) -> str | None:
        """The model that the body names, or else the query."""
        plain = exchange.path != WITHOUT_JSON and not exchange.headers.get("content-type", "").startswith(MEDIA_TYPE)
        if plain:
            body = exchange.body[bytes_begun(exchange.headers, self.services[0].behind_router) :]
            name = _name_in(body) if len(body) <= LARGE else await asyncio.to_thread(_name_in, body)
            if name is not None:
                return name
        return exchange.query.get("model")


def _name_in(body: bytes) -> str | None:
    """None also for a body that is none: whoever reads all of it says what is wrong."""
    try:
        name = _decode(body).model
    except (ValueError, RecursionError):
        return None
    return name if isinstance(name, str) else None


def _raising(error: Exception) -> Callable[[Exchange, Asking], Any]:
    async def work(exchange: Exchange, asking: Asking) -> None:
        raise error

    return work
