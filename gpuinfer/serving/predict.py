"""POST /predict: a prompt and how many answers, in the plainest words."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from gpuinfer.generation import MOST_TEMPERATURE, Prompt
from gpuinfer.http.exchange import Exchange
from gpuinfer.openai.requests import unreadable
from gpuinfer.openai.schema import MOST_SAMPLES, MOST_TOKENS
from gpuinfer.serving.answers import encode, plain_headers
from gpuinfer.serving.asking import Asking
from gpuinfer.serving.bounds import check_request
from gpuinfer.serving.service import Service, tokens_of, ways


class PredictBody(Struct, forbid_unknown_fields=True):
    """What is asked."""

    prompt: str
    num_samples: Annotated[int, Meta(ge=1, le=MOST_SAMPLES)] = 1
    max_new_tokens: Annotated[int, Meta(ge=1, le=MOST_TOKENS)] = 128
    temperature: Annotated[float, Meta(ge=0, le=MOST_TEMPERATURE)] = 1.0
    model: str | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None


_decoder = msgspec.json.Decoder(PredictBody)


class Predict:
    """The route of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, exchange: Exchange, asking: Asking) -> None:
        asked = await self._service.decoded(_read, exchange.body)
        adapter = self._service.adapter_of(asked.model or exchange.query.get("model"))
        usual = self._service.usual(asked.max_new_tokens)
        sampling = msgspec.structs.replace(
            usual, max_tokens=asked.max_new_tokens, temperature=asked.temperature, seed=asked.seed
        )
        key = "" if asked.seed is not None else asking.id
        prompt = Prompt(text=asked.prompt, sampling=sampling, samples=asked.num_samples, key=key)
        if adapter is not None:
            prompt = msgspec.structs.replace(prompt, adapter=adapter)
        check_request(prompt, self._service.widest)
        found = await self._service.session(prompt, rows=prompt.samples, **ways(asking))
        asking.span.generated(found)
        self._service.spent(exchange, *tokens_of(found))
        samples: list[dict[str, Any]] = [{"text": one.text, "tokens": one.tokens} for one in found.completions]
        exchange.respond(200, encode({"samples": samples}), headers=plain_headers(asking.id))


def _read(body: bytes) -> PredictBody:
    try:
        return _decoder.decode(body)
    except (ValueError, RecursionError) as error:
        raise unreadable(error, PredictBody, body, "request") from error
