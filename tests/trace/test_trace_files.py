"""What engines record is what is read, of one or several, whole or killed; all else is refused with the cure."""

from __future__ import annotations

import gzip
import json
import logging
import os
import stat

import pytest
from counts import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from playing import START, check_trace, record_little, recorder, request

from gpuinfer.api import Limits, Priority, Reason
from gpuinfer.engine import trace_merge, trace_reader
from gpuinfer.engine.trace_merge import Merged, merge_trace, prepare_trace, recording
from gpuinfer.engine.trace_reader import Arrival, CutRecord, RanRecord, Settle, read
from gpuinfer.engine.trace_recorder import OUTCOMES, TEXT_CHARS, trace_parts
from gpuinfer.errors import UsageError, WorkError

HEADER = {
    "schema": "gpuinfer.trace/1",
    "started_at": "2026-01-01T00:00:00+00:00",
    "gpuinfer": "0.1.0",
    "strategy": None,
    "engines": 1,
    "limits": None,
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.jsonl"


def merged(path, *engines):
    """The trace that these engines, which have recorded, leave."""
    for engine in engines:
        engine.close()
    merge_trace(path)
    return read(path)


def text_of(*lines):
    return "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)


def arrival(at, number=1, *, engine=0, rows=1, priority=1, client=None, left_s=None, group=None):
    return ["a", at, engine, number, rows, priority, client, left_s, group]


def end(**counts):
    return ["end", 1.0, {"a": 1, "c": 0, "b": 0, "s": 0, **counts}]


ONE, OK = arrival(0.5), ["s", 1.0, 0, 1, "ok"]
HEADERS = [
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
]
EVENTS = [
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
    "[" * 100_000 + "\n",
    f'["a",{"9" * 9_000},0]\n',
    '["a",1e999,0,1,1,1,null,null,null]\n',
]
NO_TRACES = ["", "\n", "[]", "{}\n", "\x00\xff\n", "[" * 9_000, '{"schema": "gpuinfer.report/1"}\n', "1"]
WRONG = [
    *((text, "is no trace") for text in NO_TRACES),
    (text_of({**HEADER, "schema": "gpuinfer.trace/2"}, end(a=0)), r"gpuinfer\.trace/2.*reads gpuinfer\.trace/1"),
    *((text_of({**HEADER, **wrong}, end(a=0)), "line 1 is no header") for wrong in HEADERS),
    *((text_of(HEADER, ONE, event, end()), "line 3 is") for event in EVENTS),
    (text_of(HEADER, ONE, OK, OK, end(s=2)), "line 4"),
    *((text_of(HEADER, ONE, end(**counts)), "counts other events") for counts in ({"a": 2}, {"c": 1})),
    *((text_of(HEADER, ONE, ["end", 1.0, counts]), "counts other events") for counts in ({"a": 1}, [], 1)),
    (text_of(HEADER, ONE, end(), '["a"]\n'), "behind the end"),
    (text_of(HEADER, *(arrival(float(number), number) for number in range(20)), end(a=20)), "too long"),
    (text_of(HEADER, " " * 200_000), "line 2 is too long"),
]


@pytest.mark.parametrize(("text", "said"), WRONG, ids=range(len(WRONG)))
def test_what_no_recorder_writes_is_refused_with_the_number_of_its_line(path, monkeypatch, text, said):
    monkeypatch.setattr(trace_reader, "MOST_LINES", 15)
    monkeypatch.setattr(trace_reader, "LINE_BYTES", 150_000)
    for name in (path, path.with_suffix(".gz")):
        name.write_bytes(text.encode() if name == path else gzip.compress(text.encode()))
        with pytest.raises(UsageError, match=said):
            read(name)


def test_places_that_hold_no_file_are_neither_read_nor_written(tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")
    for place, said in {tmp_path / "none": "there is no trace", tmp_path: "cannot be", pipe: "cannot be"}.items():
        with pytest.raises(UsageError, match=said):
            read(place)
    with pytest.raises(UsageError, match="cannot be read"):
        read("/dev/zero")
    places = {tmp_path: "folder", tmp_path / "no" / "t": "mkdir -p", pipe: "no plain file"}
    places[tmp_path / ("x" * 250)] = "name"
    for place, said in places.items():
        with pytest.raises(UsageError, match=said), recording(str(place)):
            pass


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_trace_cut_off_at_any_byte_is_refused(tmp_path, name):
    path = tmp_path / name
    record_little(path, batches=1)
    merge_trace(path)
    whole = path.read_bytes()
    most = len(whole) - (name == "trace.jsonl")  # the newline at the very end is no loss
    for size in range(most):
        path.write_bytes(whole[:size])
        with pytest.raises(UsageError, match="trace"):
            read(path)
    path.write_bytes(whole[:most])
    assert len(read(path).arrivals) == 2


LITTLE = [HEADER, arrival(0.0), ["c", 0.1, 0, 1, 1, "full", [1]], ["s", 0.2, 0, 1, "ok"], ["b", 0.2, 0, 1, 0.1]]


@given(st.integers(0, 400), st.binary(min_size=1, max_size=3))
@example(0, b"\x1f\x8b")
@settings(max_examples=examples(150), deadline=None)
def test_garbled_bytes_are_refused_or_are_a_trace(tmp_path_factory, place, garbage):
    path = tmp_path_factory.mktemp("garbled") / "trace.jsonl"
    whole = text_of(*LITTLE, end(c=1, b=1, s=1)).encode()
    path.write_bytes(whole[:place] + garbage + whole[place + len(garbage) :])
    try:
        outcome = len(read(path).arrivals)
    except UsageError as error:
        outcome = str(error)
    assert outcome == 1 or (str(path) in outcome and len(outcome.splitlines()) <= 3)


def test_a_trace_says_all_that_the_engine_was_told(path):
    record_little(path, batches=1)
    modes = [stat.S_IMODE(part.stat().st_mode) for part in trace_parts(path)]
    assert merge_trace(path) == Merged(path, requests=2, incomplete=0)
    assert [*modes, stat.S_IMODE(path.stat().st_mode)] == [0o600, 0o600]  # its owner alone may read it
    trace = read(path)
    header = trace.header
    assert (header.strategy, header.engines, header.limits, header.incomplete) == ("dynamic", 1, Limits(64, 2), 0)
    assert trace.arrivals == [
        Arrival(0.0, 3, Priority.HIGH, "('a', 1)", 0.5, "big", 0, 1),
        Arrival(0.001, 1, Priority.NORMAL, "zoë", None, None, 0, 2),
    ]
    assert trace.cuts == [CutRecord(0.002, 1, 4, Reason.CLIENTS, [1, 2], 0)]
    assert trace.settles == [Settle(0.005, 1, "ok", 0), Settle(0.005, 2, "failed", 0)]
    assert trace.batches == [RanRecord(0.006, 1, 0.0025, 0)]
    packed = path.with_suffix(".jsonl.gz")
    record_little(packed, batches=1)
    assert merged(packed).settles == trace.settles
    assert gzip.decompress(packed.read_bytes()).splitlines()[1:] == path.read_bytes().splitlines()[1:]
    assert trace_parts(path) == trace_parts(packed) == []


def test_odd_clients_and_rows_and_what_comes_late(path):
    class Shy:
        def __str__(self):
            raise RuntimeError

    one = recorder(path)
    for client in ("x" * 10_000, Shy()):
        one.arrived(request(client=client))
    for rows in (0, -3, 2**60):  # that cannot be: not recorded
        one.arrived(odd := request(rows=rows))
        one.settled(odd, "rejected", START)
    one.arrived(early := request(0.0))
    batch = one.cut([early], 1, Reason.FREE, START + 0.1)
    one.arrived(request(1.0))
    one.ran(batch, 0.4, START + 0.5)
    trace = merged(path, one)
    assert [each.client for each in trace.arrivals] == ["x" * TEXT_CHARS, "Shy", None, None]
    assert (trace.batches[0].at, trace.arrivals[-1].at) == (0.5, 1.0)
    assert path.read_text().splitlines()[5].startswith('["b",')


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),  # the engine
        st.sampled_from(["arrive", "cut", "settle"]),
        st.integers(0, 2_000_000),  # microseconds since the step before
        st.integers(1, 9),
        st.sampled_from([None, 0.25]),
    ),
    max_size=60,
)


