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
from run_generate import generate, prompts, rows_of, started, until

COUNT = 5000
WORK = ["--input", "in.jsonl", "--output", "out.jsonl", "--quiet"]


def counts(small: int, full: int) -> list[object]:
    soak = [pytest.mark.soak, pytest.mark.timeout(3600)]
    return [pytest.param(small, id=f"{small}"), pytest.param(full, id=f"{full}", marks=soak)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The answers of a run that nothing disturbed, in the order of the prompts."""
    folder = tmp_path_factory.mktemp("whole")
    prompts(folder / "in.jsonl", COUNT)
    done = generate(*WORK, "--ordered", cwd=folder)
    assert done.returncode == 0, done.stderr
    return (folder / "out.jsonl").read_bytes()


@pytest.mark.parametrize("times", counts(3, 20))
def test_a_run_killed_at_any_moment_is_finished_by_the_next(whole, tmp_path, times):
    moments = random.Random(times)
    for attempt in range(times):
        ordered = ["--ordered"] if attempt % 2 else []
        folder = tmp_path / str(attempt)
        folder.mkdir()
        prompts(folder / "in.jsonl", COUNT)
        killed_after(folder, moments.randrange(len(whole)), *ordered)
        done = generate(*WORK, *ordered, "--resume", cwd=folder)
        assert done.returncode == 0, done.stderr
        lines = (folder / "out.jsonl").read_bytes().splitlines(keepends=True)
        assert sorted(lines) == sorted(whole.splitlines(keepends=True))
        if ordered:
            assert b"".join(lines) == whole


def early_of(folder) -> list[bytes]:
    """The answers that wait for an earlier one."""
    early = folder / "out.jsonl.early"
    return early.read_bytes().splitlines(keepends=True) if early.exists() else []


def test_answers_that_wait_for_an_earlier_one_are_on_the_disk_however_the_run_ends(tmp_path):
    """The first prompt takes its time: all others are answered before anything may be written."""
    rows = [{"id": f"r{number}", "prompt": "sluggish" if number == 0 else f"p{number}"} for number in range(41)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [*WORK, "--ordered", "--batch-size", 64, "-B", "max_rows=1"]
    assert generate(*words, cwd=tmp_path).returncode == 0
    whole = (tmp_path / "out.jsonl").read_bytes()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        for name in ("out.jsonl", "out.jsonl.run.json"):
            (tmp_path / name).unlink()
        os.mkfifo(tmp_path / "held_up")
        with started(*words, cwd=tmp_path, environment={"SLUGGISH": "held_up"}) as process:
            until(lambda: len(early_of(tmp_path)) == 40, process)
            process.send_signal(number)
            lines = iter(process.stderr.readline, b"")
            told = any(b"(40 that wait for an earlier one: in out.jsonl.early)" in line for line in lines)
            if number != signal.SIGKILL:
                (tmp_path / "held_up").write_bytes(b"")
            process.communicate()
        (tmp_path / "held_up").unlink()
        if number != signal.SIGKILL:
            assert process.returncode == 3
            assert told
        assert (tmp_path / "out.jsonl").read_bytes() == b""
        done = generate(*words, "--resume", "--json", "report.json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / "report.json").read_text())["progress"]["before"] == 40
        assert (tmp_path / "out.jsonl").read_bytes() == whole
        assert not (tmp_path / "out.jsonl.early").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("times", counts(4, 100))
def test_an_ordered_run_broken_off_again_and_again_ends_with_the_same_bytes(tmp_path, times):
    """Each run is ended in one of three ways after some more answers; nothing that lay on the disk is asked again."""
    dice = random.Random(times)
    rows = [
        {"id": f"r{n}", "prompt": ["p", "broken", "bad", "p"][dice.randrange(4)] + str(n), "n": 1 + n % 3}
        for n in range(2000)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [*WORK, "--ordered", "-B", "delay=0.02", "--batch-size", 16]
    assert generate(*words, cwd=tmp_path).returncode == 0
    whole = (tmp_path / "out.jsonl").read_bytes()
    for name in ("out.jsonl", "out.jsonl.run.json"):
        (tmp_path / name).unlink()
    for _ in range(times):
        known = done_of(tmp_path)
        more = len(known) + dice.randrange(1, max(2, 4000 // times))
        with started(*words, "--resume", cwd=tmp_path) as process:
            until(lambda more=more: len(done_of(tmp_path)) >= more, process)
            process.send_signal(dice.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL]))
            process.communicate()
        assert known <= done_of(tmp_path)
        assert whole.startswith((tmp_path / "out.jsonl").read_bytes().rpartition(b"\n")[0])
    assert generate(*words, "--resume", cwd=tmp_path).returncode == 0
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.run.json"]


def done_of(folder) -> set[bytes]:
    """All lines that lie on the disk."""
    output = folder / "out.jsonl"
    lines = output.read_bytes().splitlines(keepends=True) if output.exists() else []
    return {line for line in [*lines, *early_of(folder)] if line.endswith(b"\n")}


def killed_after(folder, size: int, *words: str) -> None:
    """Run until so many bytes are written, and kill it with all it started."""
    with started(*WORK, *words, cwd=folder) as process:
        output = folder / "out.jsonl"
        until(lambda: output.exists() and output.stat().st_size >= size, process)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_told_to_stop_keeps_what_is_answered_and_says_how_to_go_on(whole, tmp_path, number):
    prompts(tmp_path / "in.jsonl", COUNT)
    with started(*WORK, "--ordered", "-B", "delay=0.4", cwd=tmp_path) as process:
        output = tmp_path / "out.jsonl"
        until(lambda: output.exists() and output.stat().st_size, process)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 3, errors
    assert b"Traceback" not in errors
    assert b"--resume" in errors
    kept = (tmp_path / "out.jsonl").read_bytes()
    assert whole.startswith(kept)
    assert 0 < len(kept) < len(whole)
    assert generate(*WORK, "--ordered", "--resume", cwd=tmp_path).returncode == 0
    assert (tmp_path / "out.jsonl").read_bytes() == whole


def test_what_is_done_is_not_asked_again(tmp_path):
    prompts(tmp_path / "in.jsonl", 50)
    assert generate(*WORK, cwd=tmp_path).returncode == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    prompts(tmp_path / "in.jsonl", 80)
    again = generate(*WORK, "--resume", "--json", "report.json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["progress"] == {"done": 80, "total": 80, "unit": "rows", "before": 50}
    assert report["errors"]["failed"] == 0
    assert (tmp_path / "out.jsonl").read_bytes().startswith(before)
    assert {row["id"] for row in rows_of(tmp_path / "out.jsonl")} == {f"r{number}" for number in range(80)}


@pytest.mark.parametrize("torn", [b'{"id":"r3","te', b"\0" * 100 + b"\n"])
def test_a_torn_end_is_mended(tmp_path, torn):
    prompts(tmp_path / "in.jsonl", 5)
    assert generate(*WORK, cwd=tmp_path).returncode == 0
    expected = rows_of(tmp_path / "out.jsonl")
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_bytes(b"".join(lines[:3]) + torn)
    assert generate(*WORK, "--resume", cwd=tmp_path).returncode == 0
    assert sorted(rows_of(tmp_path / "out.jsonl"), key=str) == sorted(expected, key=str)


@pytest.mark.parametrize("ordered", [[], ["--ordered"]], ids=["as done", "ordered"])
def test_errors_are_tried_again_on_request_and_take_their_places(tmp_path, ordered):
    rows = [{"id": f"r{number}", "prompt": "broken" if number % 3 == 1 else "fine"} for number in range(30)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = generate(*WORK, *ordered, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "10 of 30 rows ended with an error" in first.stderr
    assert generate(*WORK, *ordered, "--resume", cwd=tmp_path).returncode == 0
    assert sum("error" in row for row in rows_of(tmp_path / "out.jsonl")) == 10
    mended = {"MENDED": "1"}
    again = generate(*WORK, *ordered, "--resume", "--retry-errors", cwd=tmp_path, environment=mended)
    assert again.returncode == 0, again.stderr
    found = rows_of(tmp_path / "out.jsonl")
    assert not any("error" in row for row in found)
    ids = [row["id"] for row in found]
    assert (ids if ordered else sorted(ids, key=lambda one: int(one[1:]))) == [f"r{number}" for number in range(30)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.run.json"]


def test_a_second_try_in_order_that_is_killed_loses_nothing(tmp_path):
    rows = [{"id": f"r{number}", "prompt": "broken" if number == 5 else f"fine {number}"} for number in range(5000)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert generate(*WORK, "--ordered", cwd=tmp_path).returncode == 0
    before = rows_of(tmp_path / "out.jsonl")
    mended = {"MENDED": "1"}
    again = [*WORK, "--ordered", "--resume", "--retry-errors"]
    before_its_end = (tmp_path / "out.jsonl").stat().st_size // 2
    for size in (0, 1, before_its_end):
        with started(*again, cwd=tmp_path, environment=mended) as process:
            until((tmp_path / "out.jsonl.before").exists, process)
            until((tmp_path / "out.jsonl").exists, process)
            until(lambda size=size: (tmp_path / "out.jsonl").stat().st_size >= size, process)
            process.kill()
            process.communicate(timeout=60)
    done = generate(*again, cwd=tmp_path, environment=mended)
    assert done.returncode == 0, done.stderr
    after = rows_of(tmp_path / "out.jsonl")
    assert [row["id"] for row in after] == [row["id"] for row in rows]
    assert not any("error" in row for row in after)
    assert [row for row in after if row["id"] != "r5"] == [row for row in before if row["id"] != "r5"]
    assert not (tmp_path / "out.jsonl.before").exists()


def test_other_settings_are_refused_with_the_difference(tmp_path):
    prompts(tmp_path / "in.jsonl", 5)
    assert generate(*WORK, cwd=tmp_path).returncode == 0
    changed = generate(*WORK, "--resume", "--temperature", 0.5, "--stop", "x,y", cwd=tmp_path)
    assert changed.returncode == 2
    assert "temperature: 1.0 there, 0.5 here" in complaint(changed)
    assert 'stop: [] there, ["x,y"] here' in complaint(changed)
    other = generate(*WORK, "--resume", cwd=tmp_path, environment={"FINGERPRINT": "other"})
    assert other.returncode == 2
    assert 'model: "abc" there, "other" here' in complaint(other)
    (tmp_path / "out.jsonl.run.json").unlink()
    assert "does not say how" in complaint(generate(*WORK, "--resume", cwd=tmp_path))


def test_an_output_without_an_answer_binds_nobody(tmp_path):
    """All rows failed, so the flag that was at fault may be corrected; with one answer it may not."""
    rows = [{"id": number, "prompt": "broken"} for number in range(5)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert generate(*WORK, "--temperature", 0.5, cwd=tmp_path).returncode == 1
    mended = {"MENDED": "1"}
    corrected = generate(*WORK, "--resume", cwd=tmp_path, environment=mended)
    assert corrected.returncode == 0, corrected.stderr
    assert "held errors alone, of other settings (temperature: 0.5 there, 1.0 here)" in corrected.stderr
    assert [("error" in row, row["id"]) for row in rows_of(tmp_path / "out.jsonl")] == [(False, n) for n in range(5)]
    assert generate(*WORK, "--resume", "--temperature", 0.5, cwd=tmp_path).returncode == 2


def test_what_is_refused_or_ends_before_its_first_answer_leaves_nothing_behind(tmp_path):
    prompts(tmp_path / "in.jsonl", 5)
    (tmp_path / "out.jsonl").write_text('"somebody\'s"\n')
    assert "does not say how" in complaint(generate(*WORK, "--resume", cwd=tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    (tmp_path / "out.jsonl").unlink()
    with started("--input", "-", "--output", "out.jsonl", cwd=tmp_path) as process:
        until((tmp_path / "out.jsonl.run.json").exists, process)
        until(lambda: (tmp_path / "out.jsonl.run.json").stat().st_size, process)
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read()  # its input stays open: it ends by the signal alone
        assert process.wait(60) == 3, errors
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_rows_that_the_input_has_no_more_keep_their_answers_once(tmp_path):
    prompts(tmp_path / "in.jsonl", 5)
    assert generate(*WORK, "--ordered", cwd=tmp_path).returncode == 0
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_bytes(lines[0])
    (tmp_path / "out.jsonl.early").write_bytes(b"".join(lines[2:]) + b'{"id":"torn')
    prompts(tmp_path / "in.jsonl", 3)
    assert generate(*WORK, "--ordered", "--resume", cwd=tmp_path).returncode == 0
    assert (tmp_path / "out.jsonl").read_bytes() == b"".join(lines)


def test_two_runs_do_not_share_an_output(tmp_path):
    prompts(tmp_path / "in.jsonl", 5)
    words = ["--input", "-", "--output", "out.jsonl"]
    with started(*words, cwd=tmp_path) as process:
        until((tmp_path / "out.jsonl").exists, process)
        second = generate(*WORK, "--resume", cwd=tmp_path)
        process.communicate(b'"a"\n', timeout=60)
    assert second.returncode == 2
    assert "another run" in complaint(second)
    assert process.returncode == 0


def test_a_full_disk_ends_the_run_with_the_cure_and_leaves_whole_lines(whole, tmp_path):
    prompts(tmp_path / "in.jsonl", COUNT)
    room = 100_003
    done = generate(*WORK, "--ordered", cwd=tmp_path, limit=room)
    assert done.returncode == 1
    assert "Free some space, then run again with --resume" in complaint(done)
    kept = (tmp_path / "out.jsonl").read_bytes()
    assert whole.startswith(kept)
    assert kept.endswith(b"\n")
    assert room - 1000 < len(kept) <= room
    assert generate(*WORK, "--ordered", "--resume", cwd=tmp_path).returncode == 0
    assert (tmp_path / "out.jsonl").read_bytes() == whole


def test_a_device_that_takes_nothing_is_said_to(tmp_path):
    prompts(tmp_path / "in.jsonl", 5)
    done = generate("--input", "in.jsonl", "--output", "/dev/full", cwd=tmp_path)
    assert done.returncode == 1
    assert "/dev/full" in complaint(done)


@pytest.mark.parametrize("ordered", [(), ("--ordered",)], ids=["as done", "ordered"])
@pytest.mark.parametrize(
    "harm", ["the file is removed", "its folder is removed", "the file is replaced", "it is moved"]
)
def test_a_file_that_is_taken_away_in_mid_run_is_not_called_done(tmp_path, harm, ordered):
    rows = [{"id": f"r{number}", "prompt": "sluggish" if number == 40 else f"p{number}"} for number in range(41)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "answers"
    folder.mkdir()
    out = folder / "out.jsonl"
    os.mkfifo(tmp_path / "held_up")
    words = ["--input", "in.jsonl", "--output", out, *ordered, "--batch-size", 64, "-B", "max_rows=1"]
    with started(*words, cwd=tmp_path, environment={"SLUGGISH": "held_up"}) as process:
        until(lambda: out.exists() and out.read_bytes().count(b"\n") == 40, process)
        if harm == "its folder is removed":
            shutil.rmtree(folder)
        elif harm == "it is moved":
            folder.rename(tmp_path / "elsewhere")
            folder.mkdir()
        else:
            out.unlink()
            if harm == "the file is replaced":
                out.write_text("another's\n")
        (tmp_path / "held_up").write_bytes(b"")
        said, errors = process.communicate(timeout=240)
    assert process.returncode == 1, (said, errors)
    told = complaint(subprocess.CompletedProcess(words, 1, said.decode(), errors.decode()))
    if harm == "it is moved":
        kept = tmp_path / "elsewhere" / "out.jsonl"
        assert "was moved while answers were written to it" in told
        assert f"the answers are in {kept}. What was answered before is kept." in told
        assert kept.read_bytes().count(b"\n") >= 40
        folder.rmdir()
        kept.parent.rename(folder)
        assert generate(*words, "--resume", cwd=tmp_path).returncode == 0
        assert len(rows_of(out)) == 41
    else:
        assert "was removed while answers were written to it" in told
        assert "They are lost" in told
        assert ("another file lies there now" in told) == (harm == "the file is replaced")
        assert "is kept" not in told
    if harm == "the file is replaced":
        assert out.read_text() == "another's\n"
