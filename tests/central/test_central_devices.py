"""The central server with several devices: rows and text, and devices that fail over there."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from servers import until
from texts import CONTEXT, SLOTS, asking, short

from gpuinfer.api import BackendContext, ModelSpec, Setup
from gpuinfer.backends.central import Central
from gpuinfer.central.server import ServerProcess
from gpuinfer.config import registry
from gpuinfer.engine.engine import Engine
from gpuinfer.errors import BackendDied, UsageError
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.text.text_options import TorchModelOptions

pytestmark = pytest.mark.usefixtures("children_forked")

SECONDS = 120
FEATURES = 4
DEVICES = ("cpu", "cpu")


async def asked(model: str, count: int = 40, **options):
    """What comes of so many blocks of two rows, and what the server says of its devices."""
    backend = Central(Setup(ModelSpec(f"failing_devices:{model}", None, FEATURES), DEVICES), max_rows=2, **options)
    engine = Engine(backend, Dynamic(backend.setup))
    await engine.start()
    try:
        blocks = [np.full((2, FEATURES), n, np.float32) for n in range(count)]
        found = await asyncio.wait_for(
            asyncio.gather(*(engine.submit(block, rows=2) for block in blocks), return_exceptions=True), SECONDS
        )
        return found, await backend.stats()
    finally:
        await engine.close()


async def test_a_device_that_fails_costs_none_of_its_rows_and_when_all_have_failed_the_server_says_why():
    found, stats = await asked("first_fails_later")
    assert [float(answer[0, 0]) for answer in found] == [4.0 * n for n in range(40)]
    devices = stats["device"]["devices"]
    assert (devices["cpu:0"]["batches"], devices["cpu:1"]["batches"]) == (3, 37)
    assert "unspecified launch failure" in devices["cpu:0"]["failed"]
    assert [lane["name"] for lane in stats["lanes"]] == ["forward cpu:0 0", "forward cpu:1 0"]
    found, _ = await asked("all_fail")
    assert sum(isinstance(one, BackendDied) for one in found) == 37
    assert any("all devices have failed" in str(one) for one in found)


@pytest.mark.thorough
def test_text_is_that_of_one_device():
    prompts = [short(str(n)) for n in range(3 * SLOTS)]

    def answers(devices):
        setup = Setup(ModelSpec("tiny", kind="text"), devices=devices, deterministic=True)
        tuning = TorchModelOptions(slots=SLOTS, context=CONTEXT, threads=1)
        server = ServerProcess(setup, tuning, registry.load("strategies", "dynamic")(setup))
        server.start()
        try:
            found = asyncio.run(_all_of(server, prompts))
            until(lambda: server.stats().device["tokens"]["output"] == 4 * len(prompts), "all its counters")
            return [[one.tokens for one in answer.completions] for answer in found], server.limits, server.stats()
        finally:
            server.close(quiet=True)

    one, _, _ = answers(("cpu",))
    two, limits, stats = answers(DEVICES)
    assert one == two
    assert (limits.slots, limits.max_rows) == (2 * SLOTS, SLOTS)
    assert all(device["rows"] for device in stats.device["devices"].values())


async def _all_of(server, prompts):
    async with asking(server) as engine:
        return await asyncio.wait_for(asyncio.gather(*map(engine.submit, prompts)), SECONDS)


async def test_a_device_that_is_not_there_is_told_as_at_home():
    spec = ModelSpec("failing_devices:well", None, FEATURES)
    backend = Central(Setup(spec, ("cpu", "cuda:77")))
    with pytest.raises(UsageError, match="cuda:77"):
        await backend.start(BackendContext(strategy=Dynamic(backend.setup)))
    await backend.close()
