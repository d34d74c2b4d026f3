"""OpenAI's API and /predict of a running server: by OpenAI's own client, over sockets, and with what is no request."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from replica_servers import SECONDS, Server, bearer, serving, until, write_keys

from gpuinfer.errors import BackendDied, BackendError, BadPrompt, Expired, PromptTooLong, QueueFull
from gpuinfer.generation import Candidate, Completion, Generation, Logprob
from gpuinfer.serving.openai.requests import BadRequest, PromptDefaults, RequestReader
from gpuinfer.serving.openai.responses import Envelope, error_of, response, status_of

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CHAT = [{"role": "user", "content": "Hi"}]
MANY = 120_000  # tokens: seconds, even of a model that computes nothing


@pytest.fixture(scope="module")
def client(tiny: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", timeout=SECONDS, max_retries=0) as client:
        yield client


def test_openais_own_client_reads_whole_answers_streams_stops_and_forms(client):
    chat = {"model": "tiny", "messages": CHAT, "max_completion_tokens": 12, "seed": 1, "n": 2}
    whole = client.chat.completions.create(**chat)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason in ("stop", "length")
    texts, usage = ["", ""], None
    for chunk in client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        usage = chunk.usage or usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens <= 24
    stopped = {"max_tokens": 40, "seed": 2, "logprobs": 1, "stop": ["e", "a", "o"], "presence_penalty": 0.5}
    (choice,) = client.completions.create(model="tiny", prompt="Hello", **stopped).choices
    assert not {"e", "a", "o"} & set(choice.text)
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)
    schema = {"name": "answer", "schema": {"enum": ["red", "blue"]}, "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    answer = client.chat.completions.create(model="tiny", messages=CHAT, response_format=form, max_tokens=64, seed=1)
    assert json.loads(answer.choices[0].message.content) in ("red", "blue")


def test_errors_are_openais_own(client):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-5", messages=CHAT)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.chat.completions.create(model="tiny", messages=CHAT, functions=[{"name": "x"}])
    assert unsupported.value.param == "functions"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="a" * 5000)
    assert long.value.code == "context_length_exceeded"
    assert "--" not in long.value.message
    assert client.completions.create(model="tiny", prompt="a" * 5000, max_tokens=2, extra_body={"truncate": "left"})


def test_keys_and_overload(tmp_path):
    write_keys(tmp_path / "keys", "right")
    words = ("--model", "null", "-B", "slots=1", "--max-queue-rows", 1, "--api-key-file", "keys")
    with serving(*words, "--drain-timeout", 0, folder=tmp_path) as server:
        url, asked = f"{server.url}/v1", {"prompt": "Hello", "max_tokens": MANY}
        assert server.ask("/v1/models", headers=bearer("wrong")).status == 401
        with openai.OpenAI(base_url=url, api_key="right", timeout=SECONDS, max_retries=0) as client:
            body = {"model": "null", **asked, "extra_body": {"ignore_eos": True}}
            first = client.completions.create(**body, stream=True)  # it has begun, and with it the slot is taken
            waiting = server.begun(COMPLETIONS, {**asked, "ignore_eos": True}, "Authorization: Bearer right\r\n")
            until(lambda: server.ask("/health").json["waiting_rows"] == 1)
            with pytest.raises(openai.RateLimitError) as refused:
                client.completions.create(**body)
            assert int(refused.value.response.headers["retry-after"]) >= 1
            assert server.ask("/v1/models", headers=bearer("right")).status == 200
            waiting.close()
            first.close()


def test_a_completion_has_the_shape_of_openais_and_gives_a_clients_id_back(tiny):
    asked = {"model": "tiny", "prompt": "Hello", "max_tokens": 6, "ignore_eos": True}
    for sent, kept in (("mine-7", True), ("a b" * 99, False)):
        answer = tiny.ask(COMPLETIONS, asked, {"X-Request-Id": sent})
        body, choice = answer.json, answer.json["choices"][0]
        assert (answer.status, answer.headers["x-request-id"] == sent) == (200, kept)
        assert {"id", "object", "created", "model", "choices", "usage"} == set(body)
        assert (body["id"], body["object"]) == (f"cmpl-{answer.headers['x-request-id']}", "text_completion")
        assert (body["usage"]["completion_tokens"], choice["finish_reason"]) == (6, "length")
    asked["max_tokens"] = 24
    assert len({tiny.ask(COMPLETIONS, asked).json["choices"][0]["text"] for _ in range(2)}) == 2, (
        "no seed, no repetition"
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_several_prompts_have_their_choices_one_after_the_other(tiny, stream):
    asked = {"prompt": ["one", "two", "three"], "n": 2, "max_tokens": 3, "seed": 1, "ignore_eos": True}
    answer = tiny.ask(COMPLETIONS, {**asked, "stream": stream, "stream_options": {"include_usage": True}})
    events = answer.events[:-1] if stream else [answer.json]
    texts = [""] * 6
    for choice in (choice for event in events for choice in event["choices"]):
        texts[choice["index"]] += choice["text"]
    alone = [
        tiny.ask(COMPLETIONS, {**asked, "prompt": one}).json["choices"][index]["text"]
        for one in asked["prompt"]
        for index in (0, 1)
    ]
    usage = events[-1]["usage"]
    assert texts == alone
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len("onetwothree"), 18)


def test_a_json_object_is_no_other_value(tiny):
    for seed in range(8):
        asked = {"messages": CHAT, "max_tokens": 40, "seed": seed, "response_format": {"type": "json_object"}}
        choice = tiny.ask(CHATS, asked).json["choices"][0]
        assert choice["message"]["content"].lstrip().startswith("{"), choice
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
def test_log_probabilities_say_what_their_tokens_are(tiny, path, stream):
    """As OpenAI's do: the bytes of a chat's tokens, joined, are its text; those of a completion stand beside it."""
    more = {"prompt": "Hello", "logprobs": 3} if path == COMPLETIONS else {"messages": CHAT, "logprobs": True}
    asked = {"max_tokens": 24, "seed": 5, "ignore_eos": True, "stream": stream, **more}
    answer = tiny.ask(path, asked if path == COMPLETIONS else {**asked, "top_logprobs": 2})
    events = [event for event in answer.events if event] if stream else [answer.json]
    choices = [choice for event in events for choice in event["choices"]]
    told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    if path == COMPLETIONS:
        tokens = [one for each in told for one in each["tokens"]]
        text = "".join(choice["text"] for choice in choices)
        assert "\ufffd" in text or "".join(tokens) == text  # whole characters alone
        assert all(1 <= len(one) <= 3 for each in told for one in each["top_logprobs"])
    else:
        found = [one for each in told for one in each["content"]]
        tokens = [one["token"] for one in found]
        said = "".join(choice["delta" if stream else "message"].get("content") or "" for choice in choices)
        assert bytes(byte for one in found for byte in one["bytes"] or ()).decode(errors="replace") == said
        for one in itertools.chain(found, *(chosen["top_logprobs"] for chosen in found)):
            if one["bytes"] is not None and "\\x" not in one["token"]:
                assert bytes(one["bytes"]).decode() == one["token"]
    assert len(tokens) == 24
    assert not any(one.startswith("token_id:") for one in tokens)


def test_tokens_have_their_texts_and_bytes_as_openai_writes_them():
    likeliest = (Candidate(1, -0.1, 1, b"a"), Candidate(2, -0.2, 2, b"a"), Candidate(3, -0.3, 3))
    names = ((4, b" b", False), (5, "€".encode()[:2], False), (6, b"</s>", True), (7, None, False))
    found = tuple(Logprob(Candidate(token, -0.5, 1, name, silent), likeliest) for token, name, silent in names)
    one = Completion(text=" b", tokens=(4, 5, 6, 7), finish_reason="stop", logprobs=found)
    whole = Generation(completions=(one,), prompt_tokens=1)
    chat, text = (response(Envelope("n", is_chat, "m"), whole)["choices"][0]["logprobs"] for is_chat in (True, False))
    written = [(" b", [32, 98]), ("\\xe2\\x82", [226, 130]), ("</s>", None), ("token_id:7", None)]
    assert [(each["token"], each["bytes"]) for each in chat["content"]] == written
    assert text["tokens"] == [" b", "bytes:\\xe2\\x82", "</s>", "token_id:7"]
    assert text["top_logprobs"][0] == {"a": -0.1, "token_id:3": -0.3}


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (BadPrompt("no. Mend it."), 400, "invalid_request_error", None),
        (BadRequest("no `n`. Mend it.", "n"), 400, "invalid_request_error", None),
        (PromptTooLong("90 tokens and the context 64. Use --truncate left, or --context N."), 400,
         "invalid_request_error", "context_length_exceeded"),
        (Expired("late. Hurry."), 408, "timeout_error", None),
        (QueueFull("full. Wait."), 429, "rate_limit_error", None),
        (BackendDied("gone. Wait."), 503, "overloaded_error", None),
        (BackendError("broke\nhere. Mend it."), 500, "server_error", None),
    ],
)  # fmt: skip
def test_an_error_has_openais_shape(error, status, kind, code):
    told = error_of(error)["error"]
    assert (status_of(error), told["type"], told["code"]) == (status, kind, code)
    assert told["param"] == ("n" if isinstance(error, BadRequest) else None)
    assert "\n" not in told["message"]
    assert ('"truncate": "left"' in told["message"]) == (code is not None), "what a client can do, and not the server"


def test_a_request_may_ask_for_its_answer_in_chunks_where_that_can_be_had():
    body = b'{"model": "m", "prompt": "p", "stream": true, "stream_options": {"include_usage": true}, "max_tokens": 5}'
    found = RequestReader(PromptDefaults(), streams=True).read(body, COMPLETIONS)
    assert (found.chat, found.model, found.stream, found.usage) == (False, "m", True, True)
    assert (found.prompt.text, found.prompt.sampling.max_tokens) == ("p", 5)
    with pytest.raises(BadRequest, match="`stream` is not to be had") as caught:
        RequestReader(PromptDefaults()).read(body, COMPLETIONS)
    assert caught.value.param == "stream"


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def ask(**more: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": "a", "max_tokens": 2, **more}


def chat(content: Any = "a", **more: Any) -> tuple[str, dict[str, Any]]:
    return CHATS, {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **more}


def image(url: str) -> tuple[str, dict[str, Any]]:
    return chat([{"type": "image_url", "image_url": {"url": url}}])


BAD: list[tuple[tuple[str, Any], str | None]] = [
    ((COMPLETIONS, b'{"prompt": '), None),
    ((COMPLETIONS, b'{"prompt": "\xff"}'), None),
    ((COMPLETIONS, b'{"prompt": ' + b"[" * 100_000), None),
    ((COMPLETIONS, b'{"prompt": "a", "guided_json": ' + b'{"not": ' * 100 + b"true" + b"}" * 101), None),
    ((COMPLETIONS, {"messages": CHAT}), "prompt"),
    ((CHATS, {"messages": []}), "messages"),
    ((CHATS, {"messages": [{"role": "user", "content": "a"}] * 100_000}), None),
    (("/predict", {"prompt": "a", "num_samples": 0}), None),
    (("/predict", {"prompt": "a", "num_samples": 10_000}), None),
    (("/predict", {}), None),
    (ask(prompt=5), None),
    (ask(temprature=1), "temprature"),
    (ask(suffix="b"), "suffix"),
    (ask(n=9), "n"),
    (ask(n=10**9), None),
    (ask(prompt="a" * 5000), None),
    (ask(prompt=["a"] * 1000), "prompt"),
    (ask(guided_regex="a" * 40_000), None),
    (ask(guided_regex="(("), None),
    (ask(guided_json=json.dumps(nested(200))), None),
    (ask(structured_outputs={"json": nested(200)}), None),
    (ask(guided_json=json.dumps({"enum": list(range(30_000))})), None),
    (ask(guided_json={"$ref": "http://127.0.0.1:9/schema.json"}), None),
    (ask(guided_json={"$ref": "file:///etc/passwd"}), None),
    (ask(guided_choice=["a" * 10] * 100_000), None),
    (ask(stop=["a"] * 1000), None),
    (ask(logprobs=100_000), None),
    (ask(max_tokens=1 << 40), None),
    (ask(logit_bias={str(token): 1 for token in range(50_000)}), None),
    (ask(adapter="../../secret"), None),
    (chat(chat_template="{{ ''.__class__.__mro__ }}"), None),
    (chat(chat_template_kwargs={"chat_template": "{{ 1 }}"}), "chat_template_kwargs"),
    (chat(chat_template_kwargs={"enable_thinking": {"a": [1]}}), None),
    (image("http://127.0.0.1:9/a"), None),
    (image("file:///etc/passwd"), None),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_what_has_a_bound_or_is_not_for_clients_is_400_and_says_why(tiny, number):
    (path, body), param = BAD[number]
    bodies = [body, {**body, "stream": True}] if isinstance(body, dict) and path != "/predict" else [body]
    for one in bodies:
        answer = tiny.ask(path, one)
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error"), answer.body
        assert answer.error["message"].endswith(".")
        assert "Traceback" not in answer.error["message"]
        assert len(answer.body) < 1000, "an answer does not repeat what was too long"
        assert param in (None, answer.error["param"])


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "why"),
    [
        ("/v1/evaluate", {"x": [1]}, {}, 404, COMPLETIONS),
        ("/predict", {"prompt": "a", "model": "other"}, {}, 404, "'tiny'"),
        (COMPLETIONS, {"prompt": "a"}, {"X-Gpuinfer-Timeout": "1e-9"}, 408, ""),
        (COMPLETIONS, {"prompt": "a"}, {"X-Gpuinfer-Timeout": "soon"}, 400, "X-Gpuinfer-Timeout"),
        (COMPLETIONS, {"prompt": "a"}, {"X-Gpuinfer-Timeout": "nan"}, 400, "X-Gpuinfer-Timeout"),
        (COMPLETIONS, {"prompt": "a"}, {"X-Gpuinfer-Priority": "highest"}, 400, "X-Gpuinfer-Priority"),
        ("/v1/responses/resp_1/cancel", {}, {}, 404, "ask POST /v1/chat/completions instead"),
        ("/v1/batches", {}, {}, 404, "`gpuinfer generate` answers files of prompts"),
        ("/v1/moderations", {}, {}, 404, "models of moderation are not served"),
    ],
)
def test_what_cannot_be_had_is_refused_with_what_there_is_instead(tiny, path, body, headers, status, why):
    answer = tiny.ask(path, body, headers)
    assert answer.status == status
    assert why in answer.error["message"]


@pytest.mark.parametrize(
    "name",
    [
        "../../../etc/passwd",
        "/etc/passwd",
        "tiny/../tiny",
        "./tiny",
        "file:///etc/passwd",
        "tiny\x00",
        "/tiny",
        "a/b/tiny",
        "acme/tiny@v1",
        "tin",
        "",
    ],
)
def test_a_model_is_named_and_never_a_path(tiny, name):
    answer = tiny.ask(*ask(model=name))
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    assert "passwd" not in answer.error["message"]


RULES = "\n".join(["start: r0", *(f'r{n}: r{(n + 1) % 500} r{(n + 2) % 500} | "x"' for n in range(500))])
HARD = {
    "a pattern that counts to a million": {"guided_regex": "(a{1,1000}){1,1000}"},
    "a pattern that backtracks": {"guided_regex": "(x+x+)+y" * 50},
    "a pattern with long counts": {"guided_regex": "[a-z]{1,30000}.*[a-z]{1,30000}"},
    "a grammar whose rules all call one another": {"guided_grammar": RULES},
    "a grammar that begins with itself": {"guided_grammar": 'start: start start | "a"'},
    "a schema whose parts refer to one another": {
        "guided_json": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 50}}, "$ref": "#/$defs/a"}
    },
}


@pytest.mark.parametrize("case", HARD)
def test_a_form_that_is_hard_to_build_ends_and_keeps_nobody_waiting(tiny, case):
    """Its own answer, or why it cannot be had; others are answered meanwhile, and the server is well."""
    statuses: list[int] = []
    hard = threading.Thread(target=lambda: statuses.append(tiny.ask(*ask(**HARD[case])).status))
    hard.start()
    assert tiny.ask(*ask()).status == 200
    until(lambda: not hard.is_alive())
    assert statuses in ([200], [400])
    assert tiny.ask("/health").json["status"] == "ready"


def test_memory_is_not_taken_for_what_is_only_asked_for(tiny):
    """`max_tokens` is a wish: a thousand million of them cost as much as the context has."""
    answer = tiny.ask(*ask(max_tokens=1 << 30, stop="e"))
    assert answer.status == 200
    assert answer.json["usage"]["completion_tokens"] <= 4096


def test_a_prediction_has_so_many_samples_and_counters_count_its_tokens(tiny):
    def drawn() -> float:
        lines = tiny.ask("/metrics").body.decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("gpuinfer_output_tokens_total"))

    before = drawn()
    asked = {"prompt": "Hello", "num_samples": 3, "max_new_tokens": 4, "seed": 2}
    samples = tiny.ask("/predict", asked).json["samples"]
    assert [len(one["tokens"]) <= 4 for one in samples] == [True] * 3
    assert samples == tiny.ask("/predict", asked).json["samples"]
    assert drawn() - before >= 2 * sum(len(one["tokens"]) for one in samples)
