"""`gpuinfer selfplay --backend central` as people run it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
from importlib.resources import files
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from forking import Forked, run

pytestmark = pytest.mark.usefixtures("children_forked")

WORK = ["--games", "20", "--simulations", "10", "--model", "blobnet-small", "--no-roofline", "--json", "-", "--quiet"]
SCHEMA = json.loads(files("gpuinfer").joinpath("report.schema.json").read_text())


def selfplay(*words, cwd):
    done = run(["gpuinfer", "selfplay", *WORK, *words], cwd, workers=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return json.loads(done.stdout)


def in_order():
    """`selfplay/matches.py` knows how the records of two runs are compared."""
    spec = importlib.util.spec_from_file_location("matches", Path(__file__).parents[1] / "selfplay" / "matches.py")
    matches = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(matches)
    return matches


def records_of(folder):
    parts = []
    for shard in sorted(folder.glob("shard-*.npz")):
        with np.load(shard, allow_pickle=False) as arrays:
            parts.append(dict(arrays))
    return in_order().in_order(parts)


def test_a_run_with_two_workers_is_served_by_one_server(tmp_path):
    report = selfplay("--backend", "central", "--workers", "2", cwd=tmp_path)
    jsonschema.validate(report, SCHEMA)
    assert (report["status"], report["backend"]) == ("done", "central")
    batches = report["batches"]
    assert batches["count"] > 0
    assert sum(batches["reasons"].values()) == batches["count"]
    assert report["time_s"]["forward"] > 0
    assert report["latency_s"]["p50"] > 0
    assert sum(report["errors"].values()) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("workers", ["2", pytest.param("1", marks=pytest.mark.soak)])
def test_a_deterministic_run_plays_the_same_games_as_without_a_server(tmp_path, workers):
    central = ["--backend", "central", "--workers", workers, "--deterministic", "--out", "central"]
    selfplay(*central, cwd=tmp_path)
    selfplay("--backend", "inprocess", "--workers", "1", "--deterministic", "--out", "inprocess", cwd=tmp_path)
    assert in_order().same(records_of(tmp_path / "central"), records_of(tmp_path / "inprocess"))


def server_of(process):
    """The process of its session, beside the command itself, that listens at an abstract address."""
    unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    listening = {f"socket:[{words[6]}]" for words in unix if words[3] == "00010000" and words[-1].startswith("@")}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pid = int(folder.name)
            if os.getsid(pid) == process.pid != pid:
                for descriptor in (folder / "fd").iterdir():
                    if os.readlink(descriptor) in listening:
                        return pid
    raise AssertionError("no server")


@pytest.mark.thorough
def test_a_run_whose_server_is_killed_keeps_its_games_and_says_how_to_go_on(tmp_path):
    """Games of the last seconds too, which no shard holds yet."""
    words = ["--backend", "central", "--workers", "2", "--simulations", "10", "--model", "blobnet-small", "--no-live"]
    words += ["--no-roofline", "--out", "games", "--json", "report.json", "--games", "100000"]
    with Forked(["gpuinfer", "selfplay", *words], tmp_path, text=True, workers=True) as process:
        while " games/min" not in (line := process.stderr.readline()):
            assert line, "it ended before that"
        os.kill(server_of(process), signal.SIGKILL)
        _, errors = process.communicate(timeout=240)
    assert process.returncode == 1, errors
    assert "the central server is gone" in errors
    assert "What was finished is kept in games: the same command with --resume goes on." in errors
    told = json.loads((tmp_path / "report.json").read_text())["progress"]["done"]
    kept = records_of(tmp_path / "games")["finished"]
    assert len(kept) >= told > 0
    more = int(kept.max()) + 201  # games end out of order: the last one's number is above how many there are
    report = selfplay("--out", "games", "--games", str(more), "--resume", cwd=tmp_path)
    assert report["progress"]["done"] == more
