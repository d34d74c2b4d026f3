"""The central server's weights and adapters, changed while it runs, and there again after it was killed."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from counts import examples
from helpers import AtOnce
from hypothesis import given, settings
from hypothesis import strategies as st
from random_adapters import peft_folder
from test_adapter_backend import WAIT_S, asked
from text.decoders import opened
from text.tiny import tiny_checkpoint

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.backends.central import Central
from gpuinfer.central.protocol import WeightsChange, changes_to_replay
from gpuinfer.errors import BadPrompt, UsageError
from gpuinfer.runtime.session import Session
from gpuinfer.text.generator.adapter_versions import AdapterVersions
from gpuinfer.text.text_options import FIRST_VERSION

pytestmark = pytest.mark.usefixtures("children_forked")


async def answered(infer, prompt):
    return await asyncio.wait_for(infer(prompt), 2 * WAIT_S)


async def test_the_server_changes_its_weights_and_one_that_comes_back_has_them_again(tmp_path):
    model, other = str(tiny_checkpoint("qwen2")), str(tiny_checkpoint("qwen2", seed=1))
    shape = opened(model).shape
    folders = [str(peft_folder(tmp_path / str(seed), shape, 4, seed)) for seed in range(3)]
    setup = Setup(devices=("cpu",), model=ModelSpec(model, kind="text"))
    backend = Central(setup, context=64, slots=4, threads=1, restart=True, adapters={"start": folders[2]})
    async with Session(backend, AtOnce()) as infer:
        await infer.ready()  # kernels may have to be compiled
        base = await answered(infer, asked())
        assert infer.adapters == ("start", "start@0")
        await infer.update("v1", folders[0], adapter="policy")
        first = await answered(infer, asked(adapter="policy"))
        await infer.update("v2", folders[1], adapter="policy")
        with pytest.raises(UsageError, match="no folder"):
            await infer.update("v3", "nowhere", adapter="policy")
        await infer.update("w1", other, drain=False)
        await infer.unload("start")
        before = [await answered(infer, asked(adapter=name)) for name in (None, "policy")]
        assert [one.version for one in before] == ["w1", "policy@v2+w1"]
        assert first.version == "policy@v1"
        assert base.completions[0].tokens != before[0].completions[0].tokens
        os.kill(backend._server._child.pid, signal.SIGKILL)
        after = [await answered(infer, asked(adapter=name)) for name in (None, "policy")]
        assert [one.completions for one in after] == [one.completions for one in before]
        assert [one.version for one in after] == [one.version for one in before]
        assert infer.adapters == ("policy", "policy@v2")
        with pytest.raises(BadPrompt, match="loaded: policy, policy@v2"):
            await answered(infer, asked(adapter="start"))


class NoDecoder:
    """It computes nothing, and takes any adapter."""

    def load(self, number, packed):
        pass

    def unload(self, number):
        pass


def meant(adapters):
    """Which version each bare name means, and which of the start are there."""
    return {
        asked: one.label for asked, one in adapters._meant.items() if asked == one.name or one.version == FIRST_VERSION
    }


def do(adapters, change):
    if change.weights is None:
        adapters.unload(change.adapter)
    else:
        adapters.load(change.adapter, change.version, None)


def begun():
    adapters = AdapterVersions(NoDecoder(), 64)
    for name in AT_START:
        adapters.load(name, FIRST_VERSION, None)
    return adapters


AT_START = ("start", "begun")
NAMES = (*AT_START, "later")
LOADS = st.builds(
    lambda name, version: WeightsChange(version=version, weights="x", adapter=name),
    st.sampled_from(NAMES),
    st.sampled_from(["1", "2", "3"]),
)
UNLOADS = st.builds(
    lambda name, version: WeightsChange(adapter=f"{name}{version}"),
    st.sampled_from(NAMES),
    st.sampled_from(["", "@0", "@1", "@2"]),
)


@pytest.mark.property
@given(st.lists(LOADS | UNLOADS, max_size=8))
@settings(max_examples=examples(2000), deadline=None)
def test_after_a_restart_names_mean_what_they_meant(changes):
    adapters = begun()
    at_start, told = frozenset(adapters.known), list[WeightsChange]()
    for change in changes:
        try:
            do(adapters, change)
        except UsageError:
            continue
        told = changes_to_replay(told, change, at_start)
    again = begun()
    for change in told:
        do(again, change)
    assert meant(again) == meant(adapters)
