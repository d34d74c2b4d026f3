"""What engines record is what is read: one of them or several, whole or killed."""

from __future__ import annotations

import gzip
import logging
import os
import stat

import pytest
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from playing import START, check_trace, record_little, recorder, request

from gpuinfer.api import Limits, Priority, Reason
from gpuinfer.engine import trace_merge, trace_recorder
from gpuinfer.engine.trace_merge import prepare_trace, recording
from gpuinfer.engine.trace_reader import Arrival, CutRecord, RanRecord, Settle, read
from gpuinfer.errors import UsageError, WorkError


def parts(path):
    return trace_recorder.trace_parts(path)


def test_a_trace_says_all_that_the_engine_was_told(tmp_path):
    path = tmp_path / "trace.jsonl"
    record_little(path, batches=1)
    assert trace_merge.merge_trace(path) == trace_merge.Merged(path, requests=2, incomplete=0)
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
    assert parts(path) == []


def test_a_name_that_ends_in_gz_is_packed(tmp_path):
    plain, packed = tmp_path / "trace.jsonl", tmp_path / "trace.jsonl.gz"
    for path in (plain, packed):
        record_little(path)
        trace_merge.merge_trace(path)
    lines = gzip.decompress(packed.read_bytes()).splitlines()[1:]
    assert lines == plain.read_bytes().splitlines()[1:]
    assert read(packed).settles == read(plain).settles


def test_long_names_are_cut_off_and_those_that_cannot_be_shown_are_named_by_their_kind(tmp_path):
    class Shy:
        def __str__(self):
            raise RuntimeError

    path = tmp_path / "trace.jsonl"
    one = recorder(path)
    for client in ("x" * 10_000, Shy()):
        one.arrived(request(client=client))
    one.close()
    trace_merge.merge_trace(path)
    assert [arrival.client for arrival in read(path).arrivals] == ["x" * trace_recorder.TEXT_CHARS, "Shy"]


@pytest.mark.parametrize("rows", [0, -3, 2**60])
def test_a_request_of_rows_that_cannot_be_is_not_recorded(tmp_path, rows):
    path = tmp_path / "trace.jsonl"
    one, odd = recorder(path), request(rows=rows)
    one.arrived(odd)
    one.settled(odd, "rejected", START)
    one.close()
    trace_merge.merge_trace(path)
    assert read(path).arrivals == []


def test_what_is_told_late_stands_in_its_place(tmp_path):
    path = tmp_path / "trace.jsonl"
    one, early, late = recorder(path), request(0.0), request(1.0)
    one.arrived(early)
    batch = one.cut([early], 1, Reason.FREE, START + 0.1)
    one.arrived(late)
    one.ran(batch, 0.4, START + 0.5)
    one.close()
    trace_merge.merge_trace(path)
    trace = read(path)
    assert (trace.batches[0].at, trace.arrivals[1].at) == (0.5, 1.0)
    assert path.read_text().splitlines()[3].startswith('["b",')


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
    waiting = [[] for _ in engines]
    serving = [[] for _ in engines]
    arrived, cut, settled, micros = [], [], [], 0
    for engine, what, step, rows, left_s in steps:
        micros += step
        now = START + micros / 1e6
        if what == "arrive":
            one = request(micros / 1e6, rows, left_s=left_s or 1e12)
            engines[engine].arrived(one)
            waiting[engine].append(one)
            arrived.append((engine, rows, left_s))
        elif what == "cut" and waiting[engine]:
            batch, waiting[engine] = waiting[engine], []
            engines[engine].cut(batch, len(batch), Reason.WAITED, now)
            serving[engine] += batch
            cut.append((engine, len(batch)))
        elif what == "settle" and serving[engine]:
            outcome = trace_recorder.OUTCOMES[rows % len(trace_recorder.OUTCOMES)]
            engines[engine].settled(serving[engine].pop(), outcome, now)
            settled.append((engine, outcome))
    for one in engines:
        one.close()
    merged = trace_merge.merge_trace(path)
    trace = read(path)
    assert merged.requests == len(arrived)
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


# Ends that come too soon