def check_round_trip(folder, steps):
    """Play these steps, and compare what is read with what was done."""
    path = folder / "trace.jsonl"
    engines = [recorder(path) for _ in range(3)]
    waiting, serving = ([[] for _ in engines] for _ in range(2))
    arrived, cut, settled, micros = [], [], [], 0
    for engine, what, step, rows, left_s in steps:
        micros += step
        now = START + micros / 1e6
        if what == "arrive":
            engines[engine].arrived(one := request(micros / 1e6, rows, left_s=left_s or 1e12))
            waiting[engine].append(one)
            arrived.append((engine, rows, left_s))
        elif what == "cut" and waiting[engine]:
            batch, waiting[engine] = waiting[engine], []
            engines[engine].cut(batch, len(batch), Reason.WAITED, now)
            serving[engine] += batch
            cut.append((engine, len(batch)))
        elif what == "settle" and serving[engine]:
            outcome = OUTCOMES[rows % len(OUTCOMES)]
            engines[engine].settled(serving[engine].pop(), outcome, now)
            settled.append((engine, outcome))
    trace = merged(path, *engines)
    opened = list(dict.fromkeys(engine for engine, *_ in arrived))  # they are numbered as they first write
    assert in_turn((opened[one.engine], one.rows, one.left_s) for one in trace.arrivals) == in_turn(arrived)
    assert in_turn((opened[one.engine], len(one.ids)) for one in trace.cuts) == in_turn(cut)
    assert in_turn((opened[one.engine], one.outcome) for one in trace.settles) == in_turn(settled)
    check_trace(trace)


