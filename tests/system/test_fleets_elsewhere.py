"""`gpuinfer serve --launcher …` on real places: it serves, is whole again after a loss, and ends with nothing left."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from importlib.util import find_spec

import psutil
import pytest
import slurm_here
from serving.replica_servers import serving, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
SECONDS = 240
ASKED = {"prompt": "Hello", "max_tokens": 8, "seed": 1}


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


def ask(port, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        return json.load(response)


def listening_at(port) -> psutil.Process:
    """The replica itself, wherever it was started."""
    (found,) = {
        one.pid for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN and one.laddr.port == port
    }
    return psutil.Process(found)


@pytest.mark.parametrize("place", ["slurm", "ray"], indirect=True)
def test_a_fleet_serves_loses_a_replica_is_whole_again_and_ends(place, tmp_path):
    words = ("--model", "tiny", "--replicas", 2, "-B", "slots=4", "-B", "threads=1", *place)
    with serving(*words, folder=tmp_path) as fleet:
        stats = lambda: ask(fleet.port, "/stats")  # noqa: E731
        completed = lambda: ask(fleet.port, "/v1/completions", ASKED)["choices"][0]["text"]  # noqa: E731
        until(lambda: stats()["healthy_workers"] == 2, lambda: fleet.log)
        text = completed()
        listening_at(int(stats()["workers"][0]["url"].rpartition(":")[2])).kill()
        assert [completed() for _ in range(5)] == [text] * 5
        until(lambda: stats()["workers"][0]["restarts"] > 0, lambda: fleet.log)
        until(lambda: stats()["healthy_workers"] == 2, lambda: fleet.log)
        assert fleet.end() == 0, fleet.log