def test_a_part_cut_off_at_any_byte_gives_a_trace_of_what_is_whole(tmp_path):
    path = tmp_path / "trace.jsonl"
    record_little(path, batches=1)
    (part,) = parts(path)
    whole, name = part.read_bytes(), part
    seen = set()
    for size in range(len(whole)):
        name.write_bytes(whole[:size])
        merged = trace_merge.merge_trace(path)
        trace = read(path)
        check_trace(trace)
        lines = whole[:size].count(b"\n")
        events = sum(map(len, (trace.arrivals, trace.cuts, trace.batches, trace.settles)))
        assert events == max(0, lines - 1)
        assert trace.header.incomplete == merged.incomplete == trace.header.engines == (lines > 0)
        seen.add(events)
    assert seen == set(range(7))


def test_a_killed_engine_leaves_those_of_others_whole(tmp_path):
    path = tmp_path / "trace.jsonl"
    record_little(path)
    record_little(path)
    first, _ = parts(path)
    os.truncate(first, first.stat().st_size - 20)
    trace_merge.merge_trace(path)
    trace = read(path)
    assert (trace.header.engines, trace.header.incomplete) == (2, 1)
    assert sum(one.engine == 1 for one in trace.settles) == 6 - sum(one.engine == 0 for one in trace.settles) + 6
    check_trace(trace)


def test_a_recorder_that_finds_no_room_says_so_once_and_raises_nothing(tmp_path, caplog):
    one = recorder(tmp_path / "gone" / "trace.jsonl")
    with caplog.at_level(logging.WARNING, "gpuinfer"):
        for number in range(2000):
            one.arrived(request(number))
        one.close()
    assert len([record for record in caplog.records if "the trace ends here" in record.getMessage()]) == 1


# The file


def test_leftovers_of_a_crashed_run_are_taken_away_and_an_old_trace_stays(tmp_path):
    path = tmp_path / "trace.jsonl"
    record_little(path, batches=2)
    trace_merge.merge_trace(path)
    record_little(path)
    (tmp_path / ".trace.jsonl.notes.part").write_text("of somebody")
    prepare_trace(path)
    assert parts(path) == []
    assert len(read(path).cuts) == 2
    assert (tmp_path / ".trace.jsonl.notes.part").exists()


def test_a_link_in_the_place_of_a_part_is_not_followed(tmp_path):
    path, secret = tmp_path / "trace.jsonl", tmp_path / "secret"
    record_little(secret)
    (other,) = parts(secret)
    (tmp_path / ".trace.jsonl.1.0.part").symlink_to(other)
    assert trace_merge.merge_trace(path).requests == 0
    assert other.exists()


def test_places_that_cannot_be_written_are_refused_with_the_cure(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    cases = {
        tmp_path: "folder",
        tmp_path / "no" / "t": "mkdir -p",
        pipe: "no plain file",
        tmp_path / ("x" * 250): "name",
    }
    for path, word in cases.items():
        with pytest.raises(UsageError, match=word):
            prepare_trace(path)
        with pytest.raises(UsageError, match=word), recording(str(path)):
            pass


def test_a_second_run_is_kept_from_the_file_of_the_first(tmp_path):
    path = tmp_path / "trace.jsonl"

    def second():
        with recording(str(path)):
            pass

    with recording(str(path)):
        record_little(path)
        with pytest.raises(UsageError, match="another run records to this file"):
            second()
    assert len(read(path).arrivals) == 6
    second()
    assert list(tmp_path.iterdir()) == [path]


def test_where_files_cannot_be_locked_a_trace_is_recorded_all_the_same(tmp_path, monkeypatch):
    def unable(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(trace_merge.fcntl, "flock", unable)
    with recording(str(tmp_path / "trace.jsonl")):
        record_little(tmp_path / "trace.jsonl")
    assert len(read(tmp_path / "trace.jsonl").arrivals) == 6


def test_a_trace_that_cannot_be_written_at_the_end_keeps_its_parts(tmp_path, monkeypatch):
    path = tmp_path / "trace.jsonl"

    def full(*_):
        raise OSError(28, "No space left on device")

    record_little(path)
    monkeypatch.setattr(trace_merge, "_write_lines", full)
    with pytest.raises(WorkError, match="No space left"):
        trace_merge.merge_trace(path)
    monkeypatch.undo()
    assert not path.exists()
    assert trace_merge.merge_trace(path).requests == 6


def test_only_its_owner_may_read_a_trace_and_its_parts(tmp_path):
    path = tmp_path / "trace.jsonl"
    record_little(path)
    modes = [stat.S_IMODE(part.stat().st_mode) for part in parts(path)]
    trace_merge.merge_trace(path)
    assert [*modes, stat.S_IMODE(path.stat().st_mode)] == [0o600, 0o600]
