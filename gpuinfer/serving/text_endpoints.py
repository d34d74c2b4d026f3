"""The endpoints of text models: /v1/completions and /v1/chat/completions, whole or as server-sent events; /predict;
/v1/generations in our own form for other processes of ours. A request may hold several prompts: their samples are
counted through, those of prompt i begin at i × samples. Behind a router each event of a sample begins with a line
`id: SAMPLE.TOKEN,TOKEN,…`, ending in `!` with the sample's finish reason: whoever has these lines knows exactly what
the client has been sent, and resumes the stream elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from gpuinfer.errors import BackendError, BadPrompt
from gpuinfer.generation import Generation, Part, Prompt
from gpuinfer.http.http_exchange import ClientGone, Exchange
from gpuinfer.runtime.session import Session
from gpuinfer.serving.openai.requests import BadRequest, ParsedRequest, PromptDefaults, RequestReader, unreadable
from gpuinfer.serving.openai.responses import Chunks, Envelope, response
from gpuinfer.serving.openai.schema import MOST_TOKENS, Samples, Seed, Some, Temperature
from gpuinfer.serving.prompt_requests import PromptRequester
from gpuinfer.serving.request import (
    FAILED_HERE,
    MOST_PROMPTS,
    SAID,
    ErrorResponse,
    RequestContext,
    check_request,
    encode,
    plain_headers,
)
from gpuinfer.serving.service import ModelService, Work, session_arguments, tokens_of
from gpuinfer.text.answer_frames import FRAMES_TYPE, prompt_from_body, to_frame

CONTENT_TYPE = "text/event-stream; charset=utf-8"
HEADERS = (("Cache-Control", "no-cache"), ("X-Accel-Buffering", "no"))
DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class ResumedSample(msgspec.Struct, forbid_unknown_fields=True):
    """The part of one sample that the client has been sent already."""

    tokens: tuple[int, ...] = ()
    ended: bool = False


_begun: msgspec.json.Decoder[dict[str, ResumedSample]] = msgspec.json.Decoder(dict[str, ResumedSample])


class CompletionEvents:
    """The events of one response. `begun`: what an earlier attempt has sent of each sample, which is not sent again."""

    def __init__(
        self,
        chunks: Chunks,
        numbered: bool,
        begun: Mapping[int, ResumedSample] | None = None,
        texts: Mapping[int, str] | None = None,
    ) -> None:
        """`texts`: of the samples that have begun, where answers are split."""
        self._chunks, self._numbered = chunks, numbered
        self._over = {sample for sample, one in (begun or {}).items() if one.ended}
        for sample, one in (begun or {}).items():
            chunks.taken_up(sample, len(one.tokens), one.ended, (texts or {}).get(sample, ""))

    def frame(self, news: Part | Generation) -> bytes:
        """The events of a part, as one piece, which may be empty; of the whole answer the last ones: what no part had,
        the usage, and the end.
        """
        if isinstance(news, Part):
            if news.sample in self._over:
                return b""
            return b"".join([self._event(chunk, tokens) for chunk, tokens in self._chunks.of(news)])
        return b"".join([*(self._event(chunk, tokens) for chunk, tokens in self._chunks.end(news)), DONE])

    def _event(self, chunk: dict[str, Any], tokens: tuple[int, ...]) -> bytes:
        if not (self._numbered and chunk["choices"]):
            return _event(chunk)
        (choice,) = chunk["choices"]
        listed = ",".join(map(str, tokens))
        end = "!" if choice["finish_reason"] is not None else ""
        return b"id: %d.%s%s\n%s" % (choice["index"], listed.encode(), end.encode(), _event(chunk))


def _event(chunk: Any) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"


def failed_event(error: Exception, refused: ErrorResponse) -> bytes:
    return b"data: " + refused.body + b"\n\n" + DONE


def split_resumed(body: bytes, length: int) -> tuple[dict[int, ResumedSample] | None, bytes]:
    """What an earlier attempt has sent, and the rest of the body. Raises `BadRequest`."""
    if not length:
        return None, body
    try:
        found = _begun.decode(body[:length]) if length <= len(body) else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = None
    if found is None or not all(name.isdecimal() and len(name) < 10 for name in found):
        raise BadRequest("what has been sent already is not understood. Leave X-Gpuinfer-Begun out.")
    return {int(name): one for name, one in found.items()}, body[length:]


News = tuple[int, Part | Generation | BaseException]


async def stream_parts(
    session: Session, prompts: Sequence[Prompt], ways: dict[str, Any]
) -> AsyncGenerator[Part | Generation]:
    """Parts as they come, and last the whole. Nothing is read ahead of the consumer."""
    if len(prompts) > 1:
        async with contextlib.aclosing(_several(session, prompts, ways)) as parts:
            async for part in parts:
                yield part
        return
    async with session.stream(prompts[0], rows=prompts[0].samples, **ways) as stream:
        async for part in stream:
            yield part
        yield stream.result


async def _several(
    session: Session, prompts: Sequence[Prompt], ways: dict[str, Any]
) -> AsyncGenerator[Part | Generation]:
    news: asyncio.Queue[News] = asyncio.Queue(1)

    async def read(index: int, prompt: Prompt) -> None:
        try:
            async with session.stream(prompt, rows=prompt.samples, **ways) as stream:
                async for part in stream:
                    await news.put((index, part))
                await news.put((index, stream.result))
        except Exception as error:  # noqa: BLE001 (raised again by the consumer)
            await news.put((index, error))

    readers = [asyncio.create_task(read(index, one)) for index, one in enumerate(prompts)]
    ended: dict[int, Generation] = {}
    try:
        while len(ended) < len(prompts):
            index, what = await news.get()
            if isinstance(what, BaseException):
                raise what
            if isinstance(what, Generation):
                ended[index] = what
            else:
                yield msgspec.structs.replace(what, sample=index * prompts[0].samples + what.sample)
        yield join_generations([ended[index] for index in range(len(prompts))])
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)


def join_generations(answers: Sequence[Generation]) -> Generation:
    """The answers as one: completions in order, tokens added up."""
    return Generation(
        completions=tuple(one for each in answers for one in each.completions),
        prompt_tokens=sum(one.prompt_tokens for one in answers),
        cached_tokens=sum(one.cached_tokens for one in answers),
        first_token_s=min(one.first_token_s for one in answers),
        seconds=max(one.seconds for one in answers),
        versions=tuple(dict.fromkeys(version for one in answers for version in one.versions)),
    )


async def send_whole(
    service: ModelService, exchange: Exchange, asking: RequestContext, prompts: Sequence[Prompt]
) -> Generation:
    """The answers to all prompts as one, accounted for. A prompt with more samples than the model answers at once is
    answered in parts, of which one is waiting while another is computed.
    """
    asker = PromptRequester(service.session, 2 * service.widest, service.widest, tries=1, **session_arguments(asking))
    works = [
        service.session(one, rows=one.samples, **session_arguments(asking))
        if one.samples <= service.widest
        else asker.ask(one)
        for one in prompts
    ]
    if len(works) == 1:
        answers: Generation = await works[0]
    else:
        async with asyncio.TaskGroup() as group:  # the first prompt that fails ends the others
            tasks = [group.create_task(work) for work in works]
        answers = join_generations([task.result() for task in tasks])
    asking.span.generated(answers)
    service.spent(exchange, *tokens_of(answers))
    return answers


async def send_stream(
    service: ModelService,
    exchange: Exchange,
    asking: RequestContext,
    prompts: Sequence[Prompt],
    kind: tuple[str, Sequence[tuple[str, str]]],
    frame: Callable[[Part | Generation], bytes],
    failure: Callable[[Exception, ErrorResponse], bytes],
) -> None:
    """Send an answer as it comes. `kind`: the response's content type and headers. `failure` writes an error once the
    response has begun, with the first part; an error before that has a status of its own.
    """
    tokens, ways = 0, session_arguments(asking)
    try:
        async with contextlib.aclosing(stream_parts(service.session, prompts, ways)) as answers:
            async for news in answers:
                if isinstance(news, Generation):
                    asking.span.generated(news)
                    service.spent(exchange, *tokens_of(news))
                else:
                    tokens += len(news.tokens)
                data = frame(news)
                if not exchange.begun:
                    exchange.begin(200, *kind)
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
        refused = service.refused(error, asking.id)  # which logs what is internal
        exchange.notes["refused"] = refused.message
        await exchange.write(failure(error, refused))
        exchange.end()


USUAL = {"/v1/completions": 16, "/v1/chat/completions": MOST_TOKENS}
"""Tokens of an answer that is asked for without a number: as OpenAI has them, where a chat goes on to its end."""


def completions(service: ModelService, url: str) -> Work:
    """The work of one of the two routes."""
    readers: list[RequestReader] = []

    async def work(exchange: Exchange, asking: RequestContext) -> None:
        begun, body = split_resumed(exchange.body, asking.begun)
        if not readers:  # the defaults are known once the model is loaded
            readers.append(RequestReader(PromptDefaults(service.usual(USUAL[url])), streams=True))
        asked = await service.decoded(lambda body: readers[0].read_all(body, url, MOST_PROMPTS), body)
        adapter = service.adapter_of(exchange.query.get("model") if asked[0].model is None else asked[0].model)
        for one in asked:
            check_request(one.prompt, service.widest)
        samples = asked[0].prompt.samples
        if any(sample >= samples * len(asked) for sample in begun or ()):
            raise BadPrompt(
                f"something has been sent of a sample that was not asked for: there are {samples * len(asked)}."
            )
        prompts = keyed_prompts(asked, asking, adapter, begun)
        form, texts = None, dict[int, str]()
        if asked[0].chat:
            first = asked[0]
            prompts[0], form = await service.forms.of(
                prompts[0], first.tool_choice, first.parallel_tool_calls, asking.id
            )
            if form is not None:
                texts = {
                    sample: await service.forms.replayed(prompts[0], one.tokens)
                    for sample, one in (begun or {}).items()
                }
        name, created = adapter or service.name, asking.created or int(time.time())
        envelope = Envelope(asking.id, asked[0].chat, name, created, form=form)
        if asked[0].stream:
            chunks = Chunks(envelope, asked[0].usage)
            events = CompletionEvents(chunks, service.behind_router, begun, texts)
            kind = (CONTENT_TYPE, plain_headers(asking.id, HEADERS))
            await send_stream(service, exchange, asking, prompts, kind, events.frame, failed_event)
        else:
            answers = await send_whole(service, exchange, asking, prompts)
            exchange.respond(200, encode(response(envelope, answers)), headers=plain_headers(asking.id))

    return work


def keyed_prompts(
    requests: Sequence[ParsedRequest],
    context: RequestContext,
    adapter: str | None,
    begun: Mapping[int, ResumedSample] | None = None,
) -> list[Prompt]:
    """The prompts of one request, each with its adapter, its key, and what an earlier attempt has sent of it."""
    prompts, several, samples = [], len(requests) > 1, requests[0].prompt.samples
    for index, one in enumerate(requests):
        own: dict[str, Any] = {} if adapter is None else {"adapter": adapter}
        if one.prompt.sampling.seed is None:  # each draws its own answer; those with a seed that of the seed
            own["key"] = f"{context.id}.{index}" if several else context.id
        if begun is not None:
            known = (begun.get(index * samples + sample) for sample in range(samples))
            own["begun"] = tuple(() if one is None else one.tokens for one in known)
        prompts.append(msgspec.structs.replace(one.prompt, **own) if own else one.prompt)
    return prompts


class PredictBody(Struct, forbid_unknown_fields=True):
    """The body of `POST /predict`."""

    prompt: str
    num_samples: Samples = 1
    max_new_tokens: Some = 128
    temperature: Temperature = 1.0
    model: str | None = None
    seed: Seed | None = None


_decoder = msgspec.json.Decoder(PredictBody)


def predictions(service: ModelService) -> Work:
    """The work of /predict. More samples than the model answers at once are answered in parts."""

    async def work(exchange: Exchange, asking: RequestContext) -> None:
        try:
            asked = await service.decoded(_decoder.decode, exchange.body)
        except (ValueError, RecursionError) as error:
            raise unreadable(error, PredictBody, exchange.body, "request") from error
        adapter = service.adapter_of(asked.model or exchange.query.get("model"))
        usual = service.usual(asked.max_new_tokens)
        sampling = msgspec.structs.replace(
            usual, max_tokens=asked.max_new_tokens, temperature=asked.temperature, seed=asked.seed
        )
        key = "" if asked.seed is not None else asking.id
        prompt = Prompt(text=asked.prompt, sampling=sampling, samples=asked.num_samples, key=key)
        if adapter is not None:
            prompt = msgspec.structs.replace(prompt, adapter=adapter)
        check_request(prompt, prompt.samples)
        found = await send_whole(service, exchange, asking, [prompt])
        samples: list[dict[str, Any]] = [{"text": one.text, "tokens": one.tokens} for one in found.completions]
        exchange.respond(200, encode({"samples": samples}), headers=plain_headers(asking.id))

    return work


def generations(service: ModelService) -> Work:
    """The work of /v1/generations. With the query `parts=0` the answer comes as one frame."""

    async def work(exchange: Exchange, asking: RequestContext) -> None:
        adapter = service.adapter_of(exchange.query.get("model"))
        prompt = await service.decoded(prompt_from_body, exchange.body)
        if adapter is not None and not prompt.adapter:
            prompt = msgspec.structs.replace(prompt, adapter=adapter)
        check_request(prompt, service.widest)
        if exchange.query.get("parts") == "0":
            answer = to_frame(await send_whole(service, exchange, asking, [prompt]))
            exchange.respond(200, answer, FRAMES_TYPE, plain_headers(asking.id))
            return

        def failure(error: Exception, refused: ErrorResponse) -> bytes:
            return to_frame(error if isinstance(error, SAID) else BackendError(FAILED_HERE.format(id=asking.id)))

        kind = (FRAMES_TYPE, plain_headers(asking.id))
        await send_stream(service, exchange, asking, [prompt], kind, to_frame, failure)

    return work
