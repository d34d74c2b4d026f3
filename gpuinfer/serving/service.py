"""What all routes of a replica share: the way to the model, who is under way, and when nothing new is taken."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote

from gpuinfer.api import ModelSpec
from gpuinfer.errors import BackendDied, unwrap
from gpuinfer.generation import Generation, Sampling, Unmasking
from gpuinfer.http.exchange import ClientGone, Exchange, Handler
from gpuinfer.http.malformed import Malformed
from gpuinfer.openai.unmasking import USUAL_TOKENS
from gpuinfer.runtime.session import Session
from gpuinfer.serving.answers import DRAINING, STARTING, NoSuchModel, Refused, Unavailable, plain_headers
from gpuinfer.serving.asking import Asking, asking_of, new_id
from gpuinfer.serving.figures import Recent
from gpuinfer.serving.health import Health
from gpuinfer.serving.spans import NO_SPANS, Spans

log = logging.getLogger(__name__)
T = TypeVar("T")

LARGE = 64 << 10  # bytes of a body that is not decoded on the event loop

Work = Callable[[Exchange, Asking], Awaitable[None]]


@dataclass
class Service:
    """One model, as its routes see it."""

    session: Session
    health: Health
    spec: ModelSpec
    unmasking: Unmasking | None = None  # where a request says nothing of it
    model: Mapping[str, Any] = field(default_factory=dict)  # what its backend tells of it, once it is loaded
    behind_router: bool = False
    recent: Recent = field(default_factory=Recent)
    spans: Spans = NO_SPANS
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        """By which clients name the model."""
        return self.health.model

    @property
    def widest(self) -> int:
        """The most rows of one request."""
        limits = self.session.limits
        return limits.max_rows if limits.slots is None else min(limits.max_rows, limits.slots)

    async def look_at_model(self) -> None:
        """Once it is loaded."""
        await self.session.refresh()
        self.model = self.session.snapshot().device.get("model") or {}

    def usual(self, tokens: int) -> Sampling:
        """Of a request that says nothing; `tokens`: of an answer that goes on from left to right, at most."""
        if self.model.get("diffusion"):  # all of them are computed in each step, and make another answer
            tokens = min(tokens, USUAL_TOKENS)
        return Sampling(max_tokens=tokens, unmasking=self.unmasking)

    def facts(self) -> dict[str, Any]:
        """What the model takes, as far as that is known yet."""
        told: dict[str, Any] = {"kind": self.health.kind}
        if self.health.kind == "rows":
            told |= {"family": self.spec.name, "features": self.spec.inputs, "input_dtype": self.spec.input_dtype}
        if self.health.phase != "starting":
            told |= {name: self.model[name] for name in ("family", "diffusion") if name in self.model}
            told |= {"max_rows": self.widest, "slots": self.session.limits.slots}
            if "context" in self.model:
                told["max_model_len"] = self.model["context"]  # as vLLM's clients read it
        return told

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter that a request means by the model it names (`policy`, or `MODEL:policy`); None: the model itself,
        which one that names none means too. Raises `NoSuchModel`.
        """
        if name is None or name == self.name:
            return None
        for adapter in (name, name.removeprefix(f"{self.name}:")):
            if adapter in self.session.adapters:
                return adapter
        raise NoSuchModel(f"there is no model of that name here. This server has '{self.name}' (GET /v1/models).")

    def handler(self, work: Work) -> Handler:
        """`work` as a handler: counted, refused while nothing is taken, and its errors answered."""

        async def handle(exchange: Exchange) -> None:
            try:
                asking = asking_of(exchange.headers, self.behind_router)
            except Exception as error:  # noqa: BLE001 (whatever is odd about a header)
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
                asking.span = self.spans.begin(
                    f"{exchange.method} {exchange.path}", asking.traceparent, attributes(exchange, asking)
                )
            try:
                await work(exchange, asking)
            except (asyncio.CancelledError, ClientGone):
                asking.span.failed("cancelled")
                raise
            except Malformed:  # said by whoever reads the connection
                asking.span.failed("malformed")
                raise
            except Exception as error:  # noqa: BLE001 (a plugin may raise anything)
                asking.span.failed(type(error).__name__)
                self._refuse(exchange, error, asking.id)
            finally:
                self.health.in_flight -= 1
                asking.span.end()

        return handle

    def refused(self, error: BaseException, request_id: str) -> Refused:
        """What a request that met this error is answered."""
        error = unwrap(error)
        if isinstance(error, BackendDied):
            self.health.dead = True
        elif not hasattr(error, "exit_code"):  # none of ours
            log.error("request %s: %s", request_id, error, exc_info=error)
        return Refused(error, request_id, self.retry_s(), self.name)

    def _refuse(self, exchange: Exchange, error: BaseException, request_id: str) -> None:
        refused = self.refused(error, request_id)
        exchange.notes |= {"id": request_id, "refused": refused.message}
        exchange.respond(refused.status, refused.body, headers=plain_headers(request_id, refused.headers))

    def spent(self, exchange: Exchange, input_tokens: int, output_tokens: int) -> None:
        """So many tokens have come of a request so far: for its log, quotas, and a router's, which reads no answers."""
        exchange.notes |= {"input_tokens": input_tokens, "output_tokens": output_tokens}
        if self.behind_router:
            told = ("X-Gpuinfer-Used", f"{input_tokens} {output_tokens}")
            if exchange.begun:
                exchange.trailers = [told]
            else:
                exchange.added.append(told)

    def retry_s(self) -> float | None:
        """When there may be room in the queue, by the rate at which rows are answered; None: not known."""
        rate = self.recent.rows_per_s
        return self.health.pulse.waiting_rows / rate if rate else None

    @staticmethod
    async def decoded(decode: Callable[[bytes], T], body: bytes) -> T:
        """`decode(body)`; beside the event loop when it is large."""
        return decode(body) if len(body) <= LARGE else await asyncio.to_thread(decode, body)


def tokens_of(answers: Generation) -> tuple[int, int]:
    """Of the prompt, and of all answers to it."""
    return answers.prompt_tokens, sum(len(one.tokens) for one in answers.completions)


def attributes(exchange: Exchange, asking: Asking) -> dict[str, str]:
    """What a request's span says of it."""
    return {
        "http.request.method": exchange.method,
        "url.path": exchange.path,
        "gpuinfer.request_id": asking.id,
        "gpuinfer.priority": asking.priority.name.lower(),
    }


def ways(asking: Asking) -> dict[str, Any]:
    """What a request says to the engine."""
    return {"priority": asking.priority, "timeout": asking.timeout_s, "client": asking.client}
