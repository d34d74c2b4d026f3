"""A trace that is cut off, garbled, or none at all is refused with the cure."""

from __future__ import annotations

import gzip
import json
import os

import pytest
from counts import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from playing import record_little

from gpuinfer.engine import trace_merge, trace_reader
from gpuinfer.engine.trace_reader import read
from gpuinfer.errors import UsageError

HEADER = {
    "schema": "gpuinfer.trace/1",
    "started_at": "2026-01-01T00:00:00+00:00",
    "gpuinfer": "0.1.0",
    "strategy": None,
    "engines": 1,
    "limits": None,
}


def written(path, *events, counts=None, header=HEADER):
    """A trace of these events."""
    found = {kind: sum(event[0] == kind for event in events) for kind in "acbs"} if counts is None else counts
    lines = [header, *events, ["end", events[-1][1] if events else 0, found]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def arrival(at, number=1, *, engine=0, rows=1, priority=1, client=None, left_s=None, group=None):
    return ["a", at, engine, number, rows, priority, client, left_s, group]


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_trace_cut_off_at_any_byte_is_refused(tmp_path, name):
    path = tmp_path / name
    record_little(path, batches=1)
    trace_merge.merge_trace(path)
    whole = path.read_bytes()
    most = len(whole) - (name == "trace.jsonl")  # the newline at the very end is no loss
    for size in range(most):
        path.write_bytes(whole[:size])
        with pytest.raises(UsageError, match="trace"):
            read(path)
    path.write_bytes(whole[:most])
    assert len(read(path).arrivals) == 2


def test_what_is_no_trace_is_told_so(tmp_path):
    path = tmp_path / "trace.jsonl"
    for content in (
        b"",
        b"\n",
        b"[]",
        b"{}\n",
        b"\x00\xff\n",
        b"[" * 9_000,
        b'{"schema": "gpuinfer.report/1"}\n',
        b"1",
    ):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="is no trace"):
            read(path)


def test_places_that_hold_no_file(tmp_path):
    with pytest.raises(UsageError, match="there is no trace"):
        read(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(UsageError, match="cannot be read"):
            read(place)


def test_another_version_is_named(tmp_path):
    path = written(tmp_path / "trace.jsonl", header={**HEADER, "schema": "gpuinfer.trace/2"})
    with pytest.raises(UsageError, match=r"gpuinfer\.trace/2.*reads gpuinfer\.trace/1"):
        read(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"engines": -1},
        {"engines": 10**9},
        {"engines": "1"},
        {"limits": [0, 1, None]},
        {"limits": [1, 1]},
        {"limits": [10**400, 1, None]},
        {"limits": [1, 10**9, None]},
        {"limits": [1, 1, ""]},
        {"limits": 7},
        {"strategy": 7},
        {"started_at": None},
        {"incomplete": -1},
    ],
)
def test_a_header_that_cannot_be_is_refused(tmp_path, wrong):
    with pytest.raises(UsageError, match="line 1 is no header"):
        read(written(tmp_path / "trace.jsonl", header={**HEADER, **wrong}))


