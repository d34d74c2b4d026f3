"""The endpoint /v1/responses, as far as it maps to chats. Nothing is kept between requests."""

from __future__ import annotations

import time
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
from gpuinfer.serving.text_endpoints import (
    CONTENT_TYPE,
    HEADERS,
    ResumedSample,
    send_stream,
    send_whole,
    split_resumed,
)

SEQUENCE = 999_999_999  # in a sample's place, as the router has it: what follows is the number of the event
CHATS = "/v1/chat/completions"


def responses(service: ModelService) -> Work:
    """The work of /v1/responses."""
    decoder = msgspec.json.Decoder(ResponsesBody)
    readers: list[RequestReader] = []

    async def work(exchange: Exchange, asking: RequestContext) -> None:
        begun, body = split_resumed(exchange.body, asking.begun)
        if not readers:  # the defaults are known once the model is loaded
            readers.append(RequestReader(PromptDefaults(service.usual(MOST_TOKENS)), streams=True))
        try:
            asked = await service.decoded(decoder.decode, body)
        except (ValueError, RecursionError) as error:
            raise unreadable(error, ResponsesBody, body, "request") from error
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
        events = ResponseEvents(items, service.behind_router)
        kind = (CONTENT_TYPE, plain_headers(asking.id, HEADERS))
        if begun is not None:
            if wrong := set(begun) - {0, SEQUENCE}:
                raise BadPrompt(f"something has been sent of sample {min(wrong)}, and a response has one.")
            had = begun.get(0, ResumedSample())
            if had.ended:  # nothing but the end of the stream has been lost
                exchange.begin(200, *kind)
                exchange.end()
                return
            prompt = msgspec.structs.replace(prompt, begun=(had.tokens,))
            numbers = begun.get(SEQUENCE, ResumedSample()).tokens
            events.go_on(await service.forms.replayed(prompt, had.tokens), max(numbers, default=-1) + 1)
        await send_stream(service, exchange, asking, [prompt], kind, events.frame, events.failure)

    return work


class ResponseEvents:
    """The events of one response. `numbered`: for a router, which gives out those of one part together or not at all,
    and learns from the last of them the tokens in it.
    """

    def __init__(self, items: ResponseItems, numbered: bool) -> None:
        self._items, self._numbered = items, numbered
        self._begun = False
        self._unsaid: tuple[int, ...] = ()  # tokens of which the client has been sent nothing yet

    def go_on(self, text: str, number: int) -> None:
        """An earlier attempt has sent the events of this text; the next one has this number."""
        self._items.feed(text)
        self._items.number, self._begun = number, True

    def frame(self, news: Part | Generation) -> bytes:
        events = [] if self._begun else self._items.begin()
        self._begun = True
        if isinstance(news, Part):
            events += self._items.feed(news.text)
            self._unsaid += news.tokens
            return self._written(events, over=False)
        return self._written(events + self._items.finish(news.completions[0], news), over=True)

    def failure(self, error: Exception, refused: ErrorResponse) -> bytes:
        return _written_event(self._items.failed(None, refused.message))

    def _written(self, events: list[Event], *, over: bool) -> bytes:
        if not events:
            return b""
        heads = [b""] * len(events)
        if self._numbered:
            listed, self._unsaid = ",".join(map(str, self._unsaid)), ()
            ids = f"id: 0.{listed}{'!' if over else ''}\nid: {SEQUENCE}.{events[-1]['sequence_number']}\n"
            heads = [*[b": more\n"] * (len(events) - 1), ids.encode()]
        return b"".join([head + _written_event(one) for head, one in zip(heads, events, strict=True)])


def _written_event(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event))


def _in_its_words(error: BadRequest) -> BadPrompt:
    """An error of the chat that a request maps to, with the names of fields that the request has."""
    message, param = str(error), error.param
    for theirs, ours in (("].function", "]"), ("messages", "input"), ("response_format", "text.format")):
        message = message.replace(theirs, ours)
        param = None if param is None else param.replace(theirs, ours)
    return BadRequest(message, param)
