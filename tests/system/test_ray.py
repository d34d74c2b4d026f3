"""The launcher `ray` on a real Ray, a fresh one on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
from asyncio.subprocess import PIPE
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

SHAMS = str(Path(__file__).parents[1] / "launchers")
sys.path.insert(0, SHAMS)

from plans import COMMAND, SECONDS, plan  # noqa: E402

from gpuinfer.errors import WorkError  # noqa: E402
from gpuinfer.fleet.launchers.ray import RayLauncher  # noqa: E402

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray"),  # which no test may import before the launcher
    pytest.mark.filterwarnings("ignore"),  # Ray's own
    pytest.mark.timeout(600),
]
LONG_S = 3 * SECONDS  # Ray takes its time where others compute


@contextlib.asynccontextmanager
async def launching():
    made = RayLauncher(RayLauncher.Options(cpus=0.5), COMMAND)
    made.check()
    try:
        yield made
    finally:
        await made.close()


def planned(folder, *words, **more):
    for name in ("setup.json", "key"):
        (folder / name).write_text("{}")
    return plan(folder, MARK, *words, **more)


@pytest.fixture(autouse=True)
def mark(monkeypatch):
    """By which the shams of one test are known from those of others on this machine."""
    monkeypatch.setattr(sys.modules[__name__], "MARK", f"--mark-{secrets.token_hex(8)}")


MARK = ""


def shams() -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline"])
    return [one for one in found if MARK in (words := one.info["cmdline"] or []) and "-c" not in words]


async def until(condition) -> None:
    async with asyncio.timeout(LONG_S):
        while not condition():  # noqa: ASYNC110  another program's doing
            await asyncio.sleep(0.1)


async def test_replicas_come_up_on_loopback_bring_their_logs_and_leave(tmp_path):
    async with launching() as ray:
        first, second = [await ray.launch(planned(tmp_path, index=index)) for index in (0, 1)]
        for replica in (first, second):
            host, port = await replica.ready(LONG_S)
            assert host == "127.0.0.1"
            socket.create_connection((host, port), SECONDS).close()
            assert {one.nice() for one in shams()} == {os.nice(0)}  # no background work
            await until(lambda replica=replica: "the sham replica is up" in replica.last_words())
        await first.terminate(SECONDS)
        assert (first.alive, second.alive) == (False, True)
    assert not second.alive
    await until(lambda: not shams())


async def test_an_actor_that_dies_is_noticed_takes_its_replica_along_and_is_replaced(tmp_path):
    async with launching() as ray:
        replica = await ray.launch(planned(tmp_path))
        await replica.ready(LONG_S)
        (sham,) = shams()
        sham.parent().kill()  # the actor's process, as when its node goes
        await until(lambda: not replica.alive)
        await until(lambda: not sham.is_running() or sham.status() == psutil.STATUS_ZOMBIE)
        await replica.kill()
        again = await ray.launch(planned(tmp_path, attempt=1))
        await again.ready(LONG_S)
        assert again.alive
    await until(lambda: not shams())


async def test_a_replica_that_ends_first_is_told_and_one_without_a_place_waits_for_a_bounded_time(tmp_path, caplog):
    async with launching() as ray:
        replica = await ray.launch(planned(tmp_path, "--fail", "CUDA out of memory"))
        with pytest.raises(WorkError, match="ended with code 1 before it served") as told:
            await replica.ready(LONG_S)
        assert "CUDA out of memory" in str(told.value)
        ray.options = RayLauncher.Options(cpus=4000, pending=6)
        waiting = await ray.launch(planned(tmp_path, index=1))
        with pytest.raises(WorkError, match="waited 6 s for its place"):
            await waiting.ready(LONG_S)
        assert "waits for its place: Ray has free" in caplog.text
        await waiting.terminate(1)


async def test_a_fleet_that_is_killed_leaves_nothing_behind(tmp_path):
    planned(tmp_path)
    code = (
        "import asyncio, sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from plans import COMMAND, plan\n"
        "from gpuinfer.fleet.launchers.ray import RayLauncher\n"
        "async def main():\n"
        "    replica = await RayLauncher(None, COMMAND).launch(plan(Path(sys.argv[1]), sys.argv[3]))\n"
        "    await replica.ready(180)\n"
        "    print('ready', flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    words = ["-c", code, str(tmp_path), SHAMS, MARK]
    for _ in range(3):  # Ray gives a node of its own 30 s to start, which a busy machine may need
        fleet = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=PIPE)
        async with asyncio.timeout(LONG_S):
            while (line := await fleet.stdout.readline()) not in (b"ready\n", b""):
                pass
        if line:
            break
        await fleet.wait()
    assert len(shams()) == 1
    fleet.kill()
    await fleet.communicate()
    await until(lambda: not shams())


async def test_a_cluster_that_is_not_there_is_told_in_rays_words(tmp_path):
    ray = RayLauncher(RayLauncher.Options(address="127.0.0.1:1"), COMMAND)
    with pytest.raises(WorkError, match=r"a Ray cluster at 127\.0\.0\.1:1 cannot be had"):
        await ray.launch(planned(tmp_path))
    await ray.close()