@pytest.mark.parametrize(
    "event",
    [
        [],
        ["x", 1.0, 0],
        ["a", 1.0, 0],
        {"a": 1},
        7,
        arrival("soon", 2),
        arrival(-1.0, 2),
        arrival(float("nan"), 2),
        arrival(float("inf"), 2),
        arrival(0.1, 2),  # before the one above
        arrival(1.0, 1),
        arrival(1.0, 2, engine=1),
        arrival(1.0, 2, engine=-1),
        arrival(1.0, 2, engine=0.0),
        arrival(1.0, 2, rows=0),
        arrival(1.0, 2, rows=2**70),
        arrival(1.0, 2, rows=1.5),
        arrival(1.0, 2, rows=True),
        arrival(1.0, 2, priority=3),
        arrival(1.0, 2, priority=-1),
        arrival(1.0, 2, client=7),
        arrival(1.0, 2, client="x" * 500),
        arrival(1.0, 2, left_s=-1),
        arrival(1.0, 2, left_s="1"),
        arrival(1.0, 2, group=["g"]),
        ["c", 1.0, 0, 1, 1, "full", [9]],
        ["c", 1.0, 0, 1, 1, "full", []],
        ["c", 1.0, 0, 1, 1, "full", [1.0]],
        ["c", 1.0, 0, 1, 1, "full", {"1": 1}],
        ["c", 1.0, 0, 1, 1, "mood", [1]],
        ["c", 1.0, 0, 1, -1, "full", [1]],
        ["c", 1.0, 0, 1, 10**400, "full", [1]],
        ["b", 1.0, 0, 1, -1.0],
        ["b", 1.0, 0, "1", 1.0],
        ["s", 1.0, 0, 9, "ok"],
        ["s", 1.0, 0, 1, "great"],
        ["s", 1.0, 0, 1, ["ok"]],
        ["s", 1.0, 0, True, "ok"],
    ],
)
def test_a_line_that_no_recorder_writes_is_refused_with_its_number(tmp_path, event):
    path = tmp_path / "trace.jsonl"
    lines = [HEADER, arrival(0.5), event, ["end", 1.0, {"a": 1, "c": 0, "b": 0, "s": 0}]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UsageError, match="line 3 is"):
        read(path)


def test_a_request_ends_once(tmp_path):
    end = ["s", 1.0, 0, 1, "ok"]
    with pytest.raises(UsageError, match="line 4"):
        read(written(tmp_path / "trace.jsonl", arrival(0.0), end, end))


def test_an_end_that_counts_otherwise_is_refused(tmp_path):
    for counts in ({"a": 2, "c": 0, "b": 0, "s": 0}, {"a": 1}, [], 1):
        with pytest.raises(UsageError, match="counts other events"):
            read(written(tmp_path / "trace.jsonl", arrival(0.0), counts=counts))


def test_one_line_cannot_take_all_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_reader, "LINE_BYTES", 10_000)
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wb") as file:
        file.write(json.dumps(HEADER).encode() + b"\n")
        for _ in range(100):
            file.write(b" " * 100_000)
    with pytest.raises(UsageError, match="line 2 is too long"):
        read(path)


def test_nested_lists_and_long_numbers_are_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    for line in ("[" * 100_000, f'["a",{"9" * 9_000},0]', '["a",1e999,0,1,1,1,null,null,null]'):
        path.write_text(f"{json.dumps(HEADER)}\n{line}\n")
        with pytest.raises(UsageError, match="line 2"):
            read(path)


LITTLE = [HEADER, arrival(0.0), ["c", 0.1, 0, 1, 1, "full", [1]], ["s", 0.2, 0, 1, "ok"], ["b", 0.2, 0, 1, 0.1]]


@given(st.integers(0, 400), st.binary(min_size=1, max_size=3))
@example(0, b"\x1f\x8b")
@settings(max_examples=examples(150), deadline=None)
def test_garbled_bytes_are_refused_or_are_a_trace(tmp_path_factory, place, garbage):
    path = tmp_path_factory.mktemp("garbled") / "trace.jsonl"
    lines = [*LITTLE, ["end", 0.2, {"a": 1, "c": 1, "b": 1, "s": 1}]]
    whole = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(whole[:place] + garbage + whole[place + len(garbage) :])
    outcome = arrivals_or_refusal(path)
    assert outcome == 1 or (str(path) in outcome and len(outcome.splitlines()) <= 3)


def arrivals_or_refusal(path):
    try:
        return len(read(path).arrivals)
    except UsageError as error:
        return str(error)


def test_what_is_behind_the_end_is_refused(tmp_path):
    path = written(tmp_path / "trace.jsonl", arrival(0.0))
    path.write_text(path.read_text() + '["a"]\n')
    with pytest.raises(UsageError, match="behind the end"):
        read(path)


def test_too_many_lines_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_reader, "MOST_LINES", 5)
    with pytest.raises(UsageError, match="too long"):
        read(written(tmp_path / "trace.jsonl", *(arrival(float(number), number) for number in range(10))))
