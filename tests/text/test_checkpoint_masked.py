"""Folders of diffusion models: a published config.json becomes a shape; what does not fit is named, with a cure."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_checkpoint_config import anything
from text.decoders import opened
from text.diffusion_oracle import opened as stored
from text.tiny import copy_of
from text.tiny_diffusion import CONFIGS, FAMILIES, MASK, config_of, tiny_diffusion

from gpuinfer.api import ModelSpec
from gpuinfer.errors import UsageError
from gpuinfer.generation import Prompt
from gpuinfer.text.checkpoint import open_checkpoint, read_adapter
from gpuinfer.text.checkpoint.loader import read_other_weights
from gpuinfer.text.checkpoint.model_family import biases_of, shape_of
from gpuinfer.text.checkpoint.tensor_layout import RotaryLayout, names_of, parts_of
from gpuinfer.text.language import open_language
from gpuinfer.text.transformer import Experts, Masking, Shape

LLADA_8B = {
    "d_model": 4096, "embedding_size": 126464, "eos_token_id": 126081, "mask_token_id": 126336,
    "max_sequence_length": 4096, "mlp_hidden_size": 12288, "n_heads": 32, "n_kv_heads": 32, "n_layers": 32,
    "pad_token_id": 126081, "rope_theta": 500000.0, "vocab_size": 126464,
}  # fmt: skip
LLADA_MOE = {
    "dense_intermediate_size": 8192, "eos_token_id": 156892, "expert_intermediate_size": 1024, "hidden_size": 2048,
    "mask_token_id": None, "max_position_embeddings": 8192, "moe_layer_freq": [1] * 16, "num_attention_heads": 16,
    "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16,
    "pad_token_id": 156892, "rms_norm_eps": 1e-05, "rope_theta": 50000, "vocab_size": 157184,
}  # fmt: skip
LLADA2_MINI = {
    "eos_token_id": None, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 5120, "mask_token_id": None,
    "max_position_embeddings": 32768, "moe_intermediate_size": 512, "n_group": 8, "num_attention_heads": 16,
    "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 20, "num_key_value_heads": 4,
    "pad_token_id": 156892, "rope_theta": 600000, "rotary_dim": 64, "topk_group": 4, "vocab_size": 157184,
}  # fmt: skip
DREAM_7B = {
    "bos_token_id": 151643, "eos_token_id": 151643, "hidden_size": 3584, "intermediate_size": 18944,
    "mask_token_id": 151666, "max_position_embeddings": 131072, "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "pad_token_id": 151643, "rope_theta": 1000000.0, "vocab_size": 152064,
}  # fmt: skip
SDAR_4B = {
    "bos_token_id": 151643, "block_size": None, "eos_token_id": 151643, "head_dim": 128, "hidden_size": 2560,
    "intermediate_size": 9728, "mask_token_id": None, "max_position_embeddings": 32768, "num_attention_heads": 32,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "rope_theta": 1000000.0, "tie_word_embeddings": True,
    "vocab_size": 151936,
}  # fmt: skip
PUBLISHED = {"llada": LLADA_8B, "llada-moe": LLADA_MOE, "llada2": LLADA2_MINI, "dream": DREAM_7B, "sdar": SDAR_4B}
MASKINGS = {
    "llada": Masking(126336),
    "llada-moe": Masking(156895),
    "llada2": Masking(156895, 32, guided=False),
    "dream": Masking(151666, shifted=True, guided=False),
    "sdar": Masking(151669, 4, guided=False),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_published_config_says_all_that_is_needed_or_it_is_known(family: str) -> None:
    shape = shape_of(config_of(family, **PUBLISHED[family]))
    assert shape.family == family
    assert shape.masking == MASKINGS[family]
    assert shape.end_tokens[0] == {"dream": 151643, "sdar": 151643, "llada": 126081}.get(family, 156892)


@pytest.mark.parametrize(
    ("family", "billions"),
    [("llada", 8.016), ("llada-moe", 7.357), ("llada2", 16.256), ("dream", 7.616), ("sdar", 4.022)],
)
def test_a_published_model_has_as_many_parameters_as_its_makers_say(family: str, billions: float) -> None:
    config, names = config_of(family, **PUBLISHED[family]), names_of(family)
    layout = RotaryLayout(shape_of(config), biases_of(config), names.prefix, None, names)
    assert sum(prod(part.shape) for part in parts_of(layout)) / 1e9 == pytest.approx(billions, abs=1e-3)


def test_an_8b_llada_ends_with_its_text_or_its_turn() -> None:
    shape = shape_of(config_of("llada", **LLADA_8B))
    assert shape.end_tokens == (126081, 126348)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate) == (32, 32, 128, 12288)
    assert (shape.norm_eps, shape.positions) == (1e-5, 4096)


def test_experts_are_those_of_the_configs() -> None:
    mini = shape_of(config_of("llada2", **LLADA2_MINI))
    assert mini.experts == Experts(256, 8, 512, 512, (0,), "sigmoid", True, 2.5, 8, 4)
    assert mini.rope is not None
    assert len(mini.rope.inverse_frequencies) == 32
    assert shape_of(config_of("llada-moe", **LLADA_MOE)).experts == Experts(64, 8, 1024)
    assert shape_of(config_of("llada-moe", moe_layer_freq=[0, 1])).experts == Experts(8, 3, 48, dense=(0,))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_published_config_holds_beside_is_passed_over(family: str) -> None:
    few = ("auto_map", "initializer_range", "transformers_version", "init_fn", "precision", "debug", "output_dropout")
    bare = {name: value for name, value in config_of(family).items() if name not in few}
    assert shape_of(bare) == shape_of(config_of(family))


STRANGE = [
    pytest.param("llada", {"scale_logits": True}, "'scale_logits': True", id="logits scaled"),
    pytest.param("llada", {"alibi": True}, "alibi", id="slopes"),
    pytest.param("llada", {"block_type": "sequential"}, "'block_type': 'sequential'", id="another block"),
    pytest.param("llada", {"layer_norm_type": "default"}, "layer_norm_type", id="another norm"),
    pytest.param("llada", {"attention_layer_norm": True}, "attention_layer_norm", id="norms over all heads"),
    pytest.param("llada", {"include_bias": True}, "include_bias", id="biases, also of norms and head"),
    pytest.param("llada", {"input_emb_norm": True}, "input_emb_norm", id="embeddings scaled"),
    pytest.param("llada", {"clip_qkv": 8.0}, "clip_qkv", id="clipped attention"),
    pytest.param("llada", {"rope": False}, "'rope': False", id="no positions"),
    pytest.param("llada-moe", {"norm_topk_prob": True}, "norm_topk_prob", id="weights of experts normalised"),
    pytest.param("llada-moe", {"routed_scaling_factor": 2.0}, "routed_scaling_factor", id="experts scaled"),
    pytest.param("llada-moe", {"shared_expert_intermediate_size": 64}, "shared_expert", id="a shared expert"),
    pytest.param("llada-moe", {"moe_router_score_function": "sigmoid"}, "score_function", id="another router"),
    pytest.param("llada2", {"score_function": "softmax"}, "score_function", id="another router of LLaDA2"),
    pytest.param("llada2", {"norm_topk_prob": False}, "norm_topk_prob", id="not normalised"),
    pytest.param("llada2", {"use_qk_norm": False}, "use_qk_norm", id="no norms of q and k"),
    pytest.param("llada2", {"norm_head": True}, "norm_head", id="a head that is normed"),
    pytest.param("llada2", {"num_nextn_predict_layers": 1}, "num_nextn", id="layers of more"),
    pytest.param("dream", {"use_sliding_window": True}, "use_sliding_window", id="a window"),
    pytest.param("dream", {"num_experts": 8}, "num_experts", id="a Dream of experts"),
    pytest.param("sdar", {"something_new": 1}, "something_new", id="what nobody knows"),
    pytest.param("sdar", {"qk_layernorm": True}, "qk_layernorm", id="norms that another family has"),
]


@pytest.mark.parametrize(("family", "changes", "named"), STRANGE)
def test_a_key_that_changes_what_is_computed_is_named(family: str, changes: dict[str, Any], named: str) -> None:
    message = refusal(config_of(family, **changes))
    assert named in message
    assert "remove it from config.json" in message


def refusal(config: dict[str, Any], **told: Any) -> str:
    with pytest.raises(UsageError) as refused:
        shape_of(config, **told)
    assert str(refused.value).endswith(".")
    return str(refused.value)


CONTRADICTIONS = [
    pytest.param("llada", {"embedding_size": 100}, "'embedding_size' is 100, not 384 or more", id="too few embeddings"),
    pytest.param("llada", {"multi_query_attention": True}, "'n_kv_heads' is 2, not 1", id="one key head, or two"),
    pytest.param("llada", {"n_kv_heads": 3}, "a divisor of 4 heads", id="key heads that do not divide"),
    pytest.param("llada", {"tie_word_embeddings": True}, "as 'weight_tying' says", id="tied, or not"),
    pytest.param("llada", {"d_model": 68}, "an even size", id="heads of an odd size"),
    pytest.param("llada", {"d_model": None}, "has no 'd_model'", id="no size"),
    pytest.param("llada", {"model_type": "llama"}, "'model_type' is 'llama', not 'llada'", id="another type"),
    pytest.param("llada-moe", {"moe_layer_freq": [1]}, "for each of 2 layers", id="too few layers"),
    pytest.param("llada-moe", {"moe_layer_freq": [1, 2]}, "a list of 0 or 1", id="neither with experts nor without"),
    pytest.param("llada-moe", {"num_experts_per_tok": 9}, "at most the 8", id="more chosen than there are"),
    pytest.param("llada-moe", {"num_experts": None}, "has no 'num_experts'", id="no number of experts"),
    pytest.param("llada2", {"n_group": 3}, "a divisor of 8 experts", id="groups that do not divide"),
    pytest.param("llada2", {"n_group": 8, "topk_group": 8}, "two or more in each", id="groups of one"),
    pytest.param("llada2", {"topk_group": 5}, "at most 4", id="more groups than there are"),
    pytest.param("llada2", {"topk_group": 1}, "at most the 2", id="too few to choose from"),
    pytest.param("llada2", {"rotary_dim": 16}, "as 'partial_rotary_factor' says", id="two sizes that turn"),
    pytest.param("llada2", {"partial_rotary_factor": 0.2}, "even number of a head's 16", id="an odd number turns"),
    pytest.param("llada2", {"moe_shared_expert_intermediate_size": 9}, "as 'moe_intermediate_size'", id="two sizes"),
    pytest.param("sdar", {"block_size": 0}, "'block_size' is 0", id="blocks of nothing"),
    pytest.param("dream", {"mask_token_id": 384}, "there are 384 tokens, from 0 on", id="a mask beyond the tokens"),
    pytest.param("dream", {"mask_token_id": 2}, "which ends an answer", id="a mask that is the end"),
    pytest.param("dream", {"mask_token_id": "<|mask|>"}, "a token id", id="a mask that is a text"),
    pytest.param("dream", {"quantization_config": {"quant_method": "awq"}}, "quantised (awq)", id="quantised"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes", "said"), CONTRADICTIONS)
def test_a_config_that_contradicts_itself_is_refused(family: str, changes: dict[str, Any], said: str) -> None:
    assert said in refusal(config_of(family, **changes))


def test_llada_and_llada_moe_are_told_apart_by_their_architecture() -> None:
    assert config_of("llada")["model_type"] == config_of("llada-moe")["model_type"] == "llada"
    message = refusal(config_of("llada", architectures=None))
    assert '"architectures": ["LLaDAModelLM"]' in message
    assert "LLaDAModelLM, LLaDAMoEModelLM" in message
    assert shape_of(config_of("llada-moe", model_type="lladamoe")).family == "llada-moe"


def test_another_model_of_a_known_type_is_not_taken_for_ours() -> None:
    message = refusal(config_of("dream", architectures=["DreamForCausalLM"]))
    assert "the model is a DreamForCausalLM (DreamModel of type 'Dream' runs here)" in message


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_that_nobody_knows_is_asked_for(family: str) -> None:
    config = config_of(family, mask_token_id=None)
    assert "Give its number: --mask-token-id." in refusal(config)
    folder = tiny_diffusion(family, mask_token_id=None)
    told = open_checkpoint(ModelSpec(str(folder), arguments={"mask_token": 7}, kind="text"))
    assert told.shape.masking is not None
    assert told.shape.masking.mask_token == 7


def opened_with(model: Path | str, mask_token: Any) -> Shape:
    return open_checkpoint(ModelSpec(str(model), arguments={"mask_token": mask_token}, kind="text")).shape


def test_a_mask_that_is_told_of_goes_before_that_of_the_config() -> None:
    folder = tiny_diffusion("sdar")
    assert opened(folder).shape.masking == Masking(MASK, 4, guided=False)
    assert opened_with(folder, 9).masking == Masking(9, 4, guided=False)
    with pytest.raises(UsageError, match="--mask-token-id is 384, and there are 384 tokens"):
        opened_with(folder, 384)
    for wrong in (-1, "3", True):
        with pytest.raises(UsageError, match="a whole number"):
            opened_with(folder, wrong)


def test_a_mask_is_told_of_in_vain_where_there_is_none_or_it_is_known() -> None:
    for model in ("tiny", "null"):
        with pytest.raises(UsageError, match=r"goes from left to right and has none\. Leave"):
            opened_with(model, 9)
    with pytest.raises(UsageError, match="'tiny-llada' knows its own, 257"):
        opened_with("tiny-llada", 9)


def test_blocks_are_as_long_as_a_config_says() -> None:
    for family, size in (("sdar", 16), ("llada2", 64)):
        masking = shape_of(config_of(family, block_size=size)).masking
        assert masking is not None
        assert masking.block == size


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokenizer_of_a_folder_is_read_and_its_end_token_known(family: str) -> None:
    checkpoint = opened(tiny_diffusion(family))
    language = open_language(checkpoint.language_files(), checkpoint.shape)
    assert language.end_tokens == (2,)
    said, masked = language.encode([Prompt(text="a lazy dog"), Prompt(text="a <|mask|> dog")])
    assert MASK not in said
    assert MASK in masked


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def without(*beginnings: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(beginnings)]:
            del tensors[name]

    return change


def unopened(folder: Path) -> str:
    with pytest.raises(UsageError) as refused:
        opened(folder)
    assert str(refused.value).endswith(".")
    return str(refused.value)


@pytest.mark.parametrize("family", ["llada-moe", "llada2"])
def test_missing_experts_are_named_by_layer_and_number(family: str, tmp_path: Path) -> None:
    folder = copy_of(tiny_diffusion(family), tmp_path / "model")
    changed(folder, without("model.layers.1.mlp.experts.5."))
    assert "expert 5 of 'model.layers.1.mlp' is missing." in unopened(folder)
    changed(folder, without(*(f"model.layers.1.mlp.experts.{number}." for number in (1, 3, 4))))
    assert "experts 1, 3, 4 and 1 more of 'model.layers.1.mlp' are missing." in unopened(folder)


def test_half_an_expert_and_one_too_many_are_named_by_their_tensors(tmp_path: Path) -> None:
    folder = copy_of(tiny_diffusion("llada2"), tmp_path / "model")
    changed(folder, without("model.layers.2.mlp.experts.0.up_proj"))
    assert "'model.layers.2.mlp.experts.0.up_proj.weight' [48, 64] is missing" in unopened(folder)
    (folder / "config.json").write_text(json.dumps(config_of("llada2", num_experts=6, n_group=3, topk_group=2)))
    assert "'model.layers.1.mlp.gate.weight' is [8, 64], config.json makes it [6, 64]" in unopened(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_stored_tensors_become_weights_and_are_read_in_any_dtype(family: str) -> None:
    folder = tiny_diffusion(family)
    checkpoint, tensors = opened(folder), stored(folder)[1]
    weights = checkpoint.weights(torch.float32)
    assert sum(tensor.numel() for tensor in tensors.values()) == values_of(weights)
    half = checkpoint.weights(torch.bfloat16)
    for layer in half.layers:
        assert layer.up.weight.dtype == layer.down.weight.dtype == torch.bfloat16
        if layer.mixture is not None:
            assert layer.mixture.router.dtype == torch.float32
            assert layer.mixture.up.dtype == torch.bfloat16
    assert checkpoint.estimate(3, 12, 100, torch.float32).weights_bytes == 4 * values_of(weights)


def test_a_step_takes_more_where_a_token_goes_through_more_experts() -> None:
    few, many = (opened(tiny_diffusion("llada-moe", num_experts_per_tok=chosen)) for chosen in (2, 6))
    one, other = (checkpoint.estimate(3, 12, 100, torch.float32) for checkpoint in (few, many))
    assert one.weights_bytes == other.weights_bytes
    assert one.peak_bytes < other.peak_bytes


def values_of(part: object) -> int:
    if isinstance(part, torch.Tensor):
        return part.numel()
    inner = part if isinstance(part, tuple) else getattr(part, "__dict__", {}).values()
    return sum(values_of(one) for one in inner)


def test_an_experts_weights_are_stacked_gate_over_value() -> None:
    folder = tiny_diffusion("llada2")
    layer, tensors = opened(folder).weights(torch.float32).layers[1], stored(folder)[1]
    assert layer.mixture is not None
    for number in range(8):
        expert = f"model.layers.1.mlp.experts.{number}."
        gate_and_value = [tensors[f"{expert}{half}_proj.weight"] for half in ("gate", "up")]
        assert torch.equal(layer.mixture.up[number], torch.cat(gate_and_value))
        assert torch.equal(layer.mixture.down[number], tensors[f"{expert}down_proj.weight"])
    assert layer.mixture.bias is not None
    assert torch.equal(layer.mixture.bias, tensors["model.layers.1.mlp.gate.expert_bias"])


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_in_training_take_the_place_of_those_that_were_opened(family: str, tmp_path: Path) -> None:
    checkpoint, other = opened(tiny_diffusion(family)), tiny_diffusion(family, seed=1)
    found = read_other_weights(checkpoint, str(other), torch.float32)
    expected = opened(other).weights(torch.float32)
    assert torch.equal(found.layers[1].qkv.weight, expected.layers[1].qkv.weight)
    assert checkpoint.fingerprint != opened(other).fingerprint == opened(other).fingerprint


@pytest.mark.parametrize("family", ["llada", "llada2"])
def test_names_may_lack_their_prefix(family: str, tmp_path: Path) -> None:
    folder = copy_of(tiny_diffusion(family), tmp_path / "model")
    prefix = "model.transformer." if family == "llada" else "model."
    tensors = {name.removeprefix(prefix): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    whole = opened(tiny_diffusion(family)).weights(torch.float32)
    assert torch.equal(opened(folder).weights(torch.float32).head.weight, whole.head.weight)


def test_code_that_a_dream_folder_brings_for_its_tokenizer_is_not_needed(tmp_path: Path) -> None:
    folder = copy_of(tiny_diffusion("dream"), tmp_path / "model")
    path = folder / "tokenizer_config.json"
    own = {
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "tokenizer_class": "DreamTokenizer",
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), **own}))
    assert opened(folder).shape.family == "dream"
    path.write_text(json.dumps({**own, "tokenizer_class": "Other"}))
    assert "asks to run code of its own" in unopened(folder)


def low_ranks(folder: Path, modules: dict[str, tuple[int, int]]) -> Path:
    """An adapter as PEFT saves it, of these modules with so many outputs and inputs."""
    folder.mkdir()
    tensors = {}
    for name, (outputs, inputs) in modules.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(2, inputs)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, 2)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    return folder


ADAPTED = {
    "llada": (
        {"model.transformer.blocks.1.v_proj": (32, 64), "model.transformer.blocks.1.ff_out": (64, 160)},
        [("qkv", 96, 32), ("down", 0, 64)],
    ),
    "llada2": (
        {"model.layers.1.attention.query_key_value": (128, 64), "model.layers.1.attention.dense": (64, 64)},
        [("qkv", 0, 64), ("qkv", 64, 32), ("qkv", 96, 32), ("out", 0, 64)],
    ),
    "sdar": ({"model.layers.1.self_attn.o_proj": (64, 128)}, [("out", 0, 64)]),
}


@pytest.mark.parametrize("family", ADAPTED)
def test_adapters_are_found_under_the_familys_names(family: str, tmp_path: Path) -> None:
    modules, expected = ADAPTED[family]
    adapter = read_adapter(opened(tiny_diffusion(family)), str(low_ranks(tmp_path / "adapter", modules)))
    assert adapter.layers[0] == ()
    assert sorted((low.product, low.first, len(low.up)) for low in adapter.layers[1]) == sorted(expected)


def test_experts_are_not_adapted(tmp_path: Path) -> None:
    folder = low_ranks(tmp_path / "adapter", {"model.layers.1.mlp.experts.0.up_proj": (48, 64)})
    with pytest.raises(UsageError, match="here only query_key_value, dense of the layers can be"):
        read_adapter(opened(tiny_diffusion("llada2")), str(folder))


FIELDS = sorted({name for config in CONFIGS.values() for name in config} - {"architectures", "model_type"})


@given(family=st.sampled_from(FAMILIES), changes=st.dictionaries(st.sampled_from(FIELDS), anything, max_size=4))
@settings(max_examples=examples(300), deadline=None)
def test_whatever_a_config_holds_it_is_read_or_refused(family: str, changes: dict[str, Any]) -> None:
    try:
        shape = shape_of({**config_of(family), **changes})
    except UsageError:
        return
    fits(shape)


def fits(shape: Shape) -> None:
    assert shape.masking is not None
    assert 0 <= shape.masking.mask_token < shape.vocabulary
    assert shape.heads % shape.kv_heads == 0
    assert shape.experts is None or 1 <= shape.experts.chosen <= shape.experts.count
