"""What people of multi-GPU servers expect of a fleet: devices by count, workers that can be reached, a global queue,
routing policies of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import sys
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[1] / place) for place in ("fleet", "router")]

from fleet_programs import fleet, launcher, plan, until
from killing import DIFFERENT, Load
from packages import install
from ports import free_port
from standin_replica import text

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.cli.serve_fleet import ServeFleetOptions, plan_of
from gpuinfer.config import options
from gpuinfer.config.options import GivenValue
from gpuinfer.config.setup_file import ServerSetup
from gpuinfer.errors import UsageError
from gpuinfer.fleet import plan as fleet_plan
from gpuinfer.fleet.plan import FleetPlan, HealthChecks, gpus_of
from gpuinfer.fleet.supervisor import Fleet
from gpuinfer.host import machine
from gpuinfer.http.access import Access
from gpuinfer.http.client import HttpClient
from gpuinfer.launchers.local import LocalLauncher
from gpuinfer.launchers.ray import RayLauncher
from gpuinfer.launchers.slurm import SlurmLauncher

ASKED = {"prompt": "abc", "seed": 3}
SAID = text("abc", 3, 12)


def planned(words: str, launcher=None) -> FleetPlan:
    """The plan of `gpuinfer serve --model tiny` with these flags."""
    pairs = iter(shlex.split(words))
    given = {word.removeprefix("--").replace("-", "_"): GivenValue(next(pairs), word) for word in pairs}
    described = ServerSetup(setup=Setup(model=ModelSpec("tiny", kind="text")))
    own = ServeFleetOptions(model="tiny", **options.check(ServeFleetOptions, given, "serve"))
    return plan_of(own, described, launcher or LocalLauncher(), Access())


@pytest.fixture
def four_gpus(monkeypatch):
    """A machine that seems to have four."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "has_cuda", lambda: True)
    monkeypatch.setattr(fleet_plan.os, "listdir", lambda _: ["nvidia0", "nvidia1", "nvidia2", "nvidia3", "null"])


# --gpus


@pytest.mark.parametrize(
    ("flag", "devices"),
    [
        pytest.param("4", ("0", "1", "2", "3"), id="a number is a count"),
        pytest.param("2", ("0", "1"), id="of fewer than there are"),
        pytest.param("all", ("0", "1", "2", "3"), id="all are counted"),
        pytest.param("0,2", ("0", "2"), id="a list names devices"),
        pytest.param("3,", ("3",), id="a list of one ends with a comma"),
        pytest.param("1,1", ("1", "1"), id="one may be named twice"),
        pytest.param("GPU-8f3a", ("GPU-8f3a",), id="a name is a name"),
    ],
)
def test_a_bare_number_counts_devices_and_a_list_names_them(four_gpus, flag, devices):
    made = planned(f"--gpus {flag}")
    assert (made.devices, made.replicas) == (devices, len(devices))


def test_a_count_is_of_the_devices_that_this_process_may_see(four_gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert planned("--gpus 2").devices == ("2", "3")
    with pytest.raises(UsageError, match=r"a count, and 2 devices are here\. Give --gpus 2, or name some: --gpus 2,3"):
        planned("--gpus 3")
    for none in ("0", "1000"):
        with pytest.raises(UsageError, match=f"write --gpus {none},"):
            planned(f"--gpus {none}")


def test_all_devices_are_refused_where_there_are_none_and_where_a_cluster_has_others(four_gpus, monkeypatch):
    with pytest.raises(UsageError, match=r"--launcher slurm chooses devices elsewhere\. Give a count"):
        planned("--gpus all", SlurmLauncher())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError, match=r"no device here\. Leave --gpus out: --replicas N"):
        planned("--gpus all")


@pytest.mark.parametrize(
    ("flag", "understood"),
    [
        ("2", "--gpus 2 is a count: 2 devices (device 2 alone is --gpus 2,). Starting 2 replicas, on 0, 1;"),
        ("all", "--gpus all is a count of those here: 4 devices. Starting 4 replicas, on 0, 1, 2, 3;"),
        ("0,2", "--gpus 0,2 names devices 0, 2. Starting 2 replicas, on 0, 2;"),
    ],
)
async def test_the_first_line_says_how_gpus_was_understood(four_gpus, flag, understood):
    wanted, told = gpus_of(flag), []
    made = plan(wanted.count, devices=wanted.here(), devices_named=True, understood=wanted.understood)
    fleet = Fleet(made, launcher(), told.append)
    try:
        await fleet.start()
        assert told[0].startswith(understood)
        assert [one["devices"] for one in fleet.workers()] == list(wanted.here())
    finally:
        await fleet.close()


