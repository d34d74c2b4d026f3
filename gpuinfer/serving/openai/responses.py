"""From what a model answers to OpenAI's responses, whole and in chunks; and errors in OpenAI's shape.

The shapes are those of the API reference: `chat.completion`, `chat.completion.chunk`, `text_completion`, whose chunks
have the shape of the whole. What OpenAI has no field for (`stop_reason`, `token_ids`, `prompt_logprobs`) stands where
vLLM has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuinfer.errors import BackendDied, BadPrompt, Closed, Expired, GpuinferError, PromptTooLong, QueueFull
from gpuinfer.generation import Candidate, Completion, Generation, Logprob, Part
from gpuinfer.host import error_text
from gpuinfer.http.http_exchange import error_body, error_type_of
from gpuinfer.serving.openai.answer_splitter import AnswerDelta, AnswerForm, AnswerSplitter

SHORTER = 'Shorten it, or have it cut to fit with "truncate": "left" or "right".'


@dataclass(frozen=True, slots=True)
class Envelope:
    """What the response to one request says beside the answer. `name` tells it from others."""

    name: str
    chat: bool
    model: str
    created: int = 0  # in seconds since 1970; 0 where the same work is to give the same bytes
    token_ids: bool = False  # write the tokens too
    cached: bool = True  # write how many of the prompt's tokens had been computed before: who came first decides
    form: AnswerForm | None = None  # of a chat in which there may be thoughts, or calls of tools

    @property
    def id(self) -> str:
        return ("chatcmpl-" if self.chat else "cmpl-") + self.name

    def around(self, choices: list[dict[str, Any]], *, chunk: bool = False) -> dict[str, Any]:
        """The response, or one chunk of it, with these choices."""
        kind = "text_completion" if not self.chat else "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def response(envelope: Envelope, generation: Generation) -> dict[str, Any]:
    """The whole response."""
    choices = [_choice(envelope, index, one) for index, one in enumerate(generation.completions)]
    body = {**envelope.around(choices), "usage": usage(generation, cached=envelope.cached)}
    if generation.prompt_logprobs is not None:
        body["prompt_logprobs"] = [None if one is None else plain_logprob(one) for one in generation.prompt_logprobs]
    return body


def usage(generation: Generation, *, cached: bool) -> dict[str, Any]:
    """In tokens."""
    answers = sum([len(one.tokens) for one in generation.completions])
    prompt = generation.prompt_tokens
    found: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": answers, "total_tokens": prompt + answers}
    if cached:
        found["prompt_tokens_details"] = {"cached_tokens": generation.cached_tokens}
    return found


def _choice(envelope: Envelope, index: int, one: Completion) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "finish_reason": one.finish_reason, "logprobs": None}
    if envelope.chat and envelope.form is not None:
        choice["message"], calls = message_of(envelope.form, index, one.text)
        choice["finish_reason"] = _finish(one.finish_reason, calls)
    elif envelope.chat:
        choice["message"] = {"role": "assistant", "content": one.text}
    else:
        choice["text"] = one.text
    return choice | _details(envelope, one)


def message_of(form: AnswerForm, sample: int, text: str) -> tuple[dict[str, Any], int]:
    """The message that this text is, and how many calls are in it; 0 where the last was cut short."""
    splitter = form.splitter()
    found, rest = splitter.feed(text), splitter.finish()
    calls: list[dict[str, Any]] = []
    for part in (*found.calls, *rest.calls):
        if part.index == len(calls):
            function = {"name": part.name, "arguments": ""}
            calls.append({"id": form.call_id(sample, part.index), "type": "function", "function": function})
        calls[part.index]["function"]["arguments"] += part.arguments
    content, reasoning = found.content + rest.content, found.reasoning + rest.reasoning
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if form.thinks is not None:
        message["reasoning_content"] = reasoning or None
    if calls:
        message["tool_calls"] = calls
    return message, splitter.whole_calls


def _finish(reason: str | None, calls: int) -> str | None:
    return "tool_calls" if calls and reason == "stop" else reason


def _details(envelope: Envelope, one: Completion | Part) -> dict[str, Any]:
    """What is there on request, or sometimes."""
    found: dict[str, Any] = {}
    if one.logprobs is not None:
        found["logprobs"] = (_of_chat if envelope.chat else _of_completion)(one.logprobs)
    if one.stop_reason is not None:
        found["stop_reason"] = one.stop_reason
    if envelope.token_ids:
        found["token_ids"] = one.tokens
    return found


# In chunks


@dataclass(slots=True)
class _Sent:
    """How far one sample has come."""

    characters: int = 0
    tokens: int = 0
    ended: bool = False
    splitter: AnswerSplitter | None = None
    unsaid: tuple[int, ...] = ()  # tokens of which the client has been sent nothing yet


ChunkWithTokens = tuple[dict[str, Any], tuple[int, ...]]
"""A chunk, and the tokens whose text is with it out of the house: those of the role, and of the end, are none."""


@dataclass
class Chunks:
    """The chunks of one response: of each sample its role first, in a chat, and its finish reason last.

    `usage`: whether a last chunk without choices says what it took; the others then say that it is yet to come.
    """

    envelope: Envelope
    usage: bool = False
    _sent: dict[int, _Sent] = field(default_factory=dict)

    def taken_up(self, sample: int, tokens: int, ended: bool, text: str = "") -> None:
        """So much of a sample has been sent by somebody else, its role too. What follows must come in parts. `text`: of
        its tokens, where the answer is split.
        """
        self._sent[sample] = sent = self._begun()
        sent.tokens, sent.ended = tokens, ended
        if sent.splitter is not None:
            sent.splitter.feed(text)

    def _begun(self) -> _Sent:
        form = self.envelope.form
        return _Sent(splitter=None if form is None else form.splitter())

    def of(self, part: Part) -> Iterator[ChunkWithTokens]:
        """The chunks of a part, in order. There may be none."""
        sent = self._sent.get(part.sample)
        if sent is None:
            sent = self._sent[part.sample] = self._begun()
            if self.envelope.chat:
                yield self._chunk(part.sample, {"role": "assistant", "content": ""}), ()
        sent.characters += len(part.text)
        sent.tokens += len(part.tokens)
        sent.ended |= part.finish_reason is not None
        if sent.splitter is not None:
            yield from self._of_split(part, sent, sent.splitter)
        elif self.envelope.chat:
            yield from self._of_chat(part)
        elif part.text or part.tokens or part.finish_reason:
            yield self._chunk(part.sample, part.text, part.finish_reason, _details(self.envelope, part)), part.tokens

    def end(self, generation: Generation) -> Iterator[ChunkWithTokens]:
        """The last chunks: what no part has said, all of it where the backend makes no parts; and the usage."""
        for sample, one in enumerate(generation.completions):
            sent = self._sent.get(sample, _Sent())
            if not sent.ended:
                rest = Part(
                    sample=sample,
                    text=one.text[sent.characters :],
                    tokens=one.tokens[sent.tokens :],
                    logprobs=None if one.logprobs is None else one.logprobs[sent.tokens :],
                    finish_reason=one.finish_reason,
                    stop_reason=one.stop_reason,
                )
                yield from self.of(rest)
        if self.usage:
            told = usage(generation, cached=self.envelope.cached)
            yield {**self.envelope.around([], chunk=True), "usage": told}, ()

    def _of_split(self, part: Part, sent: _Sent, splitter: AnswerSplitter) -> Iterator[ChunkWithTokens]:
        """One chunk with all that has become certain, so that its tokens tell how far the client has come: what the
        splitter holds back it holds back again when it is fed the same tokens. And the end, as `_of_chat` has it.
        """
        delta = self._delta(part.sample, splitter.feed(part.text))
        if part.finish_reason is not None:
            delta = _joined_delta(delta, self._delta(part.sample, splitter.finish()))
        details = _details(self.envelope, part)
        ending = {"stop_reason": details.pop("stop_reason")} if "stop_reason" in details else {}
        tokens, sent.unsaid = sent.unsaid + part.tokens, ()
        reason = _finish(part.finish_reason, splitter.whole_calls)
        if isinstance(part.stop_reason, str):
            yield self._chunk(part.sample, delta, reason, {**details, **ending}), tokens
            return
        if delta or details:
            yield self._chunk(part.sample, delta or {"content": ""}, None, details), tokens
            tokens = ()
        if reason is not None:
            yield self._chunk(part.sample, {}, reason, ending), tokens
        else:
            sent.unsaid = tokens

    def _delta(self, sample: int, found: AnswerDelta) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if found.reasoning:
            delta["reasoning_content"] = found.reasoning
        if found.content:
            delta["content"] = found.content
        calls: list[dict[str, Any]] = []
        for part in found.calls:
            call: dict[str, Any] = {"index": part.index}
            if part.name is not None and self.envelope.form is not None:
                call |= {"id": self.envelope.form.call_id(sample, part.index), "type": "function"}
            function = {"arguments": part.arguments}
            call["function"] = function if part.name is None else {"name": part.name, **function}
            calls.append(call)
        return {**delta, "tool_calls": calls} if calls else delta

    def _of_chat(self, part: Part) -> Iterator[ChunkWithTokens]:
        """What the model said and why it ended are chunks of their own, but where a stop string ended it: what it had
        held back until then must not be heard without the end, as its tokens alone do not tell it (`Part`).
        """
        details = _details(self.envelope, part)
        ending = {"stop_reason": details.pop("stop_reason")} if "stop_reason" in details else {}
        if isinstance(part.stop_reason, str):
            yield (
                self._chunk(part.sample, {"content": part.text}, part.finish_reason, {**details, **ending}),
                part.tokens,
            )
            return
        if part.text or part.tokens:
            yield self._chunk(part.sample, {"content": part.text}, None, details), part.tokens
        if part.finish_reason is not None:
            yield self._chunk(part.sample, {}, part.finish_reason, ending), ()

    def _chunk(
        self, sample: int, said: str | dict[str, Any], finish_reason: str | None = None, details: Any = None
    ) -> dict[str, Any]:
        choice = {"index": sample, "delta" if self.envelope.chat else "text": said, "logprobs": None}
        choice |= {"finish_reason": finish_reason} | (details or {})
        chunk = self.envelope.around([choice], chunk=True)
        return {**chunk, "usage": None} if self.usage else chunk


def _joined_delta(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Both as one; of calls the parts of both."""
    found = dict(one)
    for name, value in other.items():
        found[name] = found[name] + value if name in found else value
    return found


