"""/v1/completions, /v1/chat/completions and /predict of a running server."""

from __future__ import annotations

import itertools
import json

import pytest

CHAT = [{"role": "user", "content": "Hi"}]
BAD = {
    "malformed JSON": ("/v1/completions", b'{"prompt": ', None, None),
    "no UTF-8": ("/v1/completions", b'{"prompt": "\xff"}', None, None),
    "nested too deeply": ("/v1/completions", b'{"prompt": ' + b"[" * 100_000, None, None),
    "a wrong type": ("/v1/completions", {"prompt": 5}, None, None),
    "no prompt": ("/v1/completions", {"messages": CHAT}, "prompt", None),
    "an unknown field": ("/v1/completions", {"prompt": "a", "temprature": 1}, "temprature", None),
    "an unsupported parameter": ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix", None),
    "too many samples": ("/v1/completions", {"prompt": "a", "n": 9}, "n", None),
    "more samples than anybody has": ("/v1/completions", {"prompt": "a", "n": 10**9}, None, None),
    "a context that is full": ("/v1/completions", {"prompt": "a" * 5000}, None, "context_length_exceeded"),
    "too many prompts": ("/v1/completions", {"prompt": ["a"] * 1000}, "prompt", None),
    "a template's argument that is not listed": (
        "/v1/chat/completions",
        {"messages": CHAT, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        "chat_template_kwargs",
        None,
    ),
    "a pattern that is too long": ("/v1/completions", {"prompt": "a", "guided_regex": "a" * 40_000}, None, None),
    "a pattern that is none": ("/v1/completions", {"prompt": "a", "guided_regex": "(("}, None, None),
    "a deep schema": (
        "/v1/completions",
        b'{"prompt": "a", "guided_json": ' + b'{"not": ' * 100 + b"true" + b"}" * 101,
        None,
        None,
    ),
    "no message": ("/v1/chat/completions", {"messages": []}, "messages", None),
    "no samples at all": ("/predict", {"prompt": "a", "num_samples": 0}, None, None),
    "a prediction of nothing": ("/predict", {}, None, None),
}


def test_a_completion_has_the_shape_of_openais(tiny):
    answer = tiny.ask("/v1/completions", {"model": "tiny", "prompt": "Hello", "max_tokens": 6, "ignore_eos": True})
    body = answer.json
    assert answer.status == 200
    assert body["object"] == "text_completion"
    assert body["usage"]["completion_tokens"] == 6
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["id"] == f"cmpl-{answer.headers['x-request-id']}"


def test_the_request_id_of_a_client_is_given_back(tiny):
    answer = tiny.ask("/v1/completions", {"prompt": "Hello", "max_tokens": 1}, {"X-Request-Id": "mine-7"})
    assert answer.headers["x-request-id"] == "mine-7"
    assert answer.json["id"] == "cmpl-mine-7"


def test_an_id_that_could_not_stand_in_a_log_is_replaced(tiny):
    answer = tiny.ask("/v1/completions", {"prompt": "Hello", "max_tokens": 1}, {"X-Request-Id": "a b" * 99})
    assert "a b" not in answer.headers["x-request-id"]


def test_without_a_seed_two_requests_differ(tiny):
    asked = {"prompt": "Hello", "max_tokens": 24, "ignore_eos": True}
    texts = {tiny.ask("/v1/completions", asked).json["choices"][0]["text"] for _ in range(2)}
    assert len(texts) == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_several_prompts_have_their_choices_one_after_the_other(tiny, stream):
    asked = {"prompt": ["one", "two", "three"], "n": 2, "max_tokens": 3, "seed": 1, "ignore_eos": True}
    answer = tiny.ask("/v1/completions", {**asked, "stream": stream, "stream_options": {"include_usage": True}})
    if stream:
        texts = [""] * 6
        for event in answer.events[:-1]:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        usage = answer.events[-2]["usage"]
    else:
        texts = [choice["text"] for choice in answer.json["choices"]]
        usage = answer.json["usage"]
    alone = [
        tiny.ask("/v1/completions", {**asked, "prompt": one}).json["choices"][index]["text"]
        for one in asked["prompt"]
        for index in (0, 1)
    ]
    assert texts == alone
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len("onetwothree"), 18)