@pytest.mark.parametrize("elsewhere", [SlurmLauncher, RayLauncher])
def test_on_a_cluster_a_count_is_of_replicas_with_one_gpu_each(elsewhere):
    made = planned("--gpus 4", chosen := elsewhere())
    assert (made.replicas, made.devices, float(chosen.options.gpus)) == (4, (), 1.0)
    assert b'"cuda"' in made.setup  # a job without its GPU does not fall back on the CPU
    with pytest.raises(UsageError, match=f"--launcher {elsewhere.name} chooses devices.*Give a count: --gpus 2"):
        planned("--gpus 0,2", elsewhere())
    with pytest.raises(UsageError, match=r"-L gpus=2.* says how many it has\. Give one of them"):
        planned("--gpus 4", elsewhere(elsewhere.Options(gpus="2")))


# Workers that can be reached


async def asked(port: int, key: str = "") -> int:
    """The status with which a replica itself answers a prompt."""
    client = HttpClient(f"http://127.0.0.1:{port}")
    headers = [("Authorization", f"Bearer {key}")] if key else []
    try:
        answer = await client.request("POST", "/v1/completions", json.dumps(ASKED).encode(), headers)
        return answer.status
    finally:
        await client.close()


def base_port(count: int) -> int:
    """The first of so many ports in a row where nothing listens."""
    while True:
        first = free_port()
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first


async def test_replicas_listen_on_ports_in_a_row_and_keep_them_when_they_are_started_again(tmp_path):
    first = base_port(2)
    async with fleet(tmp_path, replicas=2, worker_port=first, open_workers=True) as it:
        workers = await until(lambda: it.whole(2), "two workers up")
        assert [one["url"] for one in workers] == [f"http://127.0.0.1:{first + number}" for number in range(2)]
        assert [await asked(first), await asked(first + 1)] == [200, 200]
        os.kill(workers[1]["pid"], signal.SIGKILL)

        async def replaced():
            found = await it.whole(2)
            return found if found and found[1]["restarts"] == 1 else None

        workers = await until(replaced, "the replica is back")
        assert workers[1]["url"] == f"http://127.0.0.1:{first + 1}"
        assert await asked(first + 1) == 200


@pytest.mark.thorough
async def test_workers_let_in_the_keys_of_a_file_and_without_one_the_router_alone(tmp_path):
    first = base_port(1)
    async with fleet(tmp_path, replicas=1, worker_port=first, worker_keys=["of-the-file name=me"]) as it:
        await until(lambda: it.whole(1), "the worker is up")
        assert [await asked(first), await asked(first, "guess"), await asked(first, "of-the-file")] == [401, 401, 200]
        assert (await it.ask("POST", "/v1/completions", ASKED)).status == 200
    (tmp_path / "again").mkdir()
    async with fleet(tmp_path / "again", replicas=1, worker_port=first) as it:
        await until(lambda: it.whole(1), "the worker is up")
        assert await asked(first, "of-the-file") == 401


def test_workers_without_keys_are_refused_where_others_reach_them():
    assert planned("--replicas 2 --worker-api-keys none").open_workers
    for elsewhere in (SlurmLauncher, RayLauncher):
        with pytest.raises(UsageError, match=r"--worker-api-keys none lets everybody in.*Name a file of keys"):
            planned("--replicas 2 --worker-api-keys none", elsewhere())


def test_a_clash_of_ports_is_said_with_its_cure(gpuinfer, tmp_path):
    with pytest.raises(UsageError, match=r"--port 8002 is the router's.* to replica 1\. Give another base, such as 80"):
        planned("--replicas 2 --port 8002 --worker-base-port 8001")
    with pytest.raises(UsageError, match="leaves too few ports"):
        planned("--replicas 4 --worker-base-port 65533")
    first = base_port(2)
    with socket.create_server(("127.0.0.1", first + 1)):
        words = f"serve --model tiny --port 0 --replicas 2 --worker-base-port {first} --log-dir {tmp_path / 'logs'}"
        code, _, said = gpuinfer(*shlex.split(words))
    assert code == 2
    assert f"gives replica 1 port {first + 1}, which cannot be had: Address already in use." in said
    assert "End what listens there, or give another base." in said
    assert not (tmp_path / "logs").exists()


# Health


