"""The endpoint /v1/responses, as far as it maps to chats. Nothing is kept between requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Generation, Part
from gpuinfer.http.http_exchange import Exchange
from gpuinfer.serving.openai.requests import BadRequest, PromptDefaults, RequestReader, unreadable
from gpuinfer.serving.openai.response_items import Event, ResponseItems, ResponsesBody, chat_body
from gpuinfer.serving.openai.schema import MOST_TOKENS
from gpuinfer.serving.request import ErrorResponse, RequestContext, check_request, encode, plain_headers
from gpuinfer.serving.service import ModelService, Work
from gpuinfer.serving.text_endpoints import CONTENT_TYPE, HEADERS, send_stream, send_whole

CHATS = "/v1/chat/completions"


def responses(service: ModelService) -> Work:
    """The work of /v1/responses."""
    decoder = msgspec.json.Decoder(ResponsesBody)
    readers: list[RequestReader] = []

    async def work(exchange: Exchange, asking: RequestContext) -> None:
        if asking.begun:
            raise BadRequest("a response that has begun cannot go on elsewhere. Ask for it again.")
        if not readers:  # the defaults are known once the model is loaded
            readers.append(RequestReader(PromptDefaults(service.usual(MOST_TOKENS)), streams=True))
        try:
            asked = await service.decoded(decoder.decode, exchange.body)
        except (ValueError, RecursionError) as error:
            raise unreadable(error, ResponsesBody, exchange.body, "request") from error
        try:
            found = await service.decoded(lambda body: readers[0].read(body, CHATS), chat_body(asked))
            adapter = service.adapter_of(asked.model or exchange.query.get("model"))
            check_request(found.prompt, service.widest)
            prompt, form = await service.forms.of(found.prompt, found.tool_choice, found.parallel_tool_calls, asking.id)
        except BadRequest as error:
            raise _in_its_words(error) from None
        own: dict[str, Any] = {} if adapter is None else {"adapter": adapter}
        if prompt.sampling.seed is None:
            own["key"] = asking.id
        prompt = msgspec.structs.replace(prompt, **own)
        created = asking.created or int(time.time())
        items = ResponseItems(asking.id, adapter or service.name, created, form, asked)
        if not asked.stream:
            answers = await send_whole(service, exchange, asking, [prompt])
            items.finish(answers.completions[0], answers)
            exchange.respond(200, encode(items.body), headers=plain_headers(asking.id))
            return
        begun = False

        def frame(news: Part | Generation) -> bytes:
            nonlocal begun
            events = [] if begun else items.begin()
            begun = True
            events += items.feed(news.text) if isinstance(news, Part) else items.finish(news.completions[0], news)
            return _written(events)

        def failure(error: Exception, refused: ErrorResponse) -> bytes:
            return _written([items.failed(None, refused.message)])

        kind = (CONTENT_TYPE, plain_headers(asking.id, HEADERS))
        await send_stream(service, exchange, asking, [prompt], kind, frame, failure)

    return work


def _written(events: Sequence[Event]) -> bytes:
    return b"".join([b"event: %b\ndata: %b\n\n" % (one["type"].encode(), encode(one)) for one in events])


def _in_its_words(error: BadRequest) -> BadPrompt:
    """An error of the chat that a request maps to, with the names of fields that the request has."""
    message, param = str(error), error.param
    for theirs, ours in (("].function", "]"), ("messages", "input"), ("response_format", "text.format")):
        message = message.replace(theirs, ours)
        param = None if param is None else param.replace(theirs, ours)
    return BadRequest(message, param)
