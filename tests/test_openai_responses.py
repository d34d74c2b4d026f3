"""Answers in OpenAI's shapes, whole and in chunks. The names of the fields are those that its own client knows."""

from __future__ import annotations

import json

import pytest

from gpuinfer.errors import BackendDied, BackendError, BadPrompt, Expired, PromptTooLong, QueueFull
from gpuinfer.generation import Candidate, Completion, Generation, Logprob, Part
from gpuinfer.serving.openai.requests import BadRequest, PromptDefaults, RequestReader
from gpuinfer.serving.openai.responses import Chunks, Envelope, error_of, response, status_of

CHAT, COMPLETION = Envelope("7", chat=True, model="m"), Envelope("7", chat=False, model="m")
BOTH = pytest.mark.parametrize("envelope", [CHAT, COMPLETION], ids=["chat", "completion"])

# What openai's types demand, and what else they know; `stop_reason` and `token_ids` are vLLM's.
WHOLE = {"id", "object", "created", "model", "choices"}
EXTRA = {"stop_reason", "token_ids"}
CHOICE = {"chat.completion": "message", "chat.completion.chunk": "delta", "text_completion": "text"}


def chosen(token: int) -> Logprob:
    return Logprob(Candidate(token, -0.5, 1), (Candidate(token, -0.5, 1), Candidate(9, -2.0, 2)))


def generation(*texts: str, logprobs: bool = False) -> Generation:
    """One answer for each text, a token for each character, and one more that ends it."""
    return Generation(
        completions=tuple(
            Completion(
                text=text,
                tokens=(*map(ord, text), 0),
                finish_reason="stop",
                stop_reason=0,
                logprobs=tuple(chosen(token) for token in (*map(ord, text), 0)) if logprobs else None,
            )
            for text in texts
        ),
        prompt_tokens=3,
        cached_tokens=2,
    )


def parts(whole: Generation, sample: int) -> list[Part]:
    """Character by character, the end with the last."""
    one = whole.completions[sample]
    found = []
    for place, sign in enumerate(one.text):
        last = place == len(one.text) - 1
        tokens = slice(place, None if last else place + 1)
        found.append(
            Part(
                sample=sample,
                text=sign,
                tokens=one.tokens[tokens],
                logprobs=None if one.logprobs is None else one.logprobs[tokens],
                finish_reason="stop" if last else None,
                stop_reason=0 if last else None,
            )
        )
    return found


def check_shape(body: dict, *, chunk: bool = False) -> None:
    assert set(body) - {"usage", "prompt_logprobs"} == WHOLE
    kind = "text_completion" if body["object"] == "text_completion" else "chat.completion" + ".chunk" * chunk
    assert body["object"] == kind
    for choice in body["choices"]:
        assert set(choice) - EXTRA == {"index", "finish_reason", "logprobs", CHOICE[kind]}
    if body.get("usage"):
        named = {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"}
        assert set(body["usage"]) == named
    json.dumps(body)


def said(chunks: list[dict], sample: int) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == sample]
    return "".join(one["text"] if "text" in one else one["delta"].get("content", "") for one in choices)


@BOTH
def test_a_whole_response_has_the_fields_that_clients_read(envelope):
    body = response(envelope, generation("ab", "c", logprobs=True))
    check_shape(body)
    assert body["usage"]["total_tokens"] == 8
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    first = body["choices"][0]
    assert (first["finish_reason"], first["stop_reason"]) == ("stop", 0)
    if envelope.chat:
        assert first["message"] == {"role": "assistant", "content": "ab"}
        assert set(first["logprobs"]["content"][0]) == {"token", "logprob", "bytes", "top_logprobs"}
    else:
        assert first["text"] == "ab"
        assert set(first["logprobs"]) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}


