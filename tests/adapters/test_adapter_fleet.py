"""Adapters at every replica of a fleet, and again at one that was killed and comes back."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from random_adapters import peft_folder
from test_adapter_backend import WAIT_S, asked
from text.decoders import opened
from text.tiny import tiny_checkpoint

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.backends.fleet import FleetBackend
from gpuinfer.errors import BackendDied, UsageError
from gpuinfer.fleet.router.http_message import CHANGES as KNOWN_BY_THE_ROUTER
from gpuinfer.fleet.weight_updates import UNLOAD, WeightUpdates
from gpuinfer.runtime.session import Session
from gpuinfer.serving.openai.schema import CHANGES
from gpuinfer.strategies.dynamic import Dynamic


class Worker:
    """Stands in for a replica: it takes what it is told, or refuses it, or is gone."""

    ours, leaving, url = True, False, ""
    knows = None  # the adapters that it can unload; None: any

    def __init__(self, id, state="up", refuses=None):
        self.id, self.attempts, self.state, self.refuses, self.told = id, 1, state, refuses, []


class Told(WeightUpdates):
    async def _ask(self, worker, path, body):
        await asyncio.sleep(0)
        if worker.refuses is not None:
            raise worker.refuses
        if path == UNLOAD and worker.knows is not None and body["lora_name"] not in worker.knows:
            raise UsageError("no such adapter")
        worker.told.append(body.get("version") or body["lora_name"])


def adapter(name, version):
    return {"version": version, "weights": "x", "adapter": name}


def test_the_router_sends_changes_to_the_supervisor():
    assert frozenset(CHANGES) == KNOWN_BY_THE_ROUTER


async def test_memory_that_replicas_give_back_is_added_up_and_one_that_cannot_is_left_out():
    class Freeing(WeightUpdates):
        async def _ask(self, worker, path, body):
            if worker.refuses is not None:
                raise worker.refuses
            assert (path, body) == ("/v1/free_memory", {})
            return {"model": "a", "freed_bytes": 10 * worker.id, "free_bytes": 1000 * worker.id, "freed_pages": 1}

    changes = Freeing("key")
    workers = [Worker(1), Worker(2), Worker(3, "starting"), Worker(4, refuses=BackendDied("gone"))]
    told = await changes.free_memory(workers, {"model": None})
    assert told == {"freed_bytes": 30, "freed_pages": 2, "free_bytes": 1000, "replicas": 2}
    with pytest.raises(BackendDied, match="gone"):
        await changes.free_memory(workers[3:], {})
    with pytest.raises(BackendDied, match="no replica is up"):
        await changes.free_memory(workers[2:3], {})


async def test_one_that_starts_later_has_the_newest_of_each_before_it_serves():
    changes, first, late = Told("key"), Worker(1), Worker(2, "starting")
    for name, version in (("a", "1"), ("b", "1"), ("a", "2"), (None, "w1")):
        await changes.update([first, late], adapter(name, version))
    assert (first.told, late.told) == (["1", "1", "2", "w1"], [])
    await changes.catch_up(late)
    assert late.told == ["1", "2", "w1"]
    await changes.update([first, late], adapter("a", "3"))
    assert late.told[-1] == "3", "though it is not up yet"
    await changes.unload([first, late], "b")
    late.attempts, late.told = 2, []
    await changes.catch_up(late)
    assert late.told == ["w1", "3", "b"]
    assert changes.adapters == ("a", "a@3")


async def test_what_was_there_from_the_start_and_was_unloaded_stays_away():
    changes, first, late = Told("key"), Worker(1), Worker(2, "starting")
    await changes.unload([first, late], "start")
    await changes.update([first, late], adapter("start", "2"))
    await changes.catch_up(late)
    assert late.told == ["start", "2"]
    late.attempts, late.told, late.knows = 2, [], ()
    await changes.catch_up(late)
    assert late.told == ["2"], "it was not there at that start"
    late.attempts, late.told, late.knows = 3, [], None
    await changes.catch_up(late)
    assert late.told == ["2"], "nor is it asked for again"


async def test_what_the_first_refuses_is_told_to_no_other_and_one_that_is_gone_fails_nothing():
    changes, first, second = Told("key"), Worker(1, refuses=UsageError("no such folder")), Worker(2)
    with pytest.raises(UsageError, match="no such folder"):
        await changes.update([first, second], adapter("a", "1"))
    assert (second.told, changes.adapters) == ([], ())
    with pytest.raises(BackendDied, match="no replica is up"):
        await changes.update([Worker(3, "starting")], adapter("a", "1"))
    first.refuses, second.refuses = None, BackendDied("gone")
    await changes.update([first, second], adapter("a", "1"))
    assert first.told == ["1"]
    second.refuses, second.attempts = None, 2
    await changes.catch_up(second)
    assert second.told == ["1"]


@pytest.mark.thorough
async def test_replicas_take_adapters_and_one_that_was_killed_has_them_again(tmp_path):
    model = str(tiny_checkpoint("qwen2"))
    folders = [str(peft_folder(tmp_path / str(seed), opened(model).shape, 4, seed)) for seed in range(2)]
    setup = Setup(devices=("cpu",), model=ModelSpec(model, kind="text"))
    backend = FleetBackend(setup, context=64, slots=4, threads=1, replicas=2)

    async def answered(count=12):
        asking = (infer(asked(text=f"The tide {number}", adapter="policy")) for number in range(count))
        return [one.completions for one in await asyncio.wait_for(asyncio.gather(*asking), 4 * WAIT_S)]

    async with Session(backend, Dynamic()) as infer:
        await infer.ready()
        await infer.update("v1", folders[0], adapter="policy")
        first = await answered()
        await infer.update("v2", folders[1], adapter="policy")
        second = await answered()
        assert {one[0].versions for one in first} == {((0, "policy@v1"),)}
        assert {one[0].versions for one in second} == {((0, "policy@v2"),)}
        with pytest.raises(UsageError, match="no folder"):
            await infer.update("v3", "nowhere", adapter="policy")
        fleet = backend._owned._fleet
        victim = next(iter(fleet._members.own))
        os.kill(victim.pid, signal.SIGKILL)
        assert await answered() == second
        async with asyncio.timeout(4 * WAIT_S):
            while not (victim.attempts > 1 and victim.state == "up"):  # noqa: ASYNC110  it tells nobody
                await asyncio.sleep(0.05)
        assert await answered(24) == await answered(24)
        assert (await answered())[0] == second[0]
        await infer.unload("policy")
        assert infer.adapters == ()
