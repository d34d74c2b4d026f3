"""Another model beside a run's own: one session inside the other, and what the run counts of both."""

import asyncio

import pytest
from helpers import AtOnce, Doubler
from remotes import Far

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.backends.central import Central
from gpuinfer.backends.fleet import FleetBackend
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.backends.vllm import Vllm
from gpuinfer.errors import Closed, UsageError
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.report.report import time_s
from gpuinfer.runtime.session import Session

OTHER = ModelSpec("elsewhere/other")
TINY = ModelSpec("tiny", kind="text")
FEW = {"slots": 4, "context": 64}


def prompt(key="a"):
    return Prompt(text="one two", sampling=Sampling(max_tokens=4), key=key)


async def test_another_model_has_an_engine_of_its_own_that_starts_with_its_first_request(tmp_path):
    ready, closed = tmp_path / "ready", tmp_path / "closed"
    async with Session(Doubler(ready_file=str(ready), closed_file=str(closed)), AtOnce()) as infer:
        other = infer.beside(OTHER)
        assert infer.beside(ModelSpec("elsewhere/other")) is other
        assert await infer(1) == 2
        assert len(ready.read_text().split()) == 1
        assert await other(2) == 4
        assert len(ready.read_text().split()) == 2
    assert len(closed.read_text().split()) == 2
    with pytest.raises(Closed):
        await other(3)


async def test_one_that_is_never_asked_costs_nothing(tmp_path):
    ready = tmp_path / "ready"
    async with Session(Doubler(ready_file=str(ready)), AtOnce()) as infer:
        infer.beside(OTHER)
        await infer(1)
        assert [lane["name"] for lane in infer.snapshot().lanes] == ["forward 0"]
    assert len(ready.read_text().split()) == 1


async def test_the_run_counts_both_and_the_ledger_still_sums():
    async with Session(Doubler(), AtOnce()) as infer:
        other, third = infer.beside(OTHER), infer.beside(ModelSpec("another/other"))
        await asyncio.gather(infer(1), infer(2), other(3), third(4))
        snapshot = infer.snapshot()
    assert (snapshot.requests, snapshot.rows) == (4, 4)
    names = ["forward 0", "beside other: forward 0", "beside other 2: forward 0"]
    assert [lane["name"] for lane in snapshot.lanes] == names
    assert sum(time_s(snapshot.lanes, 5.0).values()) == pytest.approx(15.0)


async def test_what_the_process_took_is_counted_once():
    async with Session(Doubler(), AtOnce()) as infer:
        alone = infer.snapshot()
        await infer.beside(OTHER)(1)
        both = infer.snapshot()
    assert both.rss_peak_mb < 1.5 * alone.rss_peak_mb


async def test_a_mark_forgets_what_came_before_it_of_both():
    async with Session(Doubler(), AtOnce()) as infer:
        other = infer.beside(OTHER)
        await asyncio.gather(infer(1), other(1))
        await infer.mark()
        await other(1)
        assert infer.snapshot().requests == 1


async def test_both_are_asked_to_stop_at_once():
    async with Session(Doubler(), AtOnce()) as infer:
        other = infer.beside(OTHER)
        await infer.stop()
        assert other.stopping.is_set()


async def test_two_models_of_text_are_both_named():
    async with Session(InProcess(Setup(TINY), **FEW), AtOnce()) as infer:
        other = infer.beside(ModelSpec("tiny", kind="text", arguments={"seed": 1}))
        await asyncio.gather(infer(prompt()), other(prompt()))
        snapshot = infer.snapshot()
    assert snapshot.device["model"]["model"] == "tiny"
    assert snapshot.device["beside"]["tiny"]["model"] == "tiny"
    assert snapshot.device["tokens"]["output"] == 8
    assert [lane["name"] for lane in snapshot.lanes] == [
        *("forward 0", "prompts 0", "beside tiny: forward 0", "beside tiny: prompts 0")
    ]


async def test_a_way_to_a_server_has_no_other_model():
    async with Session(Far(), AtOnce()) as infer:
        with pytest.raises(UsageError, match="'elsewhere/other' would be another beside it"):
            infer.beside(OTHER)


def test_a_central_server_is_started_for_each():
    one = Central(Setup(TINY), slots=4).beside(OTHER)
    assert isinstance(one, Central)
    assert one.setup.model is OTHER
    assert one.options.slots == 4


def test_vllm_has_an_engine_for_each_and_its_adapters_are_of_the_first():
    one = Vllm(Setup(TINY), adapters={"policy": "somewhere"}, max_num_seqs=4).beside(OTHER)
    assert isinstance(one, Vllm)
    assert not one.options.adapters
    assert one.options.max_num_seqs == 4


def test_a_fleet_is_started_for_each_but_a_server_that_runs_has_one_model():
    one = FleetBackend(Setup(TINY), replicas=2).beside(OTHER)
    assert isinstance(one, FleetBackend)
    assert one.options.replicas == 2
    with pytest.raises(UsageError, match="Leave -B endpoint out"):
        FleetBackend(Setup(TINY), endpoint="http://127.0.0.1:1").beside(OTHER)