def test_tokens_have_their_texts_and_bytes_as_openai_writes_them():
    likeliest = (Candidate(1, -0.1, 1, b"a"), Candidate(2, -0.2, 2, b"a"), Candidate(3, -0.3, 3))
    found = tuple(
        Logprob(Candidate(token, -0.5, 1, name, silent), likeliest)
        for token, name, silent in (
            (4, b" b", False),
            (5, "€".encode()[:2], False),
            (6, b"</s>", True),
            (7, None, False),
        )
    )
    one = Completion(text=" b", tokens=(4, 5, 6, 7), finish_reason="stop", logprobs=found)
    whole = Generation(completions=(one,), prompt_tokens=1)
    chat, text = (response(Envelope("n", is_chat, "m"), whole)["choices"][0]["logprobs"] for is_chat in (True, False))
    assert [(each["token"], each["bytes"]) for each in chat["content"]] == [
        (" b", [32, 98]),
        ("\\xe2\\x82", [226, 130]),
        ("</s>", None),
        ("token_id:7", None),
    ]
    assert text["tokens"] == [" b", "bytes:\\xe2\\x82", "</s>", "token_id:7"]
    assert text["top_logprobs"][0] == {"a": -0.1, "token_id:3": -0.3}


@BOTH
def test_chunks_of_several_answers_joined_are_the_whole_response(envelope):
    whole = generation("one", "two", "33", logprobs=True)
    made = Chunks(envelope, usage=True)
    chunks = []
    for step in range(3):  # side by side, as they come
        for sample in range(3):
            for part in parts(whole, sample)[step : step + 1]:
                chunks += made.of(part)
    chunks += made.end(whole)
    for chunk in chunks:
        check_shape(chunk, chunk=True)
    assert [said(chunks, sample) for sample in range(3)] == ["one", "two", "33"]
    for sample, one in enumerate(whole.completions):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == sample]
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", 0)
        if envelope.chat:
            assert choices[0]["delta"] == {"role": "assistant", "content": ""}
            assert choices[-1]["delta"] == {}
            assert not any("role" in choice["delta"] for choice in choices[1:])
            shown = [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]
        else:
            shown = [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["tokens"]]
        assert len(shown) == len(one.tokens)


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (BadPrompt("no. Mend it."), 400, "invalid_request_error", None, None),
        (BadRequest("no `n`. Mend it.", "n"), 400, "invalid_request_error", "n", None),
        (Expired("late. Hurry."), 408, "timeout_error", None, None),
        (QueueFull("full. Wait."), 429, "rate_limit_error", None, None),
        (BackendDied("gone. Wait."), 503, "overloaded_error", None, None),
        (BackendError("broke\nhere. Mend it."), 500, "server_error", None, None),
    ],
)
def test_an_error_has_openais_shape(error, status, kind, param, code):
    message = " ".join(str(error).split())
    assert status_of(error) == status
    assert error_of(error) == {"error": {"message": message, "type": kind, "param": param, "code": code}}


def test_a_prompt_that_is_too_long_is_told_what_a_client_can_do():
    error = PromptTooLong("the prompt has 90 tokens and the context 64. Use --truncate left, or --context N.")
    said = 'the prompt has 90 tokens and the context 64. Shorten it, or have it cut to fit with "truncate": "left" or '
    assert error_of(error)["error"] == {
        "message": said + '"right".',
        "type": "invalid_request_error",
        "param": None,
        "code": "context_length_exceeded",
    }


def test_a_request_may_ask_for_its_answer_in_chunks_where_that_can_be_had():
    body = b'{"model": "m", "prompt": "p", "stream": true, "stream_options": {"include_usage": true}, "max_tokens": 5}'
    found = RequestReader(PromptDefaults(), streams=True).read(body, "/v1/completions")
    assert (found.chat, found.model, found.stream, found.usage) == (False, "m", True, True)
    assert (found.prompt.text, found.prompt.sampling.max_tokens) == ("p", 5)
    with pytest.raises(BadRequest, match="`stream` is not to be had") as caught:
        RequestReader(PromptDefaults()).read(body, "/v1/completions")
    assert caught.value.param == "stream"