# Log-probabilities


def plain_logprob(found: Logprob) -> dict[str, Any]:
    """In our own form, which knows ranks: {token_id, logprob, rank, likeliest}."""
    shown = _candidate(found.chosen)
    return {**shown, "likeliest": [_candidate(one) for one in found.likeliest]} if found.likeliest else shown


def _candidate(one: Candidate) -> dict[str, Any]:
    return {"token_id": one.token, "logprob": one.logprob, "rank": one.rank}


def named_token(one: Candidate, of_bytes: str = "") -> str:
    """A token where OpenAI's form wants its text. One that is no whole characters is written byte by byte, after the
    prefix `of_bytes`, and one without a text, or whose text the backend does not tell, by its id, as vLLM has it.
    """
    if one.name is None:
        return f"token_id:{one.token}"
    try:
        return one.name.decode()
    except UnicodeDecodeError:
        return of_bytes + "".join([f"\\x{byte:02x}" for byte in one.name])


def _of_chat(found: Sequence[Logprob]) -> dict[str, Any]:
    def shown(one: Candidate) -> dict[str, Any]:
        spelt = None if one.name is None or one.silent else list(one.name)
        return {"token": named_token(one), "logprob": one.logprob, "bytes": spelt}

    return {
        "content": [{**shown(one.chosen), "top_logprobs": [shown(each) for each in one.likeliest]} for one in found]
    }


