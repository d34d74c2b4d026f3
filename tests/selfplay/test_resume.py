"""However a run ends, the next one goes on with it: each game exactly once, and the same games as without the break."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
from command import SECONDS, records_of, selfplay, shards, started, until
from complaints import complaint
from counts import counts
from matches import same

GAMES = 2000
WORK = ["--games", GAMES, "--simulations", 100, "--model", "uniform", "--workers", 2, "--out", "games"]
SMALL_SHARDS = str(Path(__file__).with_name("small_shards.py"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The records of a run that nothing disturbed, and the seconds that it took."""
    folder = tmp_path_factory.mktemp("whole")
    start = time.monotonic()
    done = selfplay(*WORK, "--quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    return records_of(folder / "games"), time.monotonic() - start


def go_on(folder):
    done = selfplay(*WORK, "--resume", "--json", "-", "--quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def workers_of(process):
    return [child for child in psutil.Process(process.pid).children() if "spawn_main" in " ".join(child.cmdline())]


@pytest.mark.thorough
@pytest.mark.parametrize("times", counts(3, 20))
def test_a_run_killed_at_any_moment_is_finished_by_the_next(whole, tmp_path, times):
    records, seconds = whole
    moments, kept = random.Random(8), 0
    for attempt in range(times):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        with started(*WORK, cwd=folder, program=SMALL_SHARDS) as process:
            time.sleep(moments.uniform(0, 1.1 * seconds))
            with contextlib.suppress(ProcessLookupError):  # it may have ended by then
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=SECONDS)
        kept += len(shards(folder / "games")) > 0
        go_on(folder)
        assert same(records_of(folder / "games"), records)
        assert not list((folder / "games").glob("*.tmp"))
    assert times < 10 or kept > 0


@pytest.mark.thorough
def test_the_command_alone_is_killed_and_its_workers_leave(whole, tmp_path):
    with started(*WORK, cwd=tmp_path, program=SMALL_SHARDS) as process:
        until(lambda: shards(tmp_path / "games"), process)
        workers = workers_of(process)
        process.kill()
    assert workers
    gone, alive = psutil.wait_procs(workers, timeout=60)
    assert (len(gone), alive) == (len(workers), [])
    go_on(tmp_path)
    assert same(records_of(tmp_path / "games"), whole[0])


@pytest.mark.thorough
@pytest.mark.sample
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped for good"])
def test_the_games_of_a_lost_worker_are_played_by_the_others(whole, tmp_path, number):
    with started(*WORK, "--json", "-", cwd=tmp_path, program=SMALL_SHARDS) as process:
        until(lambda: shards(tmp_path / "games"), process)
        workers_of(process)[0].send_signal(number)
        out, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    assert same(records_of(tmp_path / "games"), whole[0])
    assert not list((tmp_path / "games").glob("*.tmp"))
    assert json.loads(out)["progress"]["done"] == GAMES


@pytest.mark.thorough
def test_when_every_worker_is_killed_the_run_ends_with_the_cure(whole, tmp_path):
    with started(*WORK, cwd=tmp_path, program=SMALL_SHARDS) as process:
        until(lambda: shards(tmp_path / "games"), process)
        for worker in workers_of(process):
            worker.kill()
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "every worker was killed" in errors
    kept = len(records_of(tmp_path / "games")["finished"])
    assert f"{kept} of {GAMES} games are kept in games: run again with --resume" in " ".join(errors.split())
    go_on(tmp_path)
    assert same(records_of(tmp_path / "games"), whole[0])


@pytest.mark.sample
@pytest.mark.parametrize(
    ("number", "to_all"),
    [
        pytest.param(signal.SIGINT, True, id="Ctrl-C at a terminal"),
        pytest.param(signal.SIGINT, False, id="SIGINT"),
        pytest.param(signal.SIGTERM, False, id="SIGTERM"),
        pytest.param(signal.SIGTERM, True, id="SIGTERM from a scheduler"),
    ],
)
def test_a_run_that_is_told_to_stop_keeps_what_is_finished(whole, tmp_path, number, to_all):
    with started(*WORK, "--json", "-", cwd=tmp_path, program=SMALL_SHARDS) as process:
        until(lambda: shards(tmp_path / "games"), process)
        (os.killpg if to_all else os.kill)(process.pid, number)
        out, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 3, errors
    assert "Traceback" not in errors
    report = json.loads(out)
    assert report["status"] == "partial"
    finished = records_of(tmp_path / "games")["finished"]
    assert len(set(finished)) == len(finished) == report["progress"]["done"]
    assert 0 < len(finished) < GAMES
    go_on(tmp_path)
    assert same(records_of(tmp_path / "games"), whole[0])


@pytest.mark.thorough
def test_what_is_complete_is_left_as_it_is_and_said_to_be(tmp_path):
    words = ["--games", 20, "--model", "uniform", "--simulations", 5, "--workers", 1, "--out", "games"]
    assert selfplay(*words, cwd=tmp_path).returncode == 0
    again = selfplay(*words, "--resume", cwd=tmp_path)
    assert again.returncode == 0
    assert "20 of 20 games" in again.stdout
    assert "nothing was left to do" in again.stdout
    assert "Let the run go on" not in again.stdout


@pytest.mark.thorough
def test_fewer_games_than_there_are_is_refused_with_the_number(tmp_path):
    words = ["--model", "uniform", "--simulations", 5, "--workers", 1, "--out", "games"]
    assert selfplay("--games", 20, *words, cwd=tmp_path).returncode == 0
    fewer = selfplay("--games", 10, *words, "--resume", cwd=tmp_path)
    assert fewer.returncode == 2
    assert "Ask for 20 or more" in complaint(fewer)
