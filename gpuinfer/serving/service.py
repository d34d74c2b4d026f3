"""What all routes of a model share: session, health, requests under way; and all models of one replica, with the choice
of the one that a request names.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from gpuinfer.api import ModelSpec
from gpuinfer.config.model_names import listed_names, meant_names, name_at_hub
from gpuinfer.config.setup_file import ToolFormatName
from gpuinfer.errors import BackendDied, unwrap
from gpuinfer.generation import Generation, Sampling, Unmasking
from gpuinfer.http.http_exchange import ClientGone, Exchange, Handler, is_kserve
from gpuinfer.http.parser import Malformed
from gpuinfer.models.row_format import MEDIA_TYPE
from gpuinfer.runtime.session import Session
from gpuinfer.serving.answer_forms import AnswerForms, Reasoning
from gpuinfer.serving.health import RecentCounters, ReplicaHealth
from gpuinfer.serving.model_language import ModelLanguage
from gpuinfer.serving.openai.requests import BadRequest
from gpuinfer.serving.openai.sampling_fields import USUAL_TOKENS
from gpuinfer.serving.request import (
    DRAINING,
    STARTING,
    ErrorResponse,
    NoSuchModel,
    RequestContext,
    Unavailable,
    encode,
    new_id,
    plain_headers,
    request_context,
    resumed_bytes,
)
from gpuinfer.serving.telemetry.spans import NO_SPANS, Spans

log = logging.getLogger(__name__)
T = TypeVar("T")

LARGE = 64 << 10  # bytes of a body that is not decoded on the event loop

Work = Callable[[Exchange, RequestContext], Awaitable[None]]


@dataclass
class ModelService:
    """One model that is served."""

    session: Session
    health: ReplicaHealth
    spec: ModelSpec
    unmasking: Unmasking | None = None  # the default of requests
    model: Mapping[str, Any] = field(default_factory=dict)  # facts from its backend, once it is loaded
    behind_router: bool = False
    recent: RecentCounters = field(default_factory=RecentCounters)
    spans: Spans = NO_SPANS
    created: int = field(default_factory=lambda: int(time.time()))
    tool_format: ToolFormatName = "auto"
    reasoning: Reasoning = "auto"
    aliases: tuple[str, ...] = ()  # the model's other names for clients
    language: ModelLanguage = field(init=False)  # of a model of text
    forms: AnswerForms = field(init=False)  # of its answers in chats

    def __post_init__(self) -> None:
        self.language = ModelLanguage(self.spec)
        self.forms = AnswerForms(self.language, self.tool_format, self.reasoning)

    @property
    def name(self) -> str:
        """The model's name for clients: in answers, metrics and logs."""
        return self.health.model

    @property
    def names(self) -> tuple[str, ...]:
        """All its names for clients, `name` first."""
        return (self.name, *self.aliases)

    @property
    def widest(self) -> int:
        """The most rows of one request."""
        limits = self.session.limits
        return limits.max_rows if limits.slots is None else min(limits.max_rows, limits.slots)

    def usual(self, tokens: int) -> Sampling:
        """The default sampling; `tokens`: the most of an answer that is generated from left to right."""
        if self.model.get("diffusion"):  # all of them are computed in each step, and make another answer
            tokens = min(tokens, USUAL_TOKENS)
        return Sampling(max_tokens=tokens, unmasking=self.unmasking)

    def facts(self) -> dict[str, Any]:
        """The model's limits and facts, as far as they are known yet."""
        told: dict[str, Any] = {"kind": self.health.kind}
        if self.health.kind == "rows":
            told["family"] = self.spec.name
            if self.spec.layout is None:
                told |= {"features": self.spec.inputs, "input_dtype": self.spec.input_dtype}
            else:
                told["row"] = self.spec.layout.to_wire()
        if self.health.phase != "starting":
            told |= {name: self.model[name] for name in ("family", "diffusion") if name in self.model}
            told |= {"max_rows": self.widest, "slots": self.session.limits.slots}
            if "context" in self.model:
                told["max_model_len"] = self.model["context"]  # as vLLM's clients read it
        return told

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter that a request means by the model it names (`policy`, or `MODEL:policy`, as `meant_names` reads
        it); None: the model itself, which one that names none means too.

        Raises `NoSuchModel`, and `BadRequest` where it means several.
        """
        if name is None or name in self.names:
            return None
        if name in self.session.adapters:
            return name
        adapters = self.adapters_by_name()
        found = meant_names(name, adapters)
        if len(meant := {adapters[one] for one in found}) > 1:
            raise BadRequest(f"several models are called so. Write {listed_names(found)}.", "model")
        if not meant:
            raise unknown_model([self])
        return meant.pop()

    def adapters_by_name(self) -> dict[str, str | None]:
        """The adapter, or None for the model itself, by every name under which clients may ask."""
        names: dict[str, str | None] = dict.fromkeys(name_at_hub(self.spec.name)) if self.health.kind == "text" else {}
        names |= dict.fromkeys(self.names)
        for adapter in self.session.adapters:
            names |= {adapter: adapter, **{f"{name}:{adapter}": adapter for name in self.names}}
        return names

    def handler(self, work: Work) -> Handler:
        """`work` as a handler: counted, refused unless the server is ready, its errors answered."""

        async def handle(exchange: Exchange) -> None:
            try:
                asking = request_context(exchange.headers, self.behind_router)
            except Exception as error:  # noqa: BLE001 (any malformed header)
                self._refuse(exchange, error, new_id())
                return
            if self.health.phase != "ready":
                why = STARTING if self.health.phase == "starting" else DRAINING
                self._refuse(exchange, Unavailable(why), asking.id)
                return
            self.health.in_flight += 1
            exchange.notes |= {"id": asking.id, "model": self.name}
            if self.behind_router:
                exchange.added.append(("X-Gpuinfer-Model", quote(self.name)))
            if asking.traceparent is not None:
                exchange.notes["trace"] = asking.traceparent
            if self.spans.wanted:
                facts = {"http.request.method": exchange.method, "url.path": exchange.path}
                facts |= {"gpuinfer.request_id": asking.id, "gpuinfer.priority": asking.priority.name.lower()}
                asking.span = self.spans.begin(f"{exchange.method} {exchange.path}", asking.traceparent, facts)
                exchange.notes |= asking.span.ids()
            with asking.span.active():
                try:
                    await work(exchange, asking)
                except (
                    asyncio.CancelledError,
                    ClientGone,
                    Malformed,
                ) as error:  # the connection answers malformed ones
                    asking.span.failed("malformed" if isinstance(error, Malformed) else "cancelled")
                    raise
                except Exception as error:  # noqa: BLE001 (a plugin may raise anything)
                    asking.span.failed(type(error).__name__)
                    self._refuse(exchange, error, asking.id)
                finally:
                    self.health.in_flight -= 1
                    asking.span.end(exchange.status)

        return handle

    def refused(self, error: BaseException, request_id: str) -> ErrorResponse:
        """The response to a request that failed with this error."""
        error = unwrap(error)
        if isinstance(error, BackendDied):
            self.health.dead = True
        elif not hasattr(error, "exit_code"):  # none of ours
            log.error("request %s: %s", request_id, error, exc_info=error)
        seconds, counted = self.recent.window()  # the queue may have room after it, by the rate of the last answers
        retry_s = self.health.pulse.waiting_rows * seconds / counted.rows if counted.rows else None
        return ErrorResponse(error, request_id, retry_s, self.name)

    def _refuse(self, exchange: Exchange, error: BaseException, request_id: str) -> None:
        refused = self.refused(error, request_id)
        exchange.notes |= {"id": request_id, "refused": refused.message}
        body = encode({"error": refused.message}) if is_kserve(exchange.path) else refused.body
        exchange.respond(refused.status, body, headers=plain_headers(request_id, refused.headers))

    def spent(self, exchange: Exchange, input_tokens: int, output_tokens: int) -> None:
        """Record a request's tokens so far: for the log and quotas here, and for a router's, which reads no answers."""
        exchange.notes |= {"input_tokens": input_tokens, "output_tokens": output_tokens}
        if self.behind_router:
            told = ("X-Gpuinfer-Used", f"{input_tokens} {output_tokens}")
            if exchange.begun:
                exchange.trailers = [told]
            else:
                exchange.added.append(told)

    @staticmethod
    async def decoded(decode: Callable[[bytes], T], body: bytes) -> T:
        """`decode(body)`; beside the event loop when it is large."""
        return decode(body) if len(body) <= LARGE else await asyncio.to_thread(decode, body)


def unknown_model(services: Sequence[ModelService]) -> NoSuchModel:
    """The error for a name that none of these has, which lists theirs."""
    names = [name for one in services for name in one.names] + [
        name for one in services for name in one.session.adapters
    ]
    served = listed_names(list(dict.fromkeys(names)))
    return NoSuchModel(f"there is no model of that name here. This server has {served} (GET /v1/models).")


def tokens_of(answers: Generation) -> tuple[int, int]:
    """Tokens of the prompt, and of all answers to it."""
    return answers.prompt_tokens, sum(len(one.tokens) for one in answers.completions)


def session_arguments(asking: RequestContext) -> dict[str, Any]:
    """A request's arguments for the engine."""
    return {"priority": asking.priority, "timeout": asking.timeout_s, "client": asking.client}


