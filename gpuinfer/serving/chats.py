"""OpenAI's /v1/completions and /v1/chat/completions: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from gpuinfer.generation import Generation, Prompt
from gpuinfer.http.exchange import ClientGone, Exchange
from gpuinfer.openai.requests import AskedRequest, PromptDefaults, RequestReader
from gpuinfer.openai.responses import Chunks, Envelope, response
from gpuinfer.openai.schema import MOST_TOKENS
from gpuinfer.serving import events
from gpuinfer.serving.answers import encode, plain_headers
from gpuinfer.serving.asking import Asking
from gpuinfer.serving.bounds import MOST_PROMPTS, check_request
from gpuinfer.serving.growing import growing, whole
from gpuinfer.serving.service import Service, tokens_of, ways

USUAL = {"/v1/completions": 16, "/v1/chat/completions": MOST_TOKENS}
"""Tokens of an answer that is asked for without a number: as OpenAI has them, where a chat goes on to its end."""


class Chats:
    """Both routes of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._readers: dict[str, RequestReader] = {}

    def _reader(self, url: str) -> RequestReader:
        """Made with the first request: what is usual is known once the model is loaded."""
        if url not in self._readers:
            self._readers[url] = RequestReader(PromptDefaults(self._service.usual(USUAL[url])), streams=True)
        return self._readers[url]

    def answer(self, url: str) -> Callable[[Exchange, Asking], Any]:
        """The work of the route `url`."""

        async def work(exchange: Exchange, asking: Asking) -> None:
            begun, body = events.split_begun(exchange.body, asking.begun)
            asked = await self._service.decoded(lambda body: self._reader(url).read_all(body, url, MOST_PROMPTS), body)
            adapter = self._service.adapter_of(
                exchange.query.get("model") if asked[0].model is None else asked[0].model
            )
            for one in asked:
                check_request(one.prompt, self._service.widest)
            prompts = _keyed(asked, asking.id, adapter)
            if begun is not None:
                prompts = _taken_up(prompts, begun)
            name, created = adapter or self._service.name, asking.created or int(time.time())
            envelope = Envelope(asking.id, asked[0].chat, name, created)
            if asked[0].stream:
                chunks = Chunks(envelope, asked[0].usage)
                await self._stream(exchange, asking, prompts, events.Events(chunks, self._service.behind_router, begun))
            else:
                answers = await whole(self._service.session, prompts, ways(asking))
                asking.span.generated(answers)
                self._service.spent(exchange, *tokens_of(answers))
                exchange.respond(200, encode(response(envelope, answers)), headers=plain_headers(asking.id))

        return work

    async def _stream(self, exchange: Exchange, asking: Asking, prompts: Sequence[Prompt], told: events.Events) -> None:
        """The response begins with the first news: what fails before that fails with a status of its own."""
        tokens = 0
        try:
            async with contextlib.aclosing(growing(self._service.session, prompts, ways(asking))) as answers:
                async for news in answers:
                    if isinstance(news, Generation):
                        asking.span.generated(news)
                        self._service.spent(exchange, *tokens_of(news))
                    else:
                        tokens += len(news.tokens)
                    data = told.end(news) if isinstance(news, Generation) else told.of(news)
                    if not exchange.begun:
                        exchange.begin(200, events.CONTENT_TYPE, plain_headers(asking.id, events.HEADERS))
                    if data:
                        await exchange.write(data)
            exchange.end()
        except (ClientGone, asyncio.CancelledError):
            exchange.notes["output_tokens"] = tokens
            raise
        except Exception as error:
            if not exchange.begun:
                raise
            asking.span.failed(type(error).__name__)
            refused = self._service.refused(error, asking.id)
            exchange.notes["refused"] = refused.message
            await exchange.write(events.error_event(refused.body))
            exchange.end()


def _taken_up(prompts: Sequence[Prompt], begun: Mapping[int, events.Begun]) -> list[Prompt]:
    """With the tokens that are known of each sample. Raises `BadPrompt`."""
    samples = prompts[0].samples  # of each
    known = events.tokens_begun(begun, samples * len(prompts))
    return [
        msgspec.structs.replace(prompt, begun=known[index * samples : (index + 1) * samples])
        for index, prompt in enumerate(prompts)
    ]


def _keyed(asked: Sequence[AskedRequest], request_id: str, adapter: str | None) -> list[Prompt]:
    """Each draws its own answer; those with a seed the answer of that seed, whoever asks."""
    several = len(asked) > 1
    found = []
    for index, one in enumerate(asked):
        own: dict[str, Any] = {} if adapter is None else {"adapter": adapter}
        if one.prompt.sampling.seed is None:
            own["key"] = f"{request_id}.{index}" if several else request_id
        found.append(msgspec.structs.replace(one.prompt, **own) if own else one.prompt)
    return found
