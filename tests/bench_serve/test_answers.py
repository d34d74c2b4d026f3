"""Streams that are counted by their bytes are counted as if each event had been read."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.lab.serve_bench.requests import EventCounter, RequestRecord


def data(*events) -> bytes:
    return b"".join(
        b"data: " + (one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n\n" for one in events
    )


def text(said="x", reason=None):
    return {"choices": [{"index": 0, "text": said, "finish_reason": reason}]}


def delta(**said):
    return {"choices": [{"index": 0, "delta": said}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
DONE = b"[DONE]"


def fed(parts):
    record = RequestRecord(0.0)
    events = EventCounter(record)
    for at, part in parts:
        events.feed(at, part)
    events.finish()
    return record


@pytest.mark.parametrize(
    ("stream", "events", "tokens", "error"),
    [
        pytest.param(data(text(), text(), text(), USAGE, DONE), 3, 3, None, id="completions"),
        pytest.param(
            data(delta(role="assistant", content=""), delta(content="a"), delta(content="b"), delta(), USAGE, DONE),
            2,
            3,
            None,
            id="a chat: its role and its end are no tokens",
        ),
        pytest.param(data(text(), text("", "stop"), DONE), 1, None, None, id="without usage"),
        pytest.param(data(text(), text()), 2, None, "stream cut off", id="without its end"),
        pytest.param(data(text(), {"error": {"message": "no"}}), 1, None, "error in the stream", id="an error"),
        pytest.param(data(text("\ndata: x\n\ndata: y"), DONE), 1, None, None, id="a text that looks like events"),
        pytest.param(data(text(), text(), DONE).replace(b"\n", b"\r\n"), 2, None, None, id="lines that end with CRLF"),
        pytest.param(b": ping\n\n" + data(text(), DONE), 1, None, None, id="a comment"),
        pytest.param(data(delta(reasoning_content="hm"), delta(content="a"), DONE), 2, None, None, id="reasoning"),
        pytest.param(data({"choices": None}, b"{", DONE), 0, None, None, id="no choices and no JSON"),
        pytest.param(b"", 0, None, "stream cut off", id="nothing"),
    ],
)
def test_what_a_stream_holds(stream, events, tokens, error):
    record = fed([(1.0, stream)])
    assert (len(record.events), record.tokens, record.error) == (events, tokens, error)


@given(st.lists(st.integers(1, 700), max_size=12), st.integers(1, 30))
def test_the_count_does_not_depend_on_how_the_bytes_are_cut(cuts, count):
    whole = data(delta(role="assistant"), *[delta(content=f"{number}") for number in range(count)], USAGE, DONE)
    places = sorted({0, len(whole), *(cut % len(whole) for cut in cuts)})
    record = fed([(float(at), whole[start:end]) for at, (start, end) in enumerate(itertools.pairwise(places))])
    assert len(record.events) == count
    assert (record.tokens, record.input_tokens, record.error) == (3, 7, None)
    assert list(record.events) == sorted(record.events)


def test_a_long_stream_keeps_only_its_end():
    record = fed(
        [(float(at), data(text("x" * 400))) for at in range(300)] + [(300.0, data(text("", "stop"), USAGE, DONE))]
    )
    assert (len(record.events), record.tokens, record.last) == (300, 3, 299.0)
