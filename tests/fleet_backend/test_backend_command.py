"""`--backend fleet` as people use it: the answers of `inprocess`, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
from forking import Forked

HERE = Path(__file__).parents[1]
sys.path[:0] = [str(HERE / "central"), str(HERE / "serving")]

from test_central_command import in_order, records_of  # noqa: E402
from test_central_generate import ROWS, answers_in, left_of  # noqa: E402

SCHEMA = json.loads(files("gpuinfer").joinpath("report.schema.json").read_text())
SECONDS = 240
GAMES = ["selfplay", "--games", "8", "--simulations", "10", "--model", "blobnet-small", "--workers", "2"]
GAMES.append("--no-roofline")
FLEET = ["--backend", "fleet", "-B", "replicas=2", "-B", "threads=1"]


def started(*words, cwd):
    return Forked(["gpuinfer", *words], cwd, stdin=subprocess.DEVNULL, text=True, workers=True)


def ran(*words, cwd):
    """Its report."""
    process = started(*words, "--json", "-", "--quiet", cwd=cwd)
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "Traceback" not in err, err
    report = json.loads(out)
    jsonschema.validate(report, SCHEMA)
    return report


def replicas_of(folder: Path) -> list[int]:
    """Replicas leave the session of their supervisor's: they are known by their folder."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in line.read_bytes():
                found.append(int(line.parent.name))
        except OSError:  # it has ended in the meantime
            continue
    return found


def until(condition, what):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where fleets have their folders: replicas name it in their command lines."""
    (tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    return tmp_path


@pytest.mark.thorough
def test_self_play_is_that_of_inprocess_and_ends_with_nothing_left(folder):
    """Blocks of rows, from two worker processes, through a router to two replicas."""
    same = ["--deterministic", "--seed", "5"]
    report = ran(*GAMES, *same, *FLEET, "--out", "fleet", cwd=folder)
    assert (report["status"], report["backend"]) == ("done", "fleet")
    batches = report["batches"]
    assert sum(batches["reasons"].values()) == batches["count"] > 0
    assert report["time_s"]["forward"] > 0
    assert report["queue_wait_s"]["p50"] > 0
    assert sum(report["errors"].values()) == 0
    until(lambda: not replicas_of(folder), "the end of all replicas")
    ran(*GAMES, *same, "--out", "inprocess", cwd=folder)
    assert in_order().same(records_of(folder / "fleet"), records_of(folder / "inprocess"))


@pytest.mark.thorough
def test_text_is_that_of_inprocess_byte_for_byte(folder):
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = ["generate", "--model", "tiny", "-B", "slots=8", "--input", "prompts.jsonl", "--ordered", "--token-ids"]
    fleet = ran(*words, "--deterministic", *FLEET, "--output", "fleet.jsonl", cwd=folder)
    inprocess = ran(*words, "--deterministic", "-B", "threads=1", "--output", "inprocess.jsonl", cwd=folder)
    assert answers_in(folder / "fleet.jsonl") == answers_in(folder / "inprocess.jsonl")
    assert fleet["batches"]["slots"] == 8
    assert fleet["batches"]["rows_max"] <= 8
    assert fleet["errors"]["failed"] == inprocess["errors"]["failed"] == 2
    for part in ("throughput", "model", "device"):
        assert set(fleet[part]) == set(inprocess[part])


@pytest.mark.thorough
def test_asked_to_stop_it_keeps_what_is_answered_and_leaves_nothing_behind(folder):
    rows = ({"id": number, "prompt": "ab", "ignore_eos": True, "max_tokens": 100} for number in range(10_000))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["generate", "--model", "tiny", "-B", "slots=8", "--input", "prompts.jsonl", "--output", "out.jsonl"]
    process = started(*words, *FLEET, cwd=folder)
    out = folder / "out.jsonl"
    until(lambda: process.poll() is not None or (out.exists() and out.stat().st_size > 0), "the first answers")
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 3, err
    assert 0 < len(out.read_text().splitlines()) < 10_000
    until(lambda: not replicas_of(folder) and not left_of(process.pid), "the end of all processes")


@pytest.mark.thorough
def test_a_run_that_is_killed_leaves_no_replica_behind_and_one_that_cannot_start_has_last_words(folder):
    process = started(*GAMES, "--games", "100000", *FLEET, cwd=folder)
    until(lambda: len(replicas_of(folder)) >= 2, "two replicas")
    process.kill()
    process.communicate(timeout=SECONDS)
    until(lambda: not replicas_of(folder), "the end of all replicas")
    process = started(*GAMES, *FLEET, "-B", "max_rows=1", "--model", "nobody:knows", cwd=folder)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode != 0
    assert "nobody" in err
    assert "Traceback" not in err