def _of_completion(found: Sequence[Logprob]) -> dict[str, Any]:
    return {
        "tokens": [named_token(one.chosen, "bytes:") for one in found],
        "token_logprobs": [one.chosen.logprob for one in found],
        "top_logprobs": [_by_name(one.likeliest) for one in found],
        "text_offset": None,  # tokens are not always whole characters
    }


def _by_name(likeliest: Sequence[Candidate]) -> dict[str, float]:
    """Of tokens that are spelled alike the likeliest."""
    found: dict[str, float] = {}
    for one in likeliest:
        found.setdefault(named_token(one, "bytes:"), one.logprob)
    return found


# Errors


def status_of(error: GpuinferError) -> int:
    """The HTTP status of a request that failed with it."""
    if isinstance(error, BadPrompt):
        return 400
    if isinstance(error, Expired):
        return 408
    if isinstance(error, QueueFull):
        return 429
    return 503 if isinstance(error, BackendDied | Closed) else 500


def error_of(error: GpuinferError) -> dict[str, Any]:
    """The body of the response to a request that failed."""
    message, code = error_text.safe_str(error), None
    if isinstance(error, PromptTooLong):  # whose cure is for who has the command line
        message, code = f"{message.partition('. ')[0]}. {SHORTER}", "context_length_exceeded"
    return error_body(message, error_type_of(status_of(error)), getattr(error, "param", None), code)
