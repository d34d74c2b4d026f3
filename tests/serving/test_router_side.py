"""What a replica tells a router, and believes of it: the tokens of each event, and where to go on."""

from __future__ import annotations

import json
import re

import pytest
from replica_servers import Answer, Server

ASKED = {"prompt": "Hello", "max_tokens": 20, "ignore_eos": True, "stream": True}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "ignore_eos": True, "stream": True}


def blocks(answer: Answer) -> list[tuple[str | None, dict | None]]:
    """Each event: its id and its data."""
    found = []
    for block in answer.body.decode().strip().split("\n\n"):
        given = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((given.get("id"), None if given["data"] == "[DONE]" else json.loads(given["data"])))
    return found


Events = list[tuple[str | None, dict | None]]


def text_of(events: Events, sample: int = 0) -> str:
    said = ""
    for _, data in events:
        for choice in (data or {}).get("choices", ()):
            if choice["index"] == sample:
                said += choice.get("text") or choice.get("delta", {}).get("content", "")
    return said


def tokens_of(events: Events, sample: int = 0) -> list[int]:
    ids = [one.removesuffix("!").split(".") for one, _ in events if one is not None]
    return [int(token) for owner, told in ids if int(owner) == sample for token in told.split(",") if told]


def gone_on(
    server: Server, path: str, asked: dict, begun: dict[int, list[int]], ended: tuple[int, ...] = (), **headers
):
    """The rest of a stream whose samples have had these tokens."""
    head = json.dumps({str(n): {"tokens": told, "ended": n in ended} for n, told in begun.items()}).encode()
    sent = {**headers, "X-Gpuinfer-Begun": str(len(head)), "X-Gpuinfer-Created": "1234"}
    return blocks(server.ask(path, head + json.dumps(asked).encode(), sent))


BOTH = pytest.mark.parametrize(("path", "asked"), [("/v1/completions", ASKED), ("/v1/chat/completions", CHAT)])


@BOTH
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


@BOTH
def test_a_stream_goes_on_where_another_replica_has_ended(behind, path, asked):
    """With the same request id, and no seed; also where a stop string ends it, which holds back what is not sent."""
    asked = {**asked, "stream_options": {"include_usage": True}}
    for cut in (1, 7, 19):
        id = {"X-Request-Id": f"r{cut}"}
        whole = blocks(behind.ask(path, asked, id))
        sent = [event for event in whole if event[0] is not None and not event[0].endswith(".")][:cut]
        rest = gone_on(behind, path, asked, {0: tokens_of(sent)}, **id)
        assert text_of(sent) + text_of(rest) == text_of(whole)
        assert tokens_of(sent) + tokens_of(rest) == tokens_of(whole)
        assert not any("role" in choice.get("delta", {}) for _, data in rest if data for choice in data["choices"])
        assert {data["created"] for _, data in rest if data} == {1234}
        assert rest[-2][1]["usage"]["completion_tokens"] == 20
    said = text_of(blocks(behind.ask(path, {**asked, "seed": 4})))
    half = said[len(said) // 2 :]
    asked, id = {**asked, "seed": 4, "stop": [half[:4] + "never", half[:5]]}, {"X-Request-Id": "stopped"}
    whole = blocks(behind.ask(path, asked, id))
    told = [event for event in whole if event[0] is not None and not event[0].endswith(".")]
    assert told[-1][1]["choices"][0]["finish_reason"] == "stop"
    for cut in range(len(told)):
        rest = gone_on(behind, path, asked, {0: tokens_of(told[:cut])}, **id)
        assert text_of(told[:cut]) + text_of(rest) == text_of(whole)
        assert tokens_of(told[:cut]) + tokens_of(rest) == tokens_of(whole)


def test_several_prompts_and_samples_go_on_and_one_that_had_ended_says_nothing_more(behind):
    asked, id = {**ASKED, "prompt": ["Hello", "World"], "n": 2, "max_tokens": 6}, {"X-Request-Id": "several"}
    whole = blocks(behind.ask("/v1/completions", asked, id))
    begun = {sample: tokens_of(whole, sample)[:sample] for sample in range(3)} | {3: tokens_of(whole, 3)}
    rest = gone_on(behind, "/v1/completions", asked, begun, ended=(3,), **id)
    for sample in range(3):
        assert tokens_of(rest, sample) == tokens_of(whole, sample)[sample:]
    assert tokens_of(rest, 3) == []
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
