"""Adapters over models that transformers' own code computes: against transformers with merged weights, against native
decoders, and against themselves in other company.
"""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import save_file
from text.oracle import peer
from text.test_transformers_decoder import TEXTS, opened, tokens_of
from text.tiny import tiny_checkpoint
from text.tiny_families import tiny_family
from text.toy import run
from transformers.pytorch_utils import Conv1D

from gpuinfer.api import ModelSpec
from gpuinfer.errors import UsageError
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.text.checkpoint import open_checkpoint, read_adapter
from gpuinfer.text.decoder import open_decoder

SCALE = 2.0
GREEDY = Sampling(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
NAMES = ("one", None, "two", None, "one", "two")  # the adapters of TEXTS


def low_ranks(model, seed, rank=4, without=("lm_head",)):
    """Random ones, by the names of all linear layers."""
    dice = torch.Generator().manual_seed(seed)
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D) and not any(part in name for part in without):
            outputs, inputs = module.weight.shape if isinstance(module, torch.nn.Linear) else module.weight.T.shape
            down = torch.randn(rank, inputs, generator=dice) / inputs**0.5
            found[name] = down, 0.2 * torch.randn(outputs, rank, generator=dice) / rank**0.5
    return found


def folder_of(place, lows, rank=4, **config):
    """As PEFT writes it, with a scale of SCALE."""
    halves = {f"base_model.model.{name}.lora_{half}.weight": weight.contiguous()
              for name, pair in lows.items() for half, weight in zip("AB", pair, strict=True)}  # fmt: skip
    place.mkdir(parents=True, exist_ok=True)
    save_file(halves, place / "adapter_model.safetensors")
    own = {"peft_type": "LORA", "r": rank, "lora_alpha": SCALE * rank, "target_modules": "all-linear"}
    (place / "adapter_config.json").write_text(json.dumps(own | config))
    return str(place)


def merged(folder, lows):
    """Transformers' model with the change added to its weights."""
    model = copy.deepcopy(peer(folder))
    for name, (down, up) in lows.items():
        model.get_submodule(name).weight.data += SCALE * up @ down
    return model


def adapted(family, tmp_path):
    """A folder, its two adapters by name, and the models that these come to; None: the base."""
    folder = tiny_family(family)
    lows = {name: low_ranks(peer(folder), seed) for seed, name in enumerate(("one", "two"))}
    places = {name: folder_of(tmp_path / name, one) for name, one in lows.items()}
    return folder, places, {None: peer(folder), **{name: merged(folder, one) for name, one in lows.items()}}


def asked(sampling=GREEDY):
    pairs = zip(TEXTS, NAMES, strict=True)
    return [Prompt(text=text, key=text, adapter=name, sampling=sampling) for text, name in pairs]


def assert_as_merged(generator, models, within):
    prompts = asked()
    outcomes = run(generator, prompts)
    for prepared, prompt, outcome in zip(generator.prepare(prompts), prompts, outcomes, strict=True):
        begun, answer = prepared.tokens.tolist(), outcome.completions[0]
        with torch.inference_mode():
            logits = models[prompt.adapter](torch.tensor([begun + list(answer.tokens)])).logits[0].log_softmax(-1)
        expected = [float(logits[len(begun) - 1 + at, token]) for at, token in enumerate(answer.tokens)]
        assert [one.chosen.logprob for one in answer.logprobs] == pytest.approx(expected, abs=within)
        assert answer.versions == (((0, f"{prompt.adapter}@0"),) if prompt.adapter else ((0, ""),))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("family", "dtype", "deterministic"),
    [
        ("gemma2", "float32", False),
        ("olmo2", "float32", True),
        ("gemma2", "bfloat16", True),
        ("phi", "float32", False),
        ("deepseek_v3", "float32", False),
    ],
)
def test_log_probabilities_are_those_of_the_merged_model_in_transformers(family, dtype, deterministic, tmp_path):
    """Two adapters and none, in chunks and in company."""
    folder, adapters, models = adapted(family, tmp_path)
    generator = opened(folder, dtype=dtype, deterministic=deterministic, adapters=adapters)
    assert_as_merged(generator, models, 1e-4 if dtype == "float32" else 0.2)
    generator.close()


@pytest.mark.sample
@pytest.mark.parametrize("deterministic", [False, True])
def test_so_they_are_where_torch_computes(deterministic, tmp_path, monkeypatch):
    monkeypatch.setattr(open_decoder, "kernels_for", lambda dtype: False)
    folder, adapters, models = adapted("gemma2", tmp_path)
    generator = opened(folder, deterministic=deterministic, adapters=adapters)
    assert_as_merged(generator, models, 1e-4)
    generator.close()


