"""The lines of the output: an answer or an error, in our own form or in that of OpenAI's batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from gpuinfer.errors import BadPrompt, Expired, GpuinferError
from gpuinfer.generation import Candidate, Completion, Generation, Logprob
from gpuinfer.workloads.generate.checking import BadRow
from gpuinfer.workloads.generate.naming import Job

REQUEST = "batch_req_"  # before the digest, in the id of a batch's answer


class Usage(Struct, kw_only=True):
    """In tokens."""

    prompt_tokens: int
    completion_tokens: int


class Sample(Struct, kw_only=True, omit_defaults=True):
    """One of several answers to a prompt."""

    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: list[dict[str, Any]] | None = None


class Timing(Struct, kw_only=True):
    """How the answer came about: what differs from run to run. In seconds, but for the tokens."""

    first_token_s: float  # from the admission to a slot
    seconds: float  # from the admission to the last token
    total_s: float  # from when the row was asked to its answer
    cached_tokens: int  # of the prompt's, those that had been computed for another: who came first decides


class Failure(Struct, kw_only=True):
    """Why a row has no answer."""

    type: str
    message: str
    row: int  # its place among the rows of the input, from 1
    line: int  # the line of the input that it begins on, as an editor counts


class Line(Struct, kw_only=True, omit_defaults=True):
    """A row of the output. With several answers they stand in `samples`, else one stands here."""

    id: str | int
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: list[dict[str, Any]] | None = None
    samples: list[Sample] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    usage: Usage | None = None
    timing: Timing | None = None
    error: Failure | None = None
    metadata: dict[str, Any] | None = None
    digest: str = ""


class Writer:
    """Writes answers as lines of JSON. `model` is what a batch's answer calls it when its request named none."""

    def __init__(self, *, token_ids: bool = False, timing: bool = False, model: str = "") -> None:
        self._token_ids, self._timing, self._model = token_ids, timing, model
        self._encode = msgspec.json.Encoder().encode

    def answer(self, job: Job, generation: Generation, seconds: float) -> bytes:
        """The line of a row that was answered, `seconds` after it was asked."""
        if job.openai is not None:
            return self._encode(self._response(job, generation)) + b"\n"
        line = Line(
            id=job.id,
            usage=_usage(generation),
            timing=self._times(generation, seconds),
            metadata=job.metadata,
            digest=job.digest,
        )
        if generation.prompt_logprobs is not None:
            line.prompt_logprobs = [_shown(one) for one in generation.prompt_logprobs]
        if len(generation.completions) > 1:
            line.samples = [self._sample(one) for one in generation.completions]
            return self._encode(line) + b"\n"
        (one,) = generation.completions
        line.text, line.finish_reason, line.stop_reason = one.text, one.finish_reason, one.stop_reason
        line.token_ids = one.tokens if self._token_ids else None
        line.logprobs = _all_shown(one.logprobs)
        return self._encode(line) + b"\n"

    def error(self, job: Job, error: GpuinferError) -> bytes:
        """The line of a row that has no answer. When the row's own words cannot be written it goes without them."""
        try:
            return self._error(job, error)
        except Exception:  # noqa: BLE001 - an error must always get out
            plain = str(job.id).encode(errors="backslashreplace").decode()
            return self._error(msgspec.structs.replace(job, id=plain, metadata=None), error)

    def _error(self, job: Job, error: GpuinferError) -> bytes:
        kind, message = kind_of(error), " ".join(str(error).split())
        if job.openai is None:
            failure = Failure(type=kind, message=message, row=job.number, line=job.line)
            return self._encode(Line(id=job.id, error=failure, metadata=job.metadata, digest=job.digest)) + b"\n"
        body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
        status = 400 if isinstance(error, BadPrompt) else 408 if isinstance(error, Expired) else 500
        fault = {"code": kind, "message": message, "row": job.number, "line": job.line}
        return self._encode(_batch_line(job, status, body, fault)) + b"\n"

    def _sample(self, one: Completion) -> Sample:
        return Sample(
            text=one.text,
            finish_reason=one.finish_reason,
            stop_reason=one.stop_reason,
            token_ids=one.tokens if self._token_ids else None,
            logprobs=_all_shown(one.logprobs),
        )

    def _times(self, generation: Generation, seconds: float) -> Timing | None:
        if not self._timing:
            return None
        return Timing(
            first_token_s=generation.first_token_s,
            seconds=generation.seconds,
            total_s=seconds,
            cached_tokens=generation.cached_tokens,
        )

    def _response(self, job: Job, generation: Generation) -> dict[str, Any]:
        chat = job.openai == "chat"
        usage = _usage(generation)
        body: dict[str, Any] = {
            "id": ("chatcmpl-" if chat else "cmpl-") + job.digest,
            "object": "chat.completion" if chat else "text_completion",
            "created": 0,  # so that the same work gives the same bytes
            "model": job.model or self._model,
            "choices": [self._choice(index, one, chat) for index, one in enumerate(generation.completions)],
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }
        if self._timing:
            body["usage"]["prompt_tokens_details"] = {"cached_tokens": generation.cached_tokens}
        if generation.prompt_logprobs is not None:
            body["prompt_logprobs"] = [_shown(one) for one in generation.prompt_logprobs]
        return _batch_line(job, 200, body, None)

    def _choice(self, index: int, one: Completion, chat: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": one.finish_reason, "logprobs": None}
        if chat:
            choice["message"] = {"role": "assistant", "content": one.text}
        else:
            choice["text"] = one.text
        if one.logprobs is not None:
            choice["logprobs"] = (_of_chat if chat else _of_completion)(one.logprobs)
        if one.stop_reason is not None:
            choice["stop_reason"] = one.stop_reason
        if self._token_ids:
            choice["token_ids"] = one.tokens
        return choice


def kind_of(error: GpuinferError) -> str:
    """The `type` of an error row, for scripts."""
    if isinstance(error, BadRow):
        return "bad_row"
    return "bad_prompt" if isinstance(error, BadPrompt) else "failed"


def _batch_line(job: Job, status: int, body: dict[str, Any], fault: dict[str, Any] | None) -> dict[str, Any]:
    line = {
        "id": REQUEST + job.digest,
        "custom_id": job.id,
        "response": {"status_code": status, "request_id": job.digest, "body": body},
        "error": fault,
    }
    return line if job.metadata is None else {**line, "metadata": job.metadata}


def _usage(generation: Generation) -> Usage:
    return Usage(
        prompt_tokens=generation.prompt_tokens,
        completion_tokens=sum([len(one.tokens) for one in generation.completions]),
    )


def _all_shown(found: Sequence[Logprob] | None) -> list[dict[str, Any]] | None:
    return None if found is None else [_plain(one) for one in found]


def _shown(found: Logprob | None) -> dict[str, Any] | None:
    return None if found is None else _plain(found)


def _plain(found: Logprob) -> dict[str, Any]:
    plain = _candidate(found.chosen)
    return {**plain, "likeliest": [_candidate(one) for one in found.likeliest]} if found.likeliest else plain


def _candidate(one: Candidate) -> dict[str, Any]:
    return {"token_id": one.token, "logprob": one.logprob, "rank": one.rank}


def _named(token: int) -> str:
    """A token where OpenAI's form wants its text: texts of tokens are not unique, so vLLM writes ids like this too."""
    return f"token_id:{token}"


def _of_chat(found: Sequence[Logprob]) -> dict[str, Any]:
    def shown(one: Candidate) -> dict[str, Any]:
        return {"token": _named(one.token), "logprob": one.logprob, "bytes": None}

    return {
        "content": [{**shown(one.chosen), "top_logprobs": [shown(each) for each in one.likeliest]} for one in found]
    }


def _of_completion(found: Sequence[Logprob]) -> dict[str, Any]:
    return {
        "tokens": [_named(one.chosen.token) for one in found],
        "token_logprobs": [one.chosen.logprob for one in found],
        "top_logprobs": [{_named(each.token): each.logprob for each in one.likeliest} for one in found],
        "text_offset": None,  # tokens are not always whole characters
    }
