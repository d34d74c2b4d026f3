"""Runs that are divided over real nodes on this machine, from the command line to what is on the disk."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from cluster.numbers_workload import install

WAIT_S = 120.0


@pytest.fixture
def command(tmp_path):
    """Starts `gpuinfer` with the workload of the tests; what it leaves running is killed, and fails the test."""
    path = install(tmp_path / "package")
    own = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])}
    started = []

    def start(*words, **more):
        line = [sys.executable, "-m", "gpuinfer", *map(str, words)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(line, env=own, cwd=tmp_path, **{**streams, **more}))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    left = nodes_of(tmp_path)
    for one in left:
        one.kill()
    assert left == []


def nodes_of(folder):
    """The processes of nodes that work in this folder and are still there after a while."""
    until = time.monotonic() + 30
    while True:
        found = []
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if "node" in one.cmdline() and one.environ().get("PYTHONPATH", "").startswith(str(folder)):
                    found.append(one)
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.2)


def run_nodes(folder):
    """The same, at once."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "--key-file" in one.cmdline() and one.environ().get("PYTHONPATH", "").startswith(str(folder)):
                found.append(one)
    return found


def until(done, what):
    end = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.05)


def written(folder):
    return [int(line) for line in (folder / "all.txt").read_text().split()]


def parts(folder):
    return list(folder.glob("*.part")) if folder.exists() else []


def test_two_nodes_compute_one_run(command, tmp_path):
    out, report = tmp_path / "out", tmp_path / "report.json"
    words = ("numbers", "--total", 600, "--out", out, "--launcher", "local", "-L", "nodes=2", "--nodes-min", 2)
    process = command(*words, "--json", report)
    said, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, said
    assert written(out) == list(range(600))
    found = json.loads(report.read_text())
    assert (found["status"], found["workload"]) == ("done", "numbers")


@pytest.mark.system
def test_a_node_that_is_killed_loses_nothing(command, tmp_path):
    out = tmp_path / "out"
    process = command("numbers", "--total", 4000, "--out", out, "--launcher", "local", "-L", "nodes=2")
    until(lambda: parts(out), "a first range")
    run_nodes(tmp_path)[0].kill()
    said, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, said
    assert "is started again" in said
    assert written(out) == list(range(4000))


@pytest.mark.system
def test_a_coordinator_that_is_killed_leaves_nothing_running_and_is_resumed(command, tmp_path):
    out = tmp_path / "out"
    words = ("numbers", "--total", 4000, "--out", out, "--launcher", "local", "-L", "nodes=2")
    process = command(*words)
    until(lambda: len(parts(out)) > 3, "some ranges")
    process.kill()
    process.wait()
    assert nodes_of(tmp_path) == []
    before = {one.name for one in parts(out)}
    process = command(*words, "--resume")
    said, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, said
    assert before <= {one.name for one in parts(out)}
    assert written(out) == list(range(4000))


@pytest.mark.system
def test_a_signal_stops_all_nodes_and_the_run_is_partial(command, tmp_path):
    out = tmp_path / "out"
    process = command("numbers", "--total", 100_000, "--out", out, "--launcher", "local", "-L", "nodes=2")
    until(lambda: parts(out), "a first range")
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 3, said
    kept = sorted(tuple(map(int, one.stem.split("-"))) for one in parts(out))
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(kept))


@pytest.mark.system
def test_a_suspended_node_does_not_hold_up_the_end(command, tmp_path):
    out = tmp_path / "out"
    process = command("numbers", "--total", 1500, "--out", out, "--launcher", "local", "-L", "nodes=2")
    until(lambda: parts(out) and len(run_nodes(tmp_path)) == 2, "two nodes at work")
    run_nodes(tmp_path)[0].suspend()
    said, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, said
    assert written(out) == list(range(1500))


@pytest.mark.system
def test_a_node_that_would_compute_something_else_ends_the_run_before_any_work(command, tmp_path):
    out = tmp_path / "out"
    process = command(
        "numbers", "--total", 100, "--multiplied-by", 2, "--out", out, "--launcher", "local", "-L", "nodes=1"
    )
    said, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2, said
    assert "would compute something else than the run (multiplied_by: 1 there, 2 here)" in said
    assert parts(out) == []


@pytest.mark.system
def test_a_node_joins_by_hand(command, tmp_path):
    out = tmp_path / "out"
    words = ("numbers", "--total", 3000, "--out", out, "--launcher", "local", "-L", "nodes=1", "-v")
    log = tmp_path / "said"
    with log.open("w") as stream:
        process = command(*words, stdout=stream)
        until(lambda: run_nodes(tmp_path), "the first node")
        words = run_nodes(tmp_path)[0].cmdline()
        at = words.index("node")
        by_hand = command("node", words[at + 1], "--key-file", words[words.index("--key-file") + 1])
        said, _ = by_hand.communicate(timeout=WAIT_S)
        assert by_hand.returncode == 0, said
        assert "units done in the run of" in said
        assert process.wait(WAIT_S) == 0, log.read_text()
    assert written(out) == list(range(3000))


@pytest.mark.system
def test_a_node_without_the_key_is_refused(command, tmp_path):
    (tmp_path / "key").write_text("guessed\n")
    (tmp_path / "key").chmod(0o600)
    process = command("numbers", "--total", 100_000, "--launcher", "local", "-L", "nodes=1")
    until(lambda: run_nodes(tmp_path), "the first node")
    words = run_nodes(tmp_path)[0].cmdline()
    stranger = command("node", words[words.index("node") + 1], "--key-file", tmp_path / "key")
    said, _ = stranger.communicate(timeout=WAIT_S)
    assert stranger.returncode == 2, said
    assert "key" in said
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 3


def test_more_nodes_than_this_machine_can_have_are_refused_before_any_is_started(command):
    process = command("numbers", "--launcher", "local", "-L", "nodes=100000")
    said, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert "only take turns" in said
    assert said.rstrip().endswith("Ask for fewer, or name a launcher for other machines.")


@pytest.mark.parametrize("address", ["host", "host:port", "http://host", ":7411", "host:70000"])
def test_an_address_without_a_port_is_refused_at_once(command, tmp_path, address):
    (tmp_path / "key").write_text("secret\n")
    (tmp_path / "key").chmod(0o600)
    said, _ = (process := command("node", address, "--key-file", tmp_path / "key")).communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert "Write HOST:PORT" in said