@pytest.mark.thorough
async def test_a_replica_that_does_not_answer_for_the_health_timeout_is_replaced(tmp_path):
    async with fleet(tmp_path, replicas=1, health={"interval_s": 0.1, "timeout_s": 1.5}) as it:
        workers = await until(lambda: it.whole(1), "the worker is up")
        os.kill(workers[0]["pid"], signal.SIGSTOP)

        async def replaced():
            found = await it.whole(1)
            return found if found and found[0]["restarts"] == 1 else None

        await until(replaced, "the replica is replaced")
        assert "gave no sign of life for 1.5 s and was killed" in it.log


def test_the_health_flags_take_units_and_fit_one_another(gpuinfer):
    made = planned("--replicas 2 --health-interval 250ms --health-timeout 1.5s")
    assert (made.health, made.health.late_checks) == (HealthChecks(0.25, 1.5), 6)
    code, _, said = gpuinfer(
        *shlex.split("serve --model tiny --replicas 2 --health-interval 2s --health-timeout 500ms")
    )
    assert code == 2
    assert "--health-timeout 0.5 is over before the next probe, --health-interval 2." in said
    assert "Give a timeout of a few intervals." in said


# The queue of the router


async def test_with_a_global_queue_replicas_that_are_killed_under_load_take_no_request_with_them(tmp_path):
    given = {"standin": {"answer_s": 0.02, "room": 2, "limit": 2}, "queue": "global"}
    async with fleet(tmp_path, replicas=2, **given) as it:
        await until(lambda: it.whole(2), "two workers up")
        said = {number: text(f"question {number}", number, 6) for number in range(DIFFERENT)}
        load = Load(it, 200, 24, 6, said)
        loading = asyncio.create_task(load.run())
        for done, worker in ((30, 0), (100, 1)):
            await until(lambda done=done: load.done >= done or loading.done(), "some answers")
            os.kill((await it.workers())[worker]["pid"], signal.SIGKILL)
        await loading
        assert (load.outcome.failed, load.outcome.wrong) == ([], [])
        queue = (await it.json("/stats"))["queue"]
        assert (queue["kind"], queue["waiting"], queue["refused"], queue["expired"]) == ("global", 0, 0, 0)
        assert queue["taken"] > 100  # four at once have room, and 24 are under way
        assert queue["mean_wait_s"] > 0
        metrics = (await it.ask("GET", "/metrics")).body.decode()
        for name in ("queue_length", "queue_taken_total", "queue_wait_seconds_total", "queue_full_total"):
            assert f"gpuinfer_router_{name} " in metrics
        assert (await it.json("/health"))["queued"] == 0


@pytest.mark.thorough
async def test_a_high_class_overtakes_what_waits_for_any_replica(tmp_path):
    async with fleet(tmp_path, replicas=2, standin={"answer_s": 0.1, "room": 1}, queue="global") as it:
        await until(lambda: it.whole(2), "two workers up")
        order: list[str] = []

        async def ask(name: str) -> None:
            headers = [("X-Gpuinfer-Priority", name)]
            assert (await it.ask("POST", "/v1/completions", ASKED, headers)).status == 200
            order.append(name)

        tasks = [asyncio.create_task(ask("low")) for _ in range(10)]

        async def waiting() -> bool:
            return (await it.json("/stats"))["queue"]["waiting"] > 4

        await until(waiting, "a queue")
        tasks += [asyncio.create_task(ask("high"))]
        await asyncio.gather(*tasks)
        assert order.index("high") < len(order) - 1


@pytest.mark.thorough
async def test_a_bound_of_inputs_holds_over_all_router_processes(tmp_path):
    async with fleet(
        tmp_path, replicas=1, standin={"answer_s": 0.05, "limit": 3}, max_inputs=3, router_processes=2
    ) as it:
        await until(lambda: it.whole(1), "the worker is up")
        answers = await asyncio.gather(*(it.ask("POST", "/v1/completions", ASKED) for _ in range(60)))
        assert {answer.status for answer in answers} == {200, 429}
        refused = [answer for answer in answers if answer.status == 429]
        assert {answer.headers["x-gpuinfer-error"] for answer in refused} == {"QueueFull"}  # by the router,
        workers = await it.workers()
        assert (workers[0]["retried"], workers[0]["errors"]) == (0, 0)  # and never by the replica, which has 3 at most
        assert (await it.json("/stats"))["queue"]["refused"] == len(refused)


def test_a_global_order_has_one_holder():
    assert planned("--replicas 2 --queue global").queue == "global"
    with pytest.raises(UsageError, match=r"one process must hold.*Leave one of them out"):
        planned("--replicas 2 --queue global --router-processes 2")


# Routing policies of other packages