def in_turn(events):
    """Engine by engine: what two do in one microsecond has no order."""
    return sorted(events, key=lambda event: event[0])


@given(STEPS)
@settings(max_examples=examples(40), deadline=None)
def test_whatever_engines_do_is_read_again(tmp_path_factory, steps):
    check_round_trip(tmp_path_factory.mktemp("trip"), steps)


@pytest.mark.soak
@given(STEPS)
@settings(max_examples=2000, deadline=None)
def test_whatever_engines_do_is_read_again_many_times(tmp_path_factory, steps):
    check_round_trip(tmp_path_factory.mktemp("trip"), steps)


def test_a_part_cut_off_at_any_byte_gives_a_trace_of_what_is_whole(path):
    record_little(path, batches=1)
    (part,) = trace_parts(path)
    whole, seen = part.read_bytes(), set()
    for size in range(len(whole)):
        part.write_bytes(whole[:size])
        incomplete, trace = merge_trace(path).incomplete, read(path)
        check_trace(trace)
        lines = whole[:size].count(b"\n")
        events = sum(map(len, (trace.arrivals, trace.cuts, trace.batches, trace.settles)))
        assert events == max(0, lines - 1)
        assert trace.header.incomplete == incomplete == trace.header.engines == (lines > 0)
        seen.add(events)
    assert seen == set(range(7))


def test_a_killed_engine_leaves_those_of_others_whole(path):
    record_little(path)
    record_little(path)
    first, _ = trace_parts(path)
    os.truncate(first, first.stat().st_size - 20)
    trace = merged(path)
    assert (trace.header.engines, trace.header.incomplete) == (2, 1)
    assert max(sum(one.engine == number for one in trace.settles) for number in (0, 1)) == 6
    check_trace(trace)


def test_a_recorder_that_finds_no_room_says_so_once_and_raises_nothing(tmp_path, caplog):
    one = recorder(tmp_path / "gone" / "trace.jsonl")
    with caplog.at_level(logging.WARNING, "gpuinfer"):
        for number in range(2000):
            one.arrived(request(number))
        one.close()
    assert len([record for record in caplog.records if "the trace ends here" in record.getMessage()]) == 1


def test_leftovers_of_a_crashed_run_are_taken_away_and_an_old_trace_and_other_files_stay(tmp_path, path):
    record_little(path, batches=2)
    merge_trace(path)
    record_little(path)
    (notes := tmp_path / ".trace.jsonl.notes.part").write_text("of somebody")
    prepare_trace(path)
    assert (trace_parts(path), len(read(path).cuts), notes.exists()) == ([], 2, True)
    record_little(secret := tmp_path / "secret")
    (other,) = trace_parts(secret)
    (tmp_path / ".trace.jsonl.1.0.part").symlink_to(other)  # is not followed
    assert (merge_trace(path).requests, other.exists()) == (0, True)


@pytest.mark.parametrize("locks", [True, False])
def test_a_second_run_is_kept_from_the_file_of_the_first_where_files_can_be_locked(path, monkeypatch, locks):
    def unable(*_):
        raise OSError(95, "Operation not supported")

    if not locks:
        monkeypatch.setattr(trace_merge.fcntl, "flock", unable)
    with recording(str(path)):
        record_little(path)
        if locks:
            with pytest.raises(UsageError, match="another run records to this file"), recording(str(path)):
                pass
    assert len(read(path).arrivals) == 6
    with recording(str(path)):
        pass
    assert list(path.parent.iterdir()) == [path]


def test_a_trace_that_cannot_be_written_at_the_end_keeps_its_parts(path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    record_little(path)
    monkeypatch.setattr(trace_merge, "_write_lines", full)
    with pytest.raises(WorkError, match="No space left"):
        merge_trace(path)
    monkeypatch.undo()
    assert not path.exists()
    assert merge_trace(path).requests == 6
