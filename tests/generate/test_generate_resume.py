"""However a run ends, the next one goes on with it: each row exactly once, answered as without the break."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess

import pytest
from complaints import complaint
from counts import counts
from run_generate import generate, names, prompts, rows_of, started, succeeded, until

COUNT = 5000
WORK = ["--input", "in.jsonl", "--output", "out.jsonl", "--quiet"]
MENDED = {"MENDED": "1"}
COMPLETE = ["in.jsonl", "out.jsonl", "out.jsonl.run.json"]


def written(folder) -> bytes:
    output = folder / "out.jsonl"
    return output.read_bytes() if output.exists() else b""


def early_of(folder) -> list[bytes]:
    """The answers that wait for an earlier one."""
    early = folder / "out.jsonl.early"
    return early.read_bytes().splitlines(keepends=True) if early.exists() else []


def begin_anew(folder) -> None:
    for name in ("out.jsonl", "out.jsonl.run.json"):
        (folder / name).unlink()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The answers of a run that nothing disturbed, in the order of the prompts."""
    folder = tmp_path_factory.mktemp("whole")
    prompts(folder, count=COUNT)
    succeeded(*WORK, "--ordered", cwd=folder)
    return written(folder)


@pytest.mark.parametrize("times", counts(2, 20))
def test_a_run_killed_at_any_moment_is_finished_by_the_next(whole, tmp_path, times):
    moments = random.Random(times)
    for attempt in range(times):
        ordered = ["--ordered"] if attempt % 2 else []
        (folder := tmp_path / str(attempt)).mkdir()
        prompts(folder, count=COUNT)
        size = moments.randrange(len(whole))
        with started(*WORK, *ordered, cwd=folder) as process:
            until(lambda folder=folder, size=size: len(written(folder)) >= size, process)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=60)
        succeeded(*WORK, *ordered, "--resume", cwd=folder)
        assert sorted(written(folder).splitlines()) == sorted(whole.splitlines())
        assert not ordered or written(folder) == whole


def test_answers_that_wait_for_an_earlier_one_are_on_the_disk_however_the_run_ends(tmp_path):
    """The first prompt takes its time: all others are answered before anything may be written."""
    prompts(tmp_path, *({"id": f"r{n}", "prompt": f"p{n}" if n else "sluggish"} for n in range(41)))
    words = [*WORK, "--ordered", "--batch-size", 64, "-B", "max_rows=1"]
    succeeded(*words, cwd=tmp_path)
    whole = written(tmp_path)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        begin_anew(tmp_path)
        os.mkfifo(tmp_path / "held_up")
        with started(*words, cwd=tmp_path, environment={"SLUGGISH": "held_up"}) as process:
            until(lambda: len(early_of(tmp_path)) == 40, process)
            process.send_signal(number)
            said = iter(process.stderr.readline, b"")
            told = any(b"(40 that wait for an earlier one: in out.jsonl.early)" in line for line in said)
            if number != signal.SIGKILL:
                (tmp_path / "held_up").write_bytes(b"")
            process.communicate()
        (tmp_path / "held_up").unlink()
        assert number == signal.SIGKILL or (process.returncode, told) == (3, True)
        assert written(tmp_path) == b""
        succeeded(*words, "--resume", "--json", "report.json", cwd=tmp_path)
        assert json.loads((tmp_path / "report.json").read_text())["progress"]["before"] == 40
        assert (written(tmp_path), early_of(tmp_path)) == (whole, [])


@pytest.mark.thorough
@pytest.mark.parametrize("times", counts(4, 100))
def test_an_ordered_run_broken_off_again_and_again_ends_with_the_same_bytes(tmp_path, times):
    """Each run is ended in one of three ways after some more answers; nothing on the disk is asked again."""

    def done() -> set[bytes]:
        lines = [*written(tmp_path).splitlines(keepends=True), *early_of(tmp_path)]
        return {line for line in lines if line.endswith(b"\n")}

    dice = random.Random(times)
    kinds = ["p", "broken", "bad", "p"]
    prompts(tmp_path, *({"id": f"r{n}", "prompt": dice.choice(kinds) + str(n), "n": 1 + n % 3} for n in range(2000)))
    words = [*WORK, "--ordered", "-B", "delay=0.02", "--batch-size", 16]
    succeeded(*words, cwd=tmp_path)
    whole = written(tmp_path)
    begin_anew(tmp_path)
    for _ in range(times):
        known = done()
        more = len(known) + dice.randrange(1, max(2, 4000 // times))
        with started(*words, "--resume", cwd=tmp_path) as process:
            until(lambda more=more: len(done()) >= more, process)
            process.send_signal(dice.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL]))
            process.communicate()
        assert known <= done()
        assert whole.startswith(written(tmp_path).rpartition(b"\n")[0])
    succeeded(*words, "--resume", cwd=tmp_path)
    assert (written(tmp_path), names(tmp_path)) == (whole, COMPLETE)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_told_to_stop_keeps_what_is_answered_and_says_how_to_go_on(whole, tmp_path, number):
    prompts(tmp_path, count=COUNT)
    with started(*WORK, "--ordered", "-B", "delay=0.4", cwd=tmp_path) as process:
        until(lambda: written(tmp_path), process)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, b"--resume" in errors, b"Traceback" in errors) == (3, True, False), errors
    kept = written(tmp_path)
    assert whole.startswith(kept)
    assert 0 < len(kept) < len(whole)
    succeeded(*WORK, "--ordered", "--resume", cwd=tmp_path)
    assert written(tmp_path) == whole


