"""The endpoint /v1/embeddings, as OpenAI has it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from gpuinfer.errors import BadPrompt, unwrap
from gpuinfer.generation import Generation, Prompt, Sampling
from gpuinfer.http.http_exchange import Exchange
from gpuinfer.serving.openai.requests import BadRequest, text_or_tokens, unreadable
from gpuinfer.serving.openai.schema import Some, Texts
from gpuinfer.serving.prompt_requests import PromptRequester, most_samples, rows_in_flight
from gpuinfer.serving.request import RequestContext, encode, plain_headers
from gpuinfer.serving.service import ModelService, Work, session_arguments

MOST_INPUTS = 2048  # of one request
NOTHING_DRAWN = Sampling(max_tokens=0)


class EmbeddingsBody(Struct, forbid_unknown_fields=True):
    """The body of `POST /v1/embeddings`. An input is a text or its tokens."""

    input: Texts
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Some | None = None
    truncate: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    user: Annotated[str, Meta(max_length=1 << 16)] | None = None


def embeddings(service: ModelService) -> Work:
    """The work of /v1/embeddings."""
    decoder = msgspec.json.Decoder(EmbeddingsBody)

    async def work(exchange: Exchange, asking: RequestContext) -> None:
        try:
            asked = await service.decoded(decoder.decode, exchange.body)
        except (ValueError, RecursionError) as error:
            raise unreadable(error, EmbeddingsBody, exchange.body, "request") from error
        adapter = service.adapter_of(asked.model or exchange.query.get("model"))
        prompts = [msgspec.structs.replace(one, adapter=adapter, key=asking.id) for one in _prompts_of(asked)]
        found = await ask_all(service, asking, prompts)
        vectors = [embedding_of(one) for one in found]
        size = len(vectors[0])
        if asked.dimensions is not None and asked.dimensions > size:
            why = f"`dimensions` is {asked.dimensions}, and this model's embeddings have {size}. Ask for fewer."
            raise BadRequest(why, "dimensions")
        tokens = sum(one.prompt_tokens for one in found)
        service.spent(exchange, tokens, 0)
        told = {
            "id": f"embd-{asking.id}",
            "object": "list",
            "model": adapter or service.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        body = await asyncio.to_thread(_response, told, vectors, asked)
        exchange.respond(200, body, headers=plain_headers(asking.id))

    return work


def _prompts_of(asked: EmbeddingsBody) -> list[Prompt]:
    """Raises `BadRequest`."""
    given: Any = asked.input
    several = isinstance(given, list) and not all(isinstance(one, int) for one in given)
    inputs = given if several else [given]
    if not given:
        raise BadRequest("`input` is empty. Give a text, or several.", "input")
    if len(inputs) > MOST_INPUTS:
        raise BadRequest(f"`input` holds {len(inputs):,} texts, and {MOST_INPUTS:,} are the most. Ask twice.", "input")
    prompts = []
    for number, one in enumerate(inputs):
        place = f"input[{number}]" if several else "input"
        if one in ("", []):
            raise BadRequest(f"`{place}` is empty. Give at least one character.", place)
        if not isinstance(one, str) and not (isinstance(one, list) and all(isinstance(token, int) for token in one)):
            raise BadRequest(f"`{place}` is neither a text nor a list of token ids. Give one.", place)
        text, tokens = text_or_tokens(one, None, None, place)
        prompts.append(
            Prompt(
                text=text,
                tokens=None if tokens is None else tuple(tokens),
                sampling=NOTHING_DRAWN,
                truncate=asked.truncate,
                special_tokens=asked.add_special_tokens is not False,
                embed="model",
            )
        )
    return prompts


async def ask_all(service: ModelService, asking: RequestContext, prompts: Sequence[Prompt]) -> list[Generation]:
    """The answers to prompts of which nothing is drawn, in order; not all of them wait in the queue at once."""
    ways = session_arguments(asking)
    if len(prompts) == 1:
        return [await service.session(prompts[0], **ways)]
    limits = service.session.limits
    requester = PromptRequester(service.session, rows_in_flight(limits), most_samples(limits), **ways)
    try:
        async with asyncio.TaskGroup() as group:  # the first that fails ends the others
            tasks = [group.create_task(requester.ask(one)) for one in prompts]
    except BaseExceptionGroup as errors:
        raise unwrap(errors) from None
    return [task.result() for task in tasks]


def embedding_of(found: Generation) -> NDArray[np.float32]:
    """[hidden]. Raises `BadPrompt` where the backend has passed the wish over."""
    if found.embedding is None:
        raise BadPrompt("embeddings cannot be had of this server's backend. Serve the model with --backend inprocess.")
    return np.frombuffer(found.embedding, "<f4")


def shortened(vector: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """The first so many values, of length 1 again (Kusupati et al. 2022, "Matryoshka representation learning")."""
    if dimensions is None or dimensions == len(vector):
        return vector
    kept = vector[:dimensions].astype(np.float64)
    return (kept / (float(np.linalg.norm(kept)) or 1.0)).astype("<f4")


def _response(told: dict[str, Any], vectors: Sequence[NDArray[np.float32]], asked: EmbeddingsBody) -> bytes:
    data: list[dict[str, Any]] = []
    for index, vector in enumerate(vectors):
        kept = shortened(vector, asked.dimensions)
        plain = asked.encoding_format == "float"
        shown = kept.tolist() if plain else base64.b64encode(kept.tobytes()).decode("ascii")
        data.append({"object": "embedding", "index": index, "embedding": shown})
    return encode({**told, "data": data})
