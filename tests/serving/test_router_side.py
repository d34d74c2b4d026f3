"""What a replica tells a router, and believes of it: the tokens of each event, and where to go on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from replica_servers import Answer, Server, serving

ASKED = {"prompt": "Hello", "max_tokens": 20, "ignore_eos": True, "stream": True}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def behind(tmp_path_factory) -> Iterator[Server]:
    words = ("--model", "tiny", "-B", "slots=4", "-B", "threads=1", "--behind-router")
    with serving(*words, folder=tmp_path_factory.mktemp("behind")) as server:
        yield server


def blocks(answer: Answer) -> list[tuple[str | None, dict | None]]:
    """Each event: its id and its data."""
    found = []
    for block in answer.body.decode().strip().split("\n\n"):
        given = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((given.get("id"), None if given["data"] == "[DONE]" else json.loads(given["data"])))
    return found


def text_of(events: list[tuple[str | None, dict | None]], sample: int = 0) -> str:
    said = ""
    for _, data in events:
        for choice in (data or {}).get("choices", ()):
            if choice["index"] == sample:
                said += choice.get("text") or choice.get("delta", {}).get("content", "")
    return said


def tokens_of(events: list[tuple[str | None, dict | None]], sample: int = 0) -> list[int]:
    ids = [one.removesuffix("!").split(".") for one, _ in events if one is not None]
    return [int(token) for owner, told in ids if int(owner) == sample for token in told.split(",") if told]


@pytest.mark.parametrize(("path", "asked"), [("/v1/completions", ASKED), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize("samples", [1, 2])
def test_each_event_says_the_tokens_in_it(behind, path, asked, samples):
    events = blocks(behind.ask(path, {**asked, "n": samples, "seed": 4}))
    whole = behind.ask(path, {**asked, "n": samples, "seed": 4, "stream": False}).json
    for sample in range(samples):
        assert len(tokens_of(events, sample)) == 20
        choice = whole["choices"][sample]
        assert text_of(events, sample) == choice.get("text", choice.get("message", {}).get("content"))
        ends = [one for one, _ in events if one is not None and re.fullmatch(rf"{sample}\..*!", one)]
        assert len(ends) == 1
    assert events[-1] == (None, None)


@pytest.mark.parametrize(("path", "asked"), [("/v1/completions", ASKED), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize("cut", [1, 7, 19])
def test_a_stream_goes_on_where_another_replica_has_ended(behind, path, asked, cut):
    """With the same request id, whether a seed was given or not."""
    headers = {"X-Request-Id": f"r{cut}"}
    whole = blocks(behind.ask(path, {**asked, "stream_options": {"include_usage": True}}, headers))
    sent = [event for event in whole if event[0] is not None and not event[0].endswith(".")][:cut]
    begun = json.dumps({"0": {"tokens": tokens_of(sent), "ended": False}}).encode()
    body = json.dumps({**asked, "stream_options": {"include_usage": True}}).encode()
    more = {**headers, "X-Gpuinfer-Begun": str(len(begun)), "X-Gpuinfer-Created": "1234"}
    rest = blocks(behind.ask(path, begun + body, more))
    assert text_of(sent) + text_of(rest) == text_of(whole)
    assert tokens_of(sent) + tokens_of(rest) == tokens_of(whole)
    assert not any("role" in choice.get("delta", {}) for _, data in rest if data for choice in data["choices"])
    assert {data["created"] for _, data in rest if data} == {1234}
    assert rest[-2][1]["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize(("path", "asked"), [("/v1/completions", ASKED), ("/v1/chat/completions", CHAT)])
def test_a_stream_that_a_stop_string_ends_goes_on_after_each_of_its_events(behind, path, asked):
    """What a stop string holds back has not been sent, and its rest and the end of the answer are one event."""
    said = text_of(blocks(behind.ask(path, {**asked, "seed": 4})))
    stop = [said[len(said) // 2 :][:4] + "never", said[len(said) // 2 :][:5]]
    asked, headers = {**asked, "seed": 4, "stop": stop}, {"X-Request-Id": "stopped"}
    whole = blocks(behind.ask(path, asked, headers))
    told = [event for event in whole if event[0] is not None and not event[0].endswith(".")]
    assert told[-1][1]["choices"][0]["finish_reason"] == "stop"
    for cut in range(len(told)):
        begun = json.dumps({"0": {"tokens": tokens_of(told[:cut]), "ended": False}}).encode()
        body = begun + json.dumps(asked).encode()
        rest = blocks(behind.ask(path, body, {**headers, "X-Gpuinfer-Begun": str(len(begun))}))
        assert text_of(told[:cut]) + text_of(rest) == text_of(whole)
        assert tokens_of(told[:cut]) + tokens_of(rest) == tokens_of(whole)


def test_a_request_with_several_prompts_goes_on_too(behind):
    asked, headers = {**ASKED, "prompt": ["Hello", "World"], "n": 2, "max_tokens": 6}, {"X-Request-Id": "several"}
    whole = blocks(behind.ask("/v1/completions", asked, headers))
    begun = {sample: {"tokens": tokens_of(whole, sample)[:sample], "ended": False} for sample in range(4)}
    head = json.dumps(begun).encode()
    body = head + json.dumps(asked).encode()
    rest = blocks(behind.ask("/v1/completions", body, {**headers, "X-Gpuinfer-Begun": str(len(head))}))
    for sample in range(4):
        assert tokens_of(rest, sample) == tokens_of(whole, sample)[sample:]


def test_a_sample_that_had_ended_says_nothing_more(behind):
    asked, headers = {**ASKED, "n": 2, "max_tokens": 6}, {"X-Request-Id": "ended"}
    whole = blocks(behind.ask("/v1/completions", asked, headers))
    begun = {
        "0": {"tokens": tokens_of(whole, 0), "ended": True},
        "1": {"tokens": tokens_of(whole, 1)[:2], "ended": False},
    }
    head = json.dumps(begun).encode()
    rest = blocks(
        behind.ask(
            "/v1/completions", head + json.dumps(asked).encode(), {**headers, "X-Gpuinfer-Begun": str(len(head))}
        )
    )
    assert tokens_of(rest, 0) == []
    assert tokens_of(rest, 1) == tokens_of(whole, 1)[2:]
    assert rest[-1] == (None, None)


@pytest.mark.parametrize(
    ("head", "length"),
    [
        pytest.param(b"{}x", "3", id="no JSON"),
        pytest.param(b'{"a": {"tokens": []}}', "21", id="no sample"),
        pytest.param(b'{"7": {"tokens": [1]}}', "22", id="a sample that was not asked for"),
        pytest.param(b"{}", "999999", id="longer than the body"),
        pytest.param(b"{}", "-1", id="negative"),
        pytest.param(b'{"0": {"tokens": [99999999]}}', "29", id="a token that is none"),
    ],
)
def test_a_beginning_that_is_none_is_400(behind, head, length):
    answer = behind.ask("/v1/completions", head + json.dumps(ASKED).encode(), {"X-Gpuinfer-Begun": length})
    assert answer.status == 400, answer.body


def test_nobody_else_is_believed(tiny):
    answer = tiny.ask(
        "/v1/completions", {**ASKED, "stream": False}, {"X-Gpuinfer-Begun": "5", "X-Gpuinfer-Created": "7"}
    )
    assert answer.status == 200
    assert answer.json["created"] > 7
    assert b"id: " not in tiny.ask("/v1/completions", ASKED).body
