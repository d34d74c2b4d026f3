"""OpenAI's own Python client against a running server, as existing scripts use it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from replica_servers import SECONDS, Server, serving, until

CHAT = [{"role": "user", "content": "Hi"}]
MANY = 120_000  # tokens: seconds, even of a model that computes nothing


@pytest.fixture(scope="module")
def client(tiny: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", timeout=SECONDS, max_retries=0) as client:
        yield client


def test_a_chat(client):
    answer = client.chat.completions.create(model="tiny", messages=CHAT, max_completion_tokens=8, seed=1)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens <= 8


def test_a_streamed_chat_says_the_same_and_its_usage(client):
    asked = {"model": "tiny", "messages": CHAT, "max_tokens": 12, "seed": 1, "n": 2}
    whole = client.chat.completions.create(**asked)
    texts, usage = ["", ""], None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        usage = chunk.usage or usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_completion_with_log_probabilities_and_a_stop(client):
    answer = client.completions.create(
        model="tiny", prompt="Hello", max_tokens=40, seed=2, logprobs=1, stop=["e", "a", "o"], presence_penalty=0.5
    )
    (choice,) = answer.choices
    assert choice.finish_reason in ("stop", "length")
    assert not {"e", "a", "o"} & set(choice.text)
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)


def test_a_parsed_answer(client):
    schema = {"enum": ["red", "blue"]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(model="tiny", messages=CHAT, response_format=form, max_tokens=64, seed=1)
    assert json.loads(answer.choices[0].message.content) in ("red", "blue")


def test_errors_are_openais_own(client):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-5", messages=CHAT)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.chat.completions.create(model="tiny", messages=CHAT, functions=[{"name": "x"}])
    assert unsupported.value.param == "functions"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="a" * 5000)
    assert long.value.code == "context_length_exceeded"
    assert "--" not in long.value.message
    assert client.completions.create(model="tiny", prompt="a" * 5000, max_tokens=2, extra_body={"truncate": "left"})


def test_keys_and_overload(tmp_path):
    (tmp_path / "keys").touch(mode=0o600)
    (tmp_path / "keys").write_text("right\n")
    words = ("--model", "null", "-B", "slots=1", "--max-queue-rows", 1, "--api-key-file", "keys")
    with serving(*words, "--drain-timeout", 0, folder=tmp_path) as server:
        url = f"{server.url}/v1"
        with (
            openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as wrong,
            pytest.raises(openai.AuthenticationError),
        ):
            wrong.models.list()
        with openai.OpenAI(base_url=url, api_key="right", timeout=SECONDS, max_retries=0) as client:
            asked = {"model": "null", "prompt": "Hello", "max_tokens": MANY, "extra_body": {"ignore_eos": True}}
            first = client.completions.create(**asked, stream=True)  # it has begun, and with it the slot is taken
            waiting = server.connect()
            body = json.dumps({"prompt": "Hello", "max_tokens": MANY, "ignore_eos": True})
            waiting.request("POST", "/v1/completions", body, {"Authorization": "Bearer right"})
            until(lambda: server.ask("/health").json["waiting_rows"] == 1)
            with pytest.raises(openai.RateLimitError) as refused:
                client.completions.create(**asked)
            assert int(refused.value.response.headers["retry-after"]) >= 1
            waiting.close()
            first.close()