SEVERAL = "several"  # kinds of model in one server
WITHOUT_JSON = "/v1/generations"  # which has frames of msgpack for a body


class _Named(msgspec.Struct):
    """The part of a body that names the model."""

    model: Any = None


_decode = msgspec.json.Decoder(_Named).decode


@dataclass
class ServedModels:
    """What one replica serves. `session` is the first model's, which counts all of them."""

    services: Sequence[ModelService]
    recent: RecentCounters = field(default_factory=RecentCounters)  # of all of them
    http_counts: Callable[[], Mapping[str, int]] = dict
    at_drain: list[Callable[[], None]] = field(default_factory=list)  # end streams without an end

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
        """Set the phase of all models."""
        for one in self.services:
            one.health.phase = phase

    # Health

    @property
    def code(self) -> int:
        """200, or 503 where one model is not ready."""
        return max(one.health.code for one in self.services)

    @property
    def status(self) -> str:
        """The status of the first model that is not ready."""
        return next((one.health.status for one in self.services if one.health.status != "ready"), "ready")

    def told(self) -> dict[str, Any]:
        """What `GET /health` answers: of one model its health, of several the sum, and each one's."""
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
            **{name: sum(one[name] for one in each) for name in ("in_flight", "waiting_rows", "room")},
            "model": ", ".join(self.names),
            "kind": kinds.pop() if len(kinds) == 1 else SEVERAL,
            "models": [{name: value for name, value in one.items() if name != "server"} for one in each],
        }

    # Choice of the model

    def chosen(self, name: str | None, kinds: Sequence[str]) -> ModelService:
        """The model of this name, or of no name the only one of these kinds.

        Raises `BadRequest` where there are several, and `NoSuchModel` for an unknown name.
        """
        if name is None:
            fitting = [one for one in self.services if one.health.kind in kinds]
            if len(fitting) > 1:
                names = listed_names([one.name for one in fitting])
                raise BadRequest(f"which model? Name one of {names} as `model`.", "model")
            return (fitting or self.services)[0]
        for one in self.services:
            if name in one.names:
                return one
        owners = [one for one in self.services if name in one.session.adapters]
        if len(owners) > 1:
            words = " or ".join(f"'{one.name}:{name}'" for one in owners)
            raise BadRequest(f"several models have an adapter of that name. Write {words}.", "model")
        if owners:
            return owners[0]
        by_name: dict[str, list[ModelService]] = {}
        for one in self.services:
            for known in one.adapters_by_name():
                by_name.setdefault(known, []).append(one)
        found = meant_names(name, by_name)
        meant = list({id(one): one for known in found for one in by_name[known]}.values())
        if not meant:
            raise unknown_model(self.services)
        if len(meant) > 1:
            raise BadRequest(
                f"several models may be called so. Write {listed_names([one.name for one in meant])}.", "model"
            )
        return meant[0]

    def choosing(self, handlers: Mapping[str, Handler], kinds: Sequence[str]) -> Handler:
        """A handler that calls the one of the model that the request names; `handlers` are by the models' names."""

        async def handle(exchange: Exchange) -> None:
            try:
                service = self.chosen(await self._named(exchange), kinds)
            except (BadRequest, NoSuchModel) as error:
                refusal = error

                async def refuse(exchange: Exchange, asking: RequestContext) -> None:
                    raise refusal

                await self.services[0].handler(refuse)(exchange)
            else:
                await handlers[service.name](exchange)

        return handle

    async def _named(self, exchange: Exchange) -> str | None:
        """The model that the path or the body names, or else the query."""
        if (name := exchange.parameters.get("model")) is not None:
            return name
        plain = exchange.path != WITHOUT_JSON and not exchange.headers.get("content-type", "").startswith(MEDIA_TYPE)
        if plain:
            body = exchange.body[resumed_bytes(exchange.headers, self.services[0].behind_router) :]
            if (name := await ModelService.decoded(_name_in, body)) is not None:
                return name
        return exchange.query.get("model")


def _name_in(body: bytes) -> str | None:
    """None also for a malformed body: the model's own route says what is wrong."""
    try:
        name = _decode(body).model
    except (ValueError, RecursionError):
        return None
    return name if isinstance(name, str) else None
