"""`gpuinfer serve --launcher …` on real places: it serves, is whole again after a loss, and ends with nothing left."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec

import psutil
import pytest
import slurm_here

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
SECONDS = 240


@pytest.fixture
def place(request):
    """The flags of a launcher whose place is up."""
    with contextlib.ExitStack() as stack:
        if request.param == "slurm":
            stack.enter_context(slurm_here.running())
            yield ["--launcher", "slurm", "-L", "time=00:10:00"]
        else:
            if find_spec("ray") is None:
                pytest.skip("needs Ray")
            yield ["--launcher", "ray", "-L", "cpus=0.5"]


def until(condition, otherwise=lambda: ""):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, otherwise()
        time.sleep(0.1)


def stats(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/stats", timeout=SECONDS) as response:
        return json.load(response)


def completed(port):
    body = json.dumps({"prompt": "Hello", "max_tokens": 8, "seed": 1}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        return json.load(response)["choices"][0]["text"]


def listening_at(port) -> psutil.Process:
    """The replica itself, wherever it was started."""
    (found,) = {
        one.pid for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN and one.laddr.port == port
    }
    return psutil.Process(found)


@pytest.mark.parametrize("place", ["slurm", "ray"], indirect=True)
def test_a_fleet_serves_loses_a_replica_is_whole_again_and_ends(place, tmp_path):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GPUINFER_")}
    words = ["serve", "--model", "tiny", "--replicas", "2", "-B", "slots=4", "-B", "threads=1", "--port", "0"]
    ready, log = tmp_path / "ready", tmp_path / "log"
    with log.open("wb") as said:
        fleet = subprocess.Popen(
            [sys.executable, "-m", "gpuinfer", *words, *place, "--ready-file", str(ready)],
            cwd=tmp_path,
            env=inherited,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
    try:
        until(lambda: ready.exists() or fleet.poll() is not None, log.read_text)
        assert ready.exists(), log.read_text()
        port = json.loads(ready.read_text())["port"]
        until(lambda: stats(port)["healthy_workers"] == 2, log.read_text)
        text = completed(port)
        lost = stats(port)["workers"][0]
        listening_at(int(lost["url"].rpartition(":")[2])).kill()
        for _ in range(5):
            assert completed(port) == text
        until(lambda: stats(port)["workers"][0]["restarts"] > 0, log.read_text)
        until(lambda: stats(port)["healthy_workers"] == 2, log.read_text)
        fleet.terminate()
        assert fleet.wait(SECONDS) == 0, log.read_text()
    finally:
        fleet.kill()
        fleet.wait(SECONDS)