def test_embeddings_are_the_last_states_of_the_merged_model(tmp_path):
    folder, adapters, models = adapted("gemma2", tmp_path)
    generator = opened(folder, adapters=adapters)
    prompts = [Prompt(text=TEXTS[4], key=str(name), embed="last", adapter=name) for name in ("one", None, "two")]
    found = [torch.frombuffer(bytearray(one.embedding), dtype=torch.float32) for one in run(generator, prompts)]
    tokens = torch.tensor(next(iter(generator.prepare(prompts))).tokens.tolist())[None]
    generator.close()
    for prompt, own in zip(prompts, found, strict=True):
        with torch.inference_mode():
            state = models[prompt.adapter].base_model(tokens).last_hidden_state[0, -1]
        assert torch.allclose(own, state / state.norm(), atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_native_family_has_the_same_tokens_in_transformers_code(family, tmp_path):
    folder = tiny_checkpoint(family)
    lows = low_ranks(peer(folder), 1)
    place = folder_of(tmp_path / "one", lows, use_rslora=True, alpha_pattern={"c_fc|up_proj": 4})
    found = []
    for decoder in ("native", "transformers"):
        generator = opened(folder, decoder=decoder, adapters={"one": place, "two": place})
        found.append(tokens_of(generator, asked()))
        generator.close()
    assert found[0] == found[1]


@pytest.mark.sample
@pytest.mark.parametrize("kernels", [True, False], ids=["own kernels", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_answers_have_the_same_bits_in_any_company(dtype, kernels, tmp_path, monkeypatch):
    if not kernels:
        monkeypatch.setattr(open_decoder, "kernels_for", lambda dtype: False)
    folder, adapters, _ = adapted("olmo2", tmp_path)
    prompts = asked(Sampling(max_tokens=6, logprobs=2, ignore_eos=True))
    generator = opened(folder, dtype=dtype, deterministic=True, adapters=adapters)
    together = [outcome.completions for outcome in run(generator, prompts)]
    generator.close()
    generator = opened(folder, dtype=dtype, deterministic=True, step_tokens=64, slots=1, adapters=adapters)
    alone = [outcome.completions for prompt in reversed(prompts) for outcome in run(generator, [prompt])]
    generator.close()
    assert together == alone[::-1]


def test_a_version_is_exchanged_and_one_that_is_unloaded_leaves_the_model_as_it_was(tmp_path):
    folder, places, _ = adapted("gemma2", tmp_path)
    generator = opened(folder)
    base = [Prompt(text=text, key=text, sampling=GREEDY) for text in TEXTS]
    of_policy = [Prompt(text=text, key=text, adapter="policy", sampling=GREEDY) for text in TEXTS]
    before, found = tokens_of(generator, base), []
    for version, name in (("1", "one"), ("2", "two"), ("3", "one")):
        generator.load_adapter("policy", version, generator.read_adapter("policy", places[name]))
        found.append(tokens_of(generator, of_policy))
    assert before != found[0]
    assert found[0] != found[1]
    assert found[0] == found[2]
    generator.unload_adapter("policy")
    assert tokens_of(generator, base) == before
    assert not any(module._forward_hooks for module in generator.decoder._model.modules())
    generator.close()


def checkpoint_of(family):
    return open_checkpoint(ModelSpec(str(tiny_family(family)), kind="text"), "transformers")


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("gemma2", "lm_head"),
        ("gemma2", "model.embed_tokens"),
        ("gemma2", "model.layers.2.self_attn.q_proj"),
        ("gemma2", "model.layers.0.self_attn.qkv_proj"),
        ("mixtral", "model.layers.0.mlp.experts.0.w1"),
        ("qwen3_moe", "model.layers.0.mlp.experts.gate_up_proj"),
        ("gpt_oss", "model.layers.0.mlp.router"),
    ],
)
def test_what_no_adapter_can_be_added_to_is_refused_by_name(family, module, tmp_path):
    place = folder_of(tmp_path / "a", {module: (torch.zeros(4, 64), torch.zeros(64, 4))})
    with pytest.raises(
        UsageError, match=rf"adapts 'base_model.model.{module}.*q_proj.* can be adapted.*not experts.*Merge it"
    ):
        read_adapter(checkpoint_of(family), place)


def test_adapters_of_another_shape_or_rank_or_without_a_half_are_refused(tmp_path):
    name, checkpoint = "model.layers.0.self_attn.q_proj", checkpoint_of("gemma2")
    wide = folder_of(tmp_path / "wide", {name: (torch.zeros(4, 65), torch.zeros(64, 4))})
    with pytest.raises(UsageError, match="for another base"):
        read_adapter(checkpoint, wide)
    low = folder_of(tmp_path / "low", {name: (torch.zeros(4, 64), torch.zeros(64, 4))}, rank=8)
    with pytest.raises(UsageError, match="says rank 8"):
        read_adapter(checkpoint, low)
    half = {f"base_model.model.{name}.lora_A.weight": torch.zeros(4, 64)}
    for tensors, words in ((half, f"no lora_B of {name}"), ({}, "no tensor at all")):
        save_file(tensors, tmp_path / "low" / "adapter_model.safetensors")
        with pytest.raises(UsageError, match=words):
            read_adapter(checkpoint, low)


def test_a_mixture_of_experts_has_adapters_over_its_attention(tmp_path):
    folder = tiny_family("qwen3_moe")
    lows = low_ranks(peer(folder), 3, without=("lm_head", "mlp"))
    place = folder_of(tmp_path / "one", lows)
    generator = opened(folder, adapters={"one": place, "two": place})
    assert_as_merged(generator, {None: peer(folder), "one": merged(folder, lows), "two": merged(folder, lows)}, 1e-4)
    generator.close()
