"""The endpoints /v1/score and /rerank in the forms of vLLM, Jina and Cohere, by log-probabilities: how likely the model
thinks that one text follows another. Documents are ranked by how likely the query follows them ("query likelihood":
Ponte and Croft 1998; with a language model's own words: Sachan et al. 2022, "Improving passage retrieval with zero-shot
question generation").
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from gpuinfer.errors import BadPrompt, BadResult, UsageError
from gpuinfer.generation import Generation, Prompt, Sampling
from gpuinfer.http.http_exchange import Exchange
from gpuinfer.serving.embedding_endpoint import MOST_INPUTS, ask_all
from gpuinfer.serving.openai.requests import BadRequest, unreadable
from gpuinfer.serving.request import RequestContext, encode, plain_headers
from gpuinfer.serving.service import ModelService, Work

RANKED = "{document}\n\nA question that this text answers:"  # what comes before a query

OneOrMore = str | list[str]


class ScoredDocument(Struct):
    """A document as Jina and Cohere have it; other fields are passed over."""

    text: str


class ScoreBody(Struct, forbid_unknown_fields=True):
    """The body of `POST /v1/score`: `text_1` and `text_2`, or `queries` and `documents`."""

    text_1: OneOrMore | None = None
    text_2: OneOrMore | None = None
    queries: OneOrMore | None = None
    documents: OneOrMore | None = None
    model: str | None = None


class RerankBody(Struct, forbid_unknown_fields=True):
    """The body of `POST /rerank`."""

    query: str
    documents: list[str | ScoredDocument]
    model: str | None = None
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None


@dataclass(frozen=True, slots=True)
class TextPair:
    """How likely `after` follows `before`. `place`: the field that the client has it from."""

    before: str
    after: str
    place: str


def pair_scores(service: ModelService) -> Work:
    """The work of /v1/score."""
    decoder = msgspec.json.Decoder(ScoreBody)

    async def work(exchange: Exchange, asking: RequestContext) -> None:
        try:
            asked = await service.decoded(decoder.decode, exchange.body)
        except (ValueError, RecursionError) as error:
            raise unreadable(error, ScoreBody, exchange.body, "request") from error
        adapter = service.adapter_of(asked.model or exchange.query.get("model"))
        found = await _likelihoods(service, exchange, asking, _pairs_of(asked), adapter)
        data = [{"index": index, "object": "score", "score": one[0]} for index, one in enumerate(found)]
        body = {"id": f"score-{asking.id}", "object": "list", "created": int(time.time())}
        body |= {"model": adapter or service.name, "data": data, "usage": _usage(found)}
        exchange.respond(200, encode(body), headers=plain_headers(asking.id))

    return work


def rankings(service: ModelService) -> Work:
    """The work of /rerank."""
    decoder = msgspec.json.Decoder(RerankBody)

    async def work(exchange: Exchange, asking: RequestContext) -> None:
        try:
            asked = await service.decoded(decoder.decode, exchange.body)
        except (ValueError, RecursionError) as error:
            raise unreadable(error, RerankBody, exchange.body, "request") from error
        adapter = service.adapter_of(asked.model or exchange.query.get("model"))
        texts = [one if isinstance(one, str) else one.text for one in asked.documents]
        pairs = _ranked_pairs([asked.query] * len(texts), texts, "query")
        found = await _likelihoods(service, exchange, asking, pairs, adapter)
        order = sorted(range(len(texts)), key=lambda index: -found[index][0])  # of equal ones the first comes first
        results: list[dict[str, Any]] = []
        for index in order[: asked.top_n or None]:
            document = {} if asked.return_documents is False else {"document": {"text": texts[index]}}
            results.append({"index": index, **document, "relevance_score": found[index][0]})
        body = {
            "id": f"rerank-{asking.id}",
            "model": adapter or service.name,
            "usage": _usage(found),
            "results": results,
        }
        exchange.respond(200, encode(body), headers=plain_headers(asking.id))

    return work


def _pairs_of(asked: ScoreBody) -> list[TextPair]:
    """Raises `BadRequest`."""
    ranked = asked.queries is not None or asked.documents is not None
    names = ("queries", "documents") if ranked else ("text_1", "text_2")
    one, other = getattr(asked, names[0]), getattr(asked, names[1])
    if one is None or other is None or (ranked and (asked.text_1 is not None or asked.text_2 is not None)):
        raise BadRequest(
            "two sides are scored: `text_1` and `text_2`, or `queries` and `documents`. Give both of them."
        )
    firsts, seconds = ([side] if isinstance(side, str) else side for side in (one, other))
    if len(firsts) != len(seconds) and len(firsts) != 1:
        why = f"`{names[0]}` has {len(firsts)} texts and `{names[1]}` {len(seconds)}. Give as many, or one and several."
        raise BadRequest(why, names[0])
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if ranked:
        return _ranked_pairs(firsts, seconds, names[0])
    several = not isinstance(other, str)
    found = zip(firsts, seconds, strict=True)
    return _checked(
        [TextPair(first, second, f"text_2[{at}]" if several else "text_2") for at, (first, second) in enumerate(found)],
        "text_2",
    )


def _ranked_pairs(queries: Sequence[str], documents: Sequence[str], name: str) -> list[TextPair]:
    for query in queries:
        if not query.strip():
            raise BadRequest(f"`{name}` is empty. Write something.", name)
    found = zip(queries, documents, strict=True)
    pairs = [
        TextPair(RANKED.format(document=document.strip()), f" {query.strip()}", f"documents[{at}]")
        for at, (query, document) in enumerate(found)
    ]
    return _checked(pairs, "documents")


def _checked(pairs: list[TextPair], name: str) -> list[TextPair]:
    if not pairs:
        raise BadRequest(f"`{name}` is empty. Give at least one text.", name)
    if len(pairs) > MOST_INPUTS:
        raise BadRequest(f"`{name}` has {len(pairs):,} texts, and {MOST_INPUTS:,} are the most. Ask twice.", name)
    return pairs


async def _likelihoods(
    service: ModelService, exchange: Exchange, asking: RequestContext, pairs: Sequence[TextPair], adapter: str | None
) -> list[tuple[float, int]]:
    """Of each pair the geometric mean of the probabilities of `after`'s tokens, and how many tokens went through the
    model. Raises `BadRequest`.
    """

    def tokenized() -> list[Prompt]:
        prompts = []
        for pair in pairs:
            try:
                tokens, start = service.language.continuation(pair.before, pair.after)
            except (BadPrompt, UsageError) as error:
                raise BadRequest(f"`{pair.place}`: {error}", pair.place) from None
            if not start or start == len(tokens):
                what = "nothing comes before it" if not start else "it adds no token"
                raise BadRequest(
                    f"`{pair.place}` cannot be scored: {what}. Give two texts that are not empty.", pair.place
                )
            context = service.model.get("context")
            if context is not None and len(tokens) > context:
                raise BadRequest(
                    f"`{pair.place}` and what belongs to it have {len(tokens)} tokens, and the context {context}. "
                    "Shorten it.",
                    pair.place,
                )
            sampling = Sampling(max_tokens=0, prompt_logprobs=0, prompt_logprob_start=start)
            prompts.append(Prompt(tokens=tokens, sampling=sampling, key=asking.id, adapter=adapter))
        return prompts

    await service.language.opened()
    prompts = await asyncio.to_thread(tokenized)
    found = await ask_all(service, asking, prompts)
    tokens = sum(one.prompt_tokens for one in found)
    service.spent(exchange, tokens, 0)
    return [(_likelihood(prompt, one), one.prompt_tokens) for prompt, one in zip(prompts, found, strict=True)]


def _likelihood(prompt: Prompt, found: Generation) -> float:
    start = prompt.sampling.prompt_logprob_start
    logprobs = [one.chosen.logprob for one in (found.prompt_logprobs or ())[start:] if one is not None]
    if not logprobs:
        raise BadResult("the backend told no log-probabilities of a prompt. Use another backend.")
    return math.exp(sum(logprobs) / len(logprobs))


def _usage(found: Sequence[tuple[float, int]]) -> dict[str, int]:
    tokens = sum(count for _, count in found)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
