"""What of the launcher `ray` can be seen without Ray: its refusals, and what an actor does for a replica."""

from __future__ import annotations

import importlib.util
import os
import time

import pytest
from plans import COMMAND, SECONDS, plan

from gpuinfer.config.options import GivenValue
from gpuinfer.errors import UsageError
from gpuinfer.fleet.launchers import base
from gpuinfer.fleet.launchers.ray import RayActor


def test_without_ray_the_way_to_install_it_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'gpuinfer\[ray\]'"):
        base.make_launcher("ray", {})


@pytest.mark.parametrize(
    ("option", "value"), [("address", "somewhere"), ("address", "http://a:1"), ("gpus", "-1"), ("cpus", "many")]
)
def test_values_that_are_none_are_refused(option, value):
    with pytest.raises(UsageError, match=option):
        base.make_launcher("ray", {option: GivenValue(value, f"-L {option}")})


def polled(host: RayActor, condition) -> dict:
    until = time.monotonic() + SECONDS
    while not condition(told := host.poll(0)):
        assert time.monotonic() < until, told
        time.sleep(0.02)
    return told


@pytest.fixture
def host():
    made = RayActor()
    yield made
    made.end()


def started(host: RayActor, folder, *words: str) -> int:
    made = plan(folder, *words)
    files = {str(made.setup_file): b"{}", str(made.key_file): b"secret\n"}
    arguments = ("--setup-file", str(made.setup_file), *made.arguments)
    return host.start(COMMAND, arguments, files, str(made.ready_file), 1, "127.0.0.1")


def test_an_actor_brings_its_replicas_files_runs_it_and_tells_of_it(host, tmp_path):
    pid = started(host, tmp_path)
    told = polled(host, lambda told: told["address"] and b"is up" in told["log"])
    assert told["alive"]
    assert told["address"][0] == "127.0.0.1"
    with open(f"/proc/{pid}/cmdline") as line:
        words = line.read().split("\0")
    setup = words[words.index("--setup-file") + 1]
    assert str(tmp_path) not in setup  # nothing of the supervisor's folder is needed here
    with open(setup) as file:
        assert file.read() == "{}"
    assert os.stat(setup).st_mode & 0o777 == 0o600
    assert host.poll(len(told["log"]))["log"] == b""
    host.terminate()
    assert polled(host, lambda told: not told["alive"])["code"] == 0
    host.end()
    assert not os.path.exists(setup)


def test_one_that_ends_first_is_told_with_its_code_and_words(host, tmp_path):
    started(host, tmp_path, "--fail", "no memory")
    told = polled(host, lambda told: not told["alive"])
    assert (told["code"], told["address"]) == (1, None)
    assert b"no memory" in told["log"]
