"""`gpuinfer serve` with the flags of a fleet: what is refused before anything starts, and the real thing once."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest
import standins
from killing import of_tiny

from gpuinfer.errors import UsageError
from gpuinfer.fleet import plan
from gpuinfer.fleet.plan import gpus_here, gpus_of, refuse_absent_gpus
from gpuinfer.host import machine

SERVE = ("serve", "--model", "tiny")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        pytest.param(["--routing", "sticky"], ["--routing", "--replicas"], id="a flag of a fleet's for one server"),
        pytest.param(["-L", "account=x"], ["-L", "--replicas"], id="an option of a launcher's for one server"),
        pytest.param(["--replicas", "0"], ["--replicas", "1 or more"], id="no replicas"),
        pytest.param(["--replicas", "2", "--routing", "stiky"], ["stiky", "sticky"], id="no such policy"),
        pytest.param(["--launcher", "slrum"], ["slrum", "slurm"], id="no such launcher"),
        pytest.param(["--replicas", "2", "-L", "x=1"], ["-L x", "no option"], id="no such option"),
        pytest.param(["--replicas", "3", "--gpus", "0,1"], ["--gpus", "2 devices", "3 replicas"], id="too few devices"),
        pytest.param(["--gpus", "0,x"], ["--gpus 0,x", "0,2,4,6"], id="devices that are none"),
        pytest.param(["--gpus", "0,1", "--device", "cpu"], ["--gpus", "--device"], id="devices for the CPU"),
        pytest.param(["--min-replicas", "3", "--max-replicas", "2"], ["3 to 2"], id="the least is more than the most"),
        pytest.param(
            ["--replicas", "9", "--max-replicas", "2"], ["--replicas 9", "--max-replicas"], id="more than the most"
        ),
        pytest.param(["--replicas", "2", "--host", "0.0.0.0"], ["--api-key-file"], id="open to all"),
        pytest.param(["--replicas", "2", "--trace", "t"], ["--trace"], id="one record of several servers"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(gpuinfer, flags, said):
    code, _, errors = gpuinfer(*SERVE, *flags)
    assert code == 2
    assert all(part in errors for part in said), errors
    assert len(errors.strip().splitlines()) <= 3


def test_devices_are_numbers_or_names():
    assert gpus_of("0, 2,4") == ("0", "2", "4")
    assert gpus_of("GPU-8f3a,MIG-1/2") == ("GPU-8f3a", "MIG-1/2")


def test_devices_that_this_process_may_not_see_are_not_handed_out(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert gpus_here() == ("3", "5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus_here() == ()


@pytest.mark.skipif(machine.has_cuda(), reason="this machine has a GPU")
def test_devices_of_a_machine_without_any_are_refused_before_anything_starts(gpuinfer, tmp_path):
    code, _, errors = gpuinfer(*SERVE, "--gpus", "4", "--log-dir", str(tmp_path / "logs"))
    assert code == 2
    assert all(part in errors for part in ("--gpus 4", "no NVIDIA driver", "--replicas N")), errors
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        pytest.param(
            ("1", "2"), "no device 2 on this machine. Name some of those here: 0 to 1", id="a number too high"
        ),
        pytest.param(("0", "1", "1"), None, id="all of them, one for two replicas"),
        pytest.param(("GPU-8f3a",), None, id="a name, which says nothing of how many there are"),
    ],
)
def test_devices_that_this_machine_does_not_have_are_refused(monkeypatch, devices, said):
    monkeypatch.setattr(machine, "has_cuda", lambda: True)
    monkeypatch.setattr(plan.os, "listdir", lambda _: ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"])
    if said is None:
        refuse_absent_gpus(devices)
    else:
        with pytest.raises(UsageError, match=said):
            refuse_absent_gpus(devices)


@pytest.mark.thorough
async def test_a_fleet_of_the_command_itself_answers_like_one_server(tmp_path):
    async with of_tiny(tmp_path, 2) as it:
        asked = {"prompt": "Hello", "max_tokens": 8, "seed": 1}
        answers = [await it.ask("POST", "/v1/completions", asked) for _ in range(64)]  # of equals any may be chosen
        assert len({json.loads(answer.body)["choices"][0]["text"] for answer in answers}) == 1
        assert len({answer.headers["x-gpuinfer-route"].split(";")[0] for answer in answers}) == 2
        document = await it.json("GET", "/openapi.json", headers=())
        assert {"/v1/completions", "/workers", "/workers/{id}", "/events"} <= document["paths"].keys()
        workers = await it.workers()
        os.kill(workers[0]["pid"], 9)
        assert (await it.ask("POST", "/v1/completions", asked)).status == 200
        await standins.until(lambda: it.whole(2), "the pool is whole", within_s=180.0)


@pytest.mark.thorough
async def test_with_several_models_a_replica_that_is_killed_takes_no_answer_of_any_along(tmp_path):
    async with of_tiny(tmp_path, 2, "a=tiny,b=tiny,net=blobnet-small") as it:
        text = {"prompt": "Hello", "max_tokens": 64, "seed": 1, "ignore_eos": True}
        asked = [
            ("/v1/completions", {**text, "model": "a"}),
            ("/v1/completions", {**text, "model": "b"}),
            ("/v1/evaluate", {"rows": [[0.5] * 256] * 2, "model": "net"}),
        ]
        before = [[told(await it.ask("POST", *one)) for one in asked] for _ in range(2)]
        under_way = [asyncio.create_task(it.ask("POST", *one)) for one in asked for _ in range(8)]
        await asyncio.sleep(0.05)
        os.kill((await it.workers())[0]["pid"], signal.SIGKILL)
        answers = [told(answer) for answer in await asyncio.gather(*under_way)]
        assert answers == [one for one in before[0] for _ in range(8)]
        await standins.until(lambda: it.whole(2), "the pool is whole", within_s=180.0)
        again = [[told(await it.ask("POST", *one)) for one in asked] for _ in range(4)]
        assert again == [before[0]] * 4


def told(answer):
    """The text of an answer, or the numbers."""
    assert answer.status == 200, answer.body
    found = json.loads(answer.body)
    return found["choices"][0]["text"] if "choices" in found else found["outputs"]