POLICIES = '''
    """Routing policies that a third party could have written."""
    from pydantic import Field
    from gpuinfer.api import Options, ReplicaLoad, RoutingChoice, RoutingPolicy

    class Highest(RoutingPolicy):
        """Always the replica of the highest number."""

        class Options(Options):
            word: str = Field("highest", description="what it says of its choice")

        def choose(self, loads, request):
            return RoutingChoice(max(loads, key=lambda load: load.member), self.options.word)

    class Broken(RoutingPolicy):
        """Raises, answers nothing, or a replica that is not there, in turns."""
        asked = 0

        def choose(self, loads, request):
            self.asked += 1
            if self.asked % 3 == 0:
                raise KeyError("no such replica")
            return RoutingChoice(ReplicaLoad(99), "mine") if self.asked % 3 == 1 else None
'''


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """A package with two policies, installed where this process and those that it starts find it."""
    points = {"routing": {"highest": "acme_routing:Highest", "broken": "acme_routing:Broken"}}
    install(folder := tmp_path / "site", "acme-routing", points, {"acme_routing": POLICIES})
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
    yield folder
    sys.modules.pop("acme_routing", None)


def route(answer) -> dict[str, str]:
    return dict(part.split("=", 1) for part in answer.headers["x-gpuinfer-route"].split("; "))


async def test_a_routing_policy_of_another_package_routes_a_fleet(acme, tmp_path):
    given = {"routing": "highest", "routing_options": {"word": "up here"}}
    async with fleet(tmp_path, replicas=2, **given) as it:
        await until(lambda: it.whole(2), "two workers up")
        found = [route(await it.ask("POST", "/v1/completions", ASKED)) for _ in range(4)]
        assert {(one["replica"], one["why"]) for one in found} == {("1", "up here")}


async def test_a_policy_that_fails_is_named_and_the_least_loaded_replica_taken(acme, tmp_path):
    async with fleet(tmp_path, replicas=2, routing="broken") as it:
        await until(lambda: it.whole(2), "two workers up")
        answers = [await it.ask("POST", "/v1/completions", ASKED) for _ in range(6)]
        assert {answer.status for answer in answers} == {200}
        assert all(route(answer)["why"].startswith("fallback least-loaded") for answer in answers)
        assert (await it.json("/stats"))["router"]["policy_faults"] == 6
        await until(lambda: it.log.count("The least loaded replica is taken") == 3, "three notices")
        assert "policy 'broken' (package acme-routing 1.0): choose raised KeyError: 'no such replica'" in it.log
        assert "choose returned None, and that is no RoutingChoice" in it.log
        assert "and that is none of the replicas" in it.log
        assert "gpuinfer plugins check acme-routing" in it.log


def test_policies_are_listed_shown_checked_simulated_and_refused_as_plugins_are(acme, gpuinfer):
    code, said, _ = gpuinfer("plugins", "list")
    assert code == 0
    assert "acme-routing 1.0" in said
    code, said, _ = gpuinfer("plugins", "show", "policy", "highest")
    assert (code, "-R word=" in said) == (0, True)
    code, said, _ = gpuinfer("plugins", "check", "acme_routing:Highest")
    assert (code, "checks hold" in said) == (0, True), said
    code, said, _ = gpuinfer("plugins", "check", "acme_routing:Broken")
    assert code == 4
    assert "chooses one of the replicas, and says why" in said
    words = "simulate --clients 8 --alpha 1ms --beta 4ms --replicas 3 --requests 500 --routing"
    assert gpuinfer(*words.split(), "highest")[0] == 0
    code, said, noted = gpuinfer(*words.split(), "broken")
    assert (code, "policy 'broken' (package acme-routing 1.0)" in " ".join((said + noted).split())) == (0, True)
    code, _, said = gpuinfer(*words.split(), "highest", "-R", "wrod=x")
    assert (code, "-R wrod" in said and "word" in said) == (2, True)
    code, _, said = gpuinfer(*words.split(), "highets")
    assert (code, "Did you mean 'highest'" in said) == (2, True)
    code, _, said = gpuinfer("serve", "--model", "tiny", "--replicas", "2", "--routing", "highest", "-R", "wrod=x")
    assert (code, "wrod" in said and "word" in said) == (2, True)


def test_a_new_policy_keeps_the_contract_as_it_is_written(tmp_path, gpuinfer, monkeypatch):
    code, said, _ = gpuinfer("plugins", "new", "policy", "packing", "--path", str(tmp_path))
    assert (code, "gpuinfer_packing/policy.py" in said) == (0, True)
    monkeypatch.syspath_prepend(str(tmp_path / "gpuinfer-packing"))
    code, said, _ = gpuinfer("plugins", "check", "gpuinfer_packing.policy:PackingPolicy")
    assert code == 0, said
