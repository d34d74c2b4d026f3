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


async def test_another_model_has_an_engine_of_its_own_that_starts_with_its_first_request(tmp_path):
    ready, closed = tmp_path / "ready", tmp_path / "closed"
    async with Session(Doubler(ready_file=str(ready), closed_file=str(closed)), AtOnce()) as infer:
        other = infer.beside(OTHER)
        assert infer.beside(ModelSpec("elsewhere/other")) is other
        assert await infer(1) == 2
        assert [lane["name"] for lane in infer.snapshot().lanes] == ["forward 0"]
        assert len(ready.read_text().split()) == 1
        assert await other(2) == 4
        assert len(ready.read_text().split()) == 2
        await infer.stop()
        assert other.stopping.is_set()
    assert len(closed.read_text().split()) == 2
    with pytest.raises(Closed):
        await other(3)


async def test_the_run_counts_both_since_its_mark_and_the_ledger_still_sums():
    async with Session(Doubler(), AtOnce()) as infer:
        alone = infer.snapshot()
        other, third = infer.beside(OTHER), infer.beside(ModelSpec("another/other"))
        await asyncio.gather(infer(1), infer(2), other(3), third(4))
        snapshot = infer.snapshot()
        await infer.mark()
        await other(1)
        assert infer.snapshot().requests == 1
    assert (snapshot.requests, snapshot.rows) == (4, 4)
    assert snapshot.rss_peak_mb < 1.5 * alone.rss_peak_mb  # the process is counted once
    names = ["forward 0", "beside other: forward 0", "beside other 2: forward 0"]
    assert [lane["name"] for lane in snapshot.lanes] == names
    assert sum(time_s(snapshot.lanes, 5.0).values()) == pytest.approx(15.0)


async def test_two_models_of_text_are_both_named():
    prompt = Prompt(text="one two", sampling=Sampling(max_tokens=4), key="a")
    async with Session(InProcess(Setup(TINY), **FEW), AtOnce()) as infer:
        other = infer.beside(ModelSpec("tiny", kind="text", arguments={"seed": 1}))
        await asyncio.gather(infer(prompt), other(prompt))
        snapshot = infer.snapshot()
    device = snapshot.device
    assert (device["model"]["model"], device["beside"]["tiny"]["model"], device["tokens"]["output"]) == (
        "tiny",
        "tiny",
        8,
    )
    assert [lane["name"] for lane in snapshot.lanes] == [
        *("forward 0", "prompts 0", "beside tiny: forward 0", "beside tiny: prompts 0")
    ]


async def test_each_backend_starts_another_of_its_kind_beside_it_unless_it_is_a_way_to_a_server():
    async with Session(Far(), AtOnce()) as infer:
        with pytest.raises(UsageError, match="'elsewhere/other' would be another beside it"):
            infer.beside(OTHER)
    with pytest.raises(UsageError, match="Leave -B endpoint out"):
        FleetBackend(Setup(TINY), endpoint="http://127.0.0.1:1").beside(OTHER)
    vllm = {"adapters": {"policy": "somewhere"}, "max_num_seqs": 4}
    for kind, options in ((Central, {"slots": 4}), (Vllm, vllm), (FleetBackend, {"replicas": 2})):
        one = kind(Setup(TINY), **options).beside(OTHER)
        assert isinstance(one, kind)
        assert one.setup.model is OTHER
        assert not getattr(one.options, "adapters", None)  # those are of the first model
        assert all(getattr(one.options, name) == value for name, value in options.items() if name != "adapters")