def test_a_json_object_is_no_other_value(tiny):
    for seed in range(8):
        asked = {"messages": CHAT, "max_tokens": 40, "seed": seed, "response_format": {"type": "json_object"}}
        choice = tiny.ask("/v1/chat/completions", asked).json["choices"][0]
        assert choice["message"]["content"].lstrip().startswith("{"), choice
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_log_probabilities_say_what_their_tokens_are(tiny, path, stream):
    """As OpenAI's do: the bytes of a chat's tokens, joined, are its text; those of a completion stand beside it."""
    asked = {"max_tokens": 24, "seed": 5, "ignore_eos": True, "stream": stream}
    if path == "/v1/completions":
        answer = tiny.ask(path, {**asked, "prompt": "Hello", "logprobs": 3})
        choices = _choices(answer, stream)
        tokens = [one for choice in choices for one in (choice["logprobs"] or {"tokens": []})["tokens"]]
        assert len(tokens) == 24
        text = "".join(choice["text"] for choice in choices)
        if "\ufffd" not in text:  # whole characters alone
            assert "".join(tokens) == text
        assert not any(one.startswith("token_id:") for one in tokens)
        top = [one for choice in choices for one in (choice["logprobs"] or {"top_logprobs": []})["top_logprobs"]]
        assert all(1 <= len(one) <= 3 for one in top)
    else:
        answer = tiny.ask(path, {**asked, "messages": CHAT, "logprobs": True, "top_logprobs": 2})
        choices = _choices(answer, stream)
        found = [one for choice in choices for one in (choice["logprobs"] or {"content": []})["content"]]
        assert len(found) == 24
        said = "".join(choice["delta" if stream else "message"].get("content") or "" for choice in choices)
        assert bytes(byte for one in found for byte in one["bytes"] or ()).decode(errors="replace") == said
        for one in itertools.chain(found, *(chosen["top_logprobs"] for chosen in found)):
            if one["bytes"] is not None and "\\x" not in one["token"]:
                assert bytes(one["bytes"]).decode() == one["token"]
        assert not any(one["token"].startswith("token_id:") for one in found)


def _choices(answer, stream):
    events = [event for event in answer.events if event] if stream else [answer.json]
    return [choice for event in events for choice in event["choices"]]


STREAMED = {
    f"{name}, streamed": (path, {**body, "stream": True}, *more)
    for name, (path, body, *more) in BAD.items()
    if isinstance(body, dict) and path != "/predict"
}


@pytest.mark.parametrize(("path", "body", "param", "code"), [*BAD.values(), *STREAMED.values()], ids=[*BAD, *STREAMED])
def test_what_cannot_be_is_400_and_says_why(tiny, path, body, param, code):
    answer = tiny.ask(path, body)
    assert answer.status == 400, answer.body
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["message"].endswith(".")
    assert "Traceback" not in answer.error["message"]
    if param:
        assert answer.error["param"] == param
    if code:
        assert answer.error["code"] == code


def test_an_unknown_model_is_404(tiny):
    answer = tiny.ask("/v1/completions", {"model": "gpt-5", "prompt": "a"})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")


def test_rows_are_not_asked_of_a_model_of_text(tiny):
    answer = tiny.ask("/v1/evaluate", {"x": [1]})
    assert answer.status == 404
    assert "/v1/completions" in answer.error["message"]


def test_a_prediction_has_so_many_samples(tiny):
    asked = {"prompt": "Hello", "num_samples": 3, "max_new_tokens": 4, "seed": 2}
    samples = tiny.ask("/predict", asked).json["samples"]
    assert len(samples) == 3
    assert all(len(one["tokens"]) <= 4 for one in samples)
    assert samples == tiny.ask("/predict", asked).json["samples"]


def test_a_deadline_that_has_passed_is_408(tiny):
    answer = tiny.ask("/v1/completions", {"prompt": "a"}, {"X-Gpuinfer-Timeout": "1e-9"})
    assert (answer.status, answer.error["type"]) == (408, "timeout_error")


@pytest.mark.parametrize(
    ("name", "value"),
    [("X-Gpuinfer-Timeout", "soon"), ("X-Gpuinfer-Timeout", "nan"), ("X-Gpuinfer-Priority", "highest")],
)
def test_a_header_that_says_nothing_is_400(tiny, name, value):
    answer = tiny.ask("/v1/completions", {"prompt": "a"}, {name: value})
    assert answer.status == 400
    assert name in answer.error["message"]
