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
from command import SECONDS, played_by, records_of, selfplay, shards, started, until
from complaints import complaint
from counts import counts
from matches import same

GAMES = 2000
WORK = ["--games", GAMES, "--simulations", 100, "--model", "uniform", "--workers", 2, "--out", "games", "--json", "-"]
SMALL_SHARDS = str(Path(__file__).with_name("small_shards.py"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The records of a run that nothing disturbed, and the seconds that it took."""
    folder = tmp_path_factory.mktemp("whole")
    start = time.monotonic()
    played_by(*WORK, "--quiet", cwd=folder)
    return records_of(folder / "games"), time.monotonic() - start


@pytest.fixture
def disturbed(tmp_path, whole):
    """A run to which `disturb` does something once it has written a shard, or after `wait` seconds: its exit code,
    output and errors, and its workers.
    """

    def run(disturb, folder=tmp_path, wait=None):
        with started(*WORK, cwd=folder, program=SMALL_SHARDS) as process:
            workers = []
            if wait is None:
                until(lambda: shards(folder / "games"), process)
                children = psutil.Process(process.pid).children()
                workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
            else:
                time.sleep(wait)
            disturb(process, workers)
            out, errors = process.communicate(timeout=SECONDS)
        return process.returncode, out, errors, workers

    return run


def finished_by_the_next(folder, whole):
    played_by(*WORK, "--resume", "--quiet", cwd=folder)
    assert same(records_of(folder / "games"), whole[0])
    assert not list((folder / "games").glob("*.tmp"))


@pytest.mark.thorough
@pytest.mark.parametrize("times", counts(3, 20))
def test_a_run_killed_at_any_moment_is_finished_by_the_next(disturbed, whole, tmp_path, times):
    def kill(process, workers):
        with contextlib.suppress(ProcessLookupError):  # it may have ended by then
            os.killpg(process.pid, signal.SIGKILL)

    moments, kept = random.Random(8), 0
    for attempt in range(times):
        (folder := tmp_path / str(attempt)).mkdir()
        disturbed(kill, folder, moments.uniform(0, 1.1 * whole[1]))
        kept += len(shards(folder / "games")) > 0
        finished_by_the_next(folder, whole)
    assert times < 10 or kept > 0


@pytest.mark.thorough
def test_the_command_alone_is_killed_and_its_workers_leave(disturbed, whole, tmp_path):
    *_, workers = disturbed(lambda process, workers: process.kill())
    assert workers
    gone, alive = psutil.wait_procs(workers, timeout=60)
    assert (len(gone), alive) == (len(workers), [])
    finished_by_the_next(tmp_path, whole)


@pytest.mark.thorough
@pytest.mark.sample
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped for good"])
def test_the_games_of_a_lost_worker_are_played_by_the_others(disturbed, whole, tmp_path, number):
    code, out, errors, _ = disturbed(lambda process, workers: workers[0].send_signal(number))
    assert code == 0, errors
    assert same(records_of(tmp_path / "games"), whole[0])
    assert not list((tmp_path / "games").glob("*.tmp"))
    assert json.loads(out)["progress"]["done"] == GAMES


@pytest.mark.thorough
def test_when_every_worker_is_killed_the_run_ends_with_the_cure(disturbed, whole, tmp_path):
    code, _, errors, _ = disturbed(lambda process, workers: [worker.kill() for worker in workers])
    assert code == 1
    kept = len(records_of(tmp_path / "games")["finished"])
    assert f"{kept} of {GAMES} games are kept in games: run again with --resume" in " ".join(errors.split())
    finished_by_the_next(tmp_path, whole)


@pytest.mark.sample
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("kill", [os.killpg, os.kill], ids=["to all", "to the command"])
def test_a_run_that_is_told_to_stop_keeps_what_is_finished(disturbed, whole, tmp_path, number, kill):
    code, out, errors, _ = disturbed(lambda process, workers: kill(process.pid, number))
    assert code == 3, errors
    assert "Traceback" not in errors
    report, finished = json.loads(out), records_of(tmp_path / "games")["finished"]
    assert report["status"] == "partial"
    assert len(set(finished)) == len(finished) == report["progress"]["done"]
    assert 0 < len(finished) < GAMES
    finished_by_the_next(tmp_path, whole)


@pytest.mark.thorough
def test_what_is_complete_is_left_as_it_is_and_fewer_games_are_refused(tmp_path):
    words = ["--model", "uniform", "--simulations", 5, "--workers", 1, "--out", "games"]
    assert selfplay(*words, "--games", 20, cwd=tmp_path).returncode == 0
    again = selfplay(*words, "--games", 20, "--resume", cwd=tmp_path)
    assert again.returncode == 0
    assert "20 of 20 games" in again.stdout
    assert "nothing was left to do" in again.stdout
    assert "Let the run go on" not in again.stdout
    fewer = selfplay(*words, "--games", 10, "--resume", cwd=tmp_path)
    assert fewer.returncode == 2
    assert "Ask for 20 or more" in complaint(fewer)
