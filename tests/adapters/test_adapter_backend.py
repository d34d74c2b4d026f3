"""The backend in this process with adapters: against transformers with the same change, loaded while it runs."""

from __future__ import annotations

import asyncio

import pytest
import torch
from helpers import AtOnce
from msgspec import structs
from random_adapters import MODULES, peft_folder, random_adapter
from text.decoders import opened
from text.tiny import tiny_checkpoint

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.errors import BadPrompt, UsageError
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.runtime.session import Session
from gpuinfer.testing import assert_ok, check_backend

WAIT_S = 60.0
TARGETS = ("q", "v", "o", "gate", "down")


@pytest.fixture(scope="module")
def model():
    return str(tiny_checkpoint("qwen2"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory, model):
    shape, here = opened(model).shape, tmp_path_factory.mktemp("adapters")
    return [str(peft_folder(here / str(seed), shape, 4, seed, TARGETS, lora_alpha=8)) for seed in range(3)]


def backend(model, **options):
    spec = ModelSpec(model, kind="text", arguments=options.pop("arguments", {}))
    return InProcess(Setup(devices=("cpu",), model=spec), context=64, slots=4, **options)


def asked(text="The tide", adapter=None, count=8, **more):
    sampling = Sampling(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=0, **more)
    return Prompt(text=text, key=text, adapter=adapter, sampling=sampling)


async def answered(infer, prompt):
    await infer.ready()  # kernels may have to be compiled
    return await asyncio.wait_for(infer(prompt), WAIT_S)


def transformers_logprobs(model, seed, tokens, scale=2.0):
    """Of each token after the first, with the adapter's change added to the weights of transformers' own model."""
    from transformers import AutoModelForCausalLM

    found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapter = random_adapter(opened(model).shape, 4, seed, TARGETS)
    for layer, lows in zip(found.model.layers, adapter.layers, strict=True):
        for name, low in zip(TARGETS, lows, strict=True):
            module = layer.get_submodule(MODULES[name])
            module.weight.data += scale * low.up @ low.down
    with torch.no_grad():
        logits = found(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    return [float(logits[at, token]) for at, token in enumerate(tokens[1:])]


async def test_log_probabilities_are_those_of_the_merged_model_in_transformers(model, folders):
    adapters = ",".join(f"a{seed}={folder}" for seed, folder in enumerate(folders))
    async with Session(backend(model, adapters=adapters), AtOnce()) as infer:
        prompts = [structs.replace(asked(adapter=f"a{seed}", prompt_logprobs=0), tokens=(5, 9, 200, 31), text=None)
                   for seed in range(3)]  # fmt: skip
        found = await asyncio.gather(*(answered(infer, one) for one in prompts))
    for seed, answer in enumerate(found):
        tokens = [5, 9, 200, 31, *answer.completions[0].tokens]
        own = [one.chosen.logprob for one in answer.prompt_logprobs[1:]]
        own += [one.chosen.logprob for one in answer.completions[0].logprobs]
        assert own == pytest.approx(transformers_logprobs(model, seed, tokens), abs=1e-4)
        assert answer.versions == (f"a{seed}@0",)
    assert len({answer.completions[0].tokens for answer in found}) == 3


async def test_an_adapter_is_exchanged_while_its_answers_are_under_way(model, folders):
    async with Session(backend(model, max_adapters=2), AtOnce()) as infer:
        base = await answered(infer, asked())
        await infer.update("v1", folders[0], adapter="policy")
        assert infer.adapters == ("policy", "policy@v1")
        first = await answered(infer, asked(adapter="policy", count=40))
        stream = infer.stream(asked(adapter="policy", count=40))
        part = await asyncio.wait_for(anext(stream), WAIT_S)
        await asyncio.wait_for(infer.update("v2", folders[1], adapter="policy"), WAIT_S)
        late = await answered(infer, asked(adapter="policy", count=40))
        parts = [part, *[one async for one in stream]]
        assert stream.result.completions == first.completions
        assert sum((one.tokens for one in parts), ()) == first.completions[0].tokens
        assert (first.version, late.version) == ("policy@v1", "policy@v2")
        assert late.completions[0].tokens != first.completions[0].tokens
        assert (await answered(infer, asked())).completions == base.completions
        with pytest.raises(UsageError, match="no folder"):
            await infer.update("v3", "nowhere", adapter="policy")
        with pytest.raises(UsageError, match="no weights at"):
            await infer.update("v3", folders[1] + "/nothing")
        await infer.unload("policy")
        assert infer.adapters == ()
        with pytest.raises(BadPrompt, match="'policy'"):
            await answered(infer, asked(adapter="policy"))
        with pytest.raises(UsageError, match="this model has none"):
            await infer.unload("policy")


async def test_adapters_may_come_with_the_model_and_none_beside_another_model(model, folders):
    async with Session(backend(model, arguments={"adapters": {"policy": folders[0]}}), AtOnce()) as infer:
        assert (await answered(infer, asked(adapter="policy"))).version == "policy@0"
        other = infer.beside(ModelSpec(str(tiny_checkpoint("llama")), kind="text"))
        assert (await answered(other, asked())).version == ""
        with pytest.raises(BadPrompt, match="has none"):
            await answered(other, asked(adapter="policy"))


@pytest.mark.parametrize("given", ["policy", "policy=", "=x", "a=x,a=y"])
def test_adapters_that_are_not_named_properly_are_refused(model, given):
    with pytest.raises(ValueError, match="name"):
        backend(model, adapters=given)


async def test_one_that_does_not_fit_ends_the_start(model, folders, tmp_path):
    shape = opened(tiny_checkpoint("qwen2", hidden_size=128)).shape
    with pytest.raises(UsageError, match="another base"):
        await Session(backend(model, adapters={"a": str(peft_folder(tmp_path / "wide", shape))}), AtOnce()).ready()
    both = backend(model, adapters={"a": folders[0]}, arguments={"adapters": {"a": folders[0]}})
    with pytest.raises(UsageError, match="named twice"):
        await Session(both, AtOnce()).ready()


def test_the_backend_keeps_all_promises_with_adapters(model, folders):
    findings = check_backend(lambda: backend(model, adapters={"policy": folders[0]}))
    assert_ok(findings)