def test_what_is_done_is_not_asked_again_and_a_torn_end_is_mended(tmp_path):
    prompts(tmp_path, count=50)
    succeeded(*WORK, cwd=tmp_path)
    before = written(tmp_path)
    prompts(tmp_path, count=80)
    succeeded(*WORK, "--resume", "--json", "report.json", cwd=tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["progress"] == {"done": 80, "total": 80, "unit": "rows", "before": 50}
    assert report["errors"]["failed"] == 0
    whole = written(tmp_path)
    assert whole.startswith(before)
    assert {row["id"] for row in rows_of(tmp_path)} == {f"r{number}" for number in range(80)}
    for torn in (b'{"id":"r3","te', b"\0" * 100 + b"\n"):
        (tmp_path / "out.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:3]) + torn)
        succeeded(*WORK, "--resume", cwd=tmp_path)
        assert sorted(written(tmp_path).splitlines()) == sorted(whole.splitlines())


@pytest.mark.parametrize("ordered", [[], ["--ordered"]], ids=["as done", "ordered"])
def test_errors_are_tried_again_on_request_and_take_their_places(tmp_path, ordered):
    prompts(tmp_path, *({"id": n, "prompt": "broken" if n % 3 == 1 else "fine"} for n in range(30)))
    assert "10 of 30 rows ended with an error" in succeeded(*WORK, *ordered, cwd=tmp_path).stderr
    succeeded(*WORK, *ordered, "--resume", cwd=tmp_path)
    assert sum("error" in row for row in rows_of(tmp_path)) == 10
    succeeded(*WORK, *ordered, "--resume", "--retry-errors", cwd=tmp_path, environment=MENDED)
    found = rows_of(tmp_path)
    assert not any("error" in row for row in found)
    ids = [row["id"] for row in found]
    assert (ids if ordered else sorted(ids)) == [*range(30)]
    assert names(tmp_path) == COMPLETE


def test_a_second_try_in_order_that_is_killed_loses_nothing(tmp_path):
    prompts(tmp_path, *({"id": n, "prompt": "broken" if n == 5 else f"fine {n}"} for n in range(COUNT)))
    succeeded(*WORK, "--ordered", cwd=tmp_path)
    before = rows_of(tmp_path)
    again = [*WORK, "--ordered", "--resume", "--retry-errors"]
    for size in (0, 1, len(written(tmp_path)) // 2):
        with started(*again, cwd=tmp_path, environment=MENDED) as process:
            until((tmp_path / "out.jsonl.before").exists, process)
            until((tmp_path / "out.jsonl").exists, process)
            until(lambda size=size: len(written(tmp_path)) >= size, process)
            process.kill()
            process.communicate(timeout=60)
    succeeded(*again, cwd=tmp_path, environment=MENDED)
    after = rows_of(tmp_path)
    assert [row["id"] for row in after] == [*range(COUNT)]
    assert "error" not in after.pop(5)
    assert after == [row for row in before if row["id"] != 5]
    assert names(tmp_path) == COMPLETE


def test_other_settings_are_refused_with_the_difference_where_there_are_answers(tmp_path):
    prompts(tmp_path, *({"id": number, "prompt": "broken"} for number in range(5)))
    assert generate(*WORK, "--temperature", 0.5, cwd=tmp_path).returncode == 1
    corrected = succeeded(*WORK, "--resume", cwd=tmp_path, environment=MENDED)
    assert "held errors alone, of other settings (temperature: 0.5 there, 1.0 here)" in corrected.stderr
    assert [("error" in row, row["id"]) for row in rows_of(tmp_path)] == [(False, n) for n in range(5)]
    changed = generate(*WORK, "--resume", "--temperature", 0.5, "--stop", "x,y", cwd=tmp_path)
    assert changed.returncode == 2
    assert "temperature: 1.0 there, 0.5 here" in complaint(changed)
    assert 'stop: [] there, ["x,y"] here' in complaint(changed)
    other = generate(*WORK, "--resume", cwd=tmp_path, environment={"FINGERPRINT": "other"})
    assert other.returncode == 2
    assert 'model: "abc" there, "other" here' in complaint(other)
    (tmp_path / "out.jsonl.run.json").unlink()
    assert "does not say how" in complaint(generate(*WORK, "--resume", cwd=tmp_path))
    assert names(tmp_path) == ["in.jsonl", "out.jsonl"]


def test_a_run_that_ends_before_its_first_answer_leaves_nothing_behind(tmp_path):
    note = tmp_path / "out.jsonl.run.json"
    with started("--input", "-", "--output", "out.jsonl", cwd=tmp_path) as process:
        until(lambda: note.exists() and note.stat().st_size, process)
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read()  # its input stays open: it ends by the signal alone
        assert process.wait(60) == 3, errors
    assert names(tmp_path) == []


def test_rows_that_the_input_has_no_more_keep_their_answers_once(tmp_path):
    prompts(tmp_path, count=5)
    succeeded(*WORK, "--ordered", cwd=tmp_path)
    lines = written(tmp_path).splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_bytes(lines[0])
    (tmp_path / "out.jsonl.early").write_bytes(b"".join(lines[2:]) + b'{"id":"torn')
    prompts(tmp_path, count=3)
    succeeded(*WORK, "--ordered", "--resume", cwd=tmp_path)
    assert written(tmp_path) == b"".join(lines)


def test_two_runs_do_not_share_an_output(tmp_path):
    prompts(tmp_path, count=5)
    with started("--input", "-", "--output", "out.jsonl", cwd=tmp_path) as process:
        until((tmp_path / "out.jsonl").exists, process)
        second = generate(*WORK, "--resume", cwd=tmp_path)
        process.communicate(b'"a"\n', timeout=60)
    assert (second.returncode, process.returncode) == (2, 0)
    assert "another run" in complaint(second)


def test_a_full_disk_ends_the_run_with_the_cure_and_leaves_whole_lines(whole, tmp_path):
    prompts(tmp_path, count=COUNT)
    room = 100_003
    done = generate(*WORK, "--ordered", cwd=tmp_path, limit=room)
    assert done.returncode == 1
    assert "Free some space, then run again with --resume" in complaint(done)
    kept = written(tmp_path)
    assert whole.startswith(kept)
    assert kept.endswith(b"\n")
    assert room - 1000 < len(kept) <= room
    succeeded(*WORK, "--ordered", "--resume", cwd=tmp_path)
    assert written(tmp_path) == whole
    device = generate("--input", "in.jsonl", "--output", "/dev/full", cwd=tmp_path)
    assert device.returncode == 1
    assert "/dev/full" in complaint(device)


@pytest.mark.parametrize("ordered", [(), ("--ordered",)], ids=["as done", "ordered"])
@pytest.mark.parametrize("harm", ["file removed", "folder removed", "file replaced", "folder moved"])
def test_a_file_that_is_taken_away_in_mid_run_is_not_called_done(tmp_path, harm, ordered):
    prompts(tmp_path, *({"id": f"r{n}", "prompt": "sluggish" if n == 40 else f"p{n}"} for n in range(41)))
    folder, elsewhere = tmp_path / "answers", tmp_path / "elsewhere"
    folder.mkdir()
    out = folder / "out.jsonl"
    os.mkfifo(tmp_path / "held_up")
    words = ["--input", "in.jsonl", "--output", out, *ordered, "--batch-size", 64, "-B", "max_rows=1"]
    with started(*words, cwd=tmp_path, environment={"SLUGGISH": "held_up"}) as process:
        until(lambda: written(folder).count(b"\n") == 40, process)
        if harm == "folder removed":
            shutil.rmtree(folder)
        elif harm == "folder moved":
            folder.rename(elsewhere)
            folder.mkdir()
        else:
            out.unlink()
            if harm == "file replaced":
                out.write_text("another's\n")
        (tmp_path / "held_up").write_bytes(b"")
        said, errors = process.communicate(timeout=240)
    assert process.returncode == 1, (said, errors)
    told = complaint(subprocess.CompletedProcess(words, 1, said.decode(), errors.decode()))
    if harm == "folder moved":
        kept = elsewhere / "out.jsonl"
        assert "was moved while answers were written to it" in told
        assert f"the answers are in {kept}. What was answered before is kept." in told
        assert kept.read_bytes().count(b"\n") >= 40
        folder.rmdir()
        elsewhere.rename(folder)
        succeeded(*words, "--resume", cwd=tmp_path)
        assert len(rows_of(folder)) == 41
        return
    assert "was removed while answers were written to it" in told
    assert "They are lost" in told
    assert ("another file lies there now" in told) == (harm == "file replaced")
    assert "is kept" not in told
    assert harm != "file replaced" or out.read_text() == "another's\n"
