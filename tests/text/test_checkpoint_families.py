"""config.json becomes the shape that transformers or the makers of a diffusion model run, or an error with a cure.

A key that may change the computation is honoured or refused; a healthy model's keys all pass.
"""

from __future__ import annotations

import importlib
import json
from math import prod

import pytest
import torch
import transformers
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from text.decoders import opened
from text.tiny_diffusion import FAMILIES, MASK, config_of, tiny_diffusion

from gpuinfer.api import ModelSpec
from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint import open_checkpoint
from gpuinfer.text.checkpoint.config_keys import ANOTHER_DECODER, HONOURED, MASKED
from gpuinfer.text.checkpoint.model_family import biases_of, shape_of
from gpuinfer.text.checkpoint.tensor_layout import RotaryLayout, names_of, tensor_parts
from gpuinfer.text.transformer import Experts, Masking

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
GPT2_SIZES = {name: SIZES[name] for name in SIZES if name not in ("intermediate_size", "num_key_value_heads")}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "plain": {},
    "whole-number base": {"rope_theta": 1000000},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}},
    "llama3": {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 500000.0},
    "llama3, whole numbers": {
        "rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": 32, "low_freq_factor": 1, "high_freq_factor": 4}
    },
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    "yarn without an original length": {"rope_scaling": {"rope_type": "yarn", "factor": 2.5}},
    "yarn, its own betas": {
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2, "truncate": False}
    },
    "yarn with mscale": {"rope_scaling": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 0.9}},
    "yarn, attention factor": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.8}},
    "newer layout": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
    "newer layout, linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}},
    "both layouts": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 12345.0},
}


def written(family, **changes):
    """A config of 4 layers of 64 values, 4 heads over 2."""
    if family in FAMILIES:
        return config_of(family, **changes)
    return {"model_type": family, **(GPT2_SIZES if family == "gpt2" else SIZES), **changes}


def theirs(config, folder):
    """The configuration that transformers reads from the same file."""
    (folder / "config.json").write_text(json.dumps(config))
    return transformers.AutoConfig.from_pretrained(folder)


def rotary(config):
    """The module of transformers that turns heads by this configuration."""
    name = f"transformers.models.{config.model_type}.modeling_{config.model_type}"
    (kind,) = [value for key, value in vars(importlib.import_module(name)).items() if key.endswith("RotaryEmbedding")]
    return kind(config)


@pytest.mark.thorough
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("family", "head_dim"), [("llama", None), ("mistral", 48), ("qwen2", None), ("qwen3", 128)])
def test_rotary_angles_are_those_of_transformers(family, head_dim: int, scaling, tmp_path):
    config = written(family, head_dim=head_dim, **SCALINGS[scaling])
    if head_dim is None:
        del config["head_dim"]
    shape = shape_of(config)
    module = rotary(theirs(config, tmp_path))
    assert torch.equal(torch.tensor(shape.rope.inverse_frequencies), module.inv_freq)
    assert shape.rope.attention_factor == module.attention_scaling
    assert len(shape.rope.inverse_frequencies) == shape.head_dim // 2


def test_scaling_makes_room_for_more_positions():
    for scaling, positions in {"plain": 512, "linear": 2048, "dynamic": 512, "llama3": 512, "yarn": 512}.items():
        assert shape_of(written("llama", **SCALINGS[scaling])).positions == positions
    assert shape_of(written("llama", **SCALINGS["yarn, its own betas"])).positions == 4096


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt2"])
def test_what_a_config_leaves_out_is_what_transformers_assumes(family, tmp_path):
    shape, config = shape_of({"model_type": family}), theirs({"model_type": family}, tmp_path)
    heads, hidden = config.num_attention_heads, config.hidden_size
    rotary_only = {
        "intermediate": "intermediate_size", "kv_heads": "num_key_value_heads", "norm_eps": "rms_norm_eps",
        "activation": "hidden_act", "beginning_token": "bos_token_id",
    }  # fmt: skip
    gpt2_only = {"norm_eps": "layer_norm_epsilon"}
    same = {"vocabulary": "vocab_size", "layers": "num_hidden_layers", "positions": "max_position_embeddings"}
    for mine, their in (same | (gpt2_only if family == "gpt2" else rotary_only)).items():
        assert getattr(shape, mine) == getattr(config, their), mine
    assert (shape.hidden, shape.heads, shape.tied) == (hidden, heads, config.tie_word_embeddings)
    assert shape.head_dim == getattr(config, "head_dim", hidden // heads)
    assert shape.end_tokens == (() if config.eos_token_id is None else (config.eos_token_id,))
    if family == "gpt2":
        assert (shape.norm, shape.activation, shape.gated, shape.kv_heads) == ("layer", "gelu_tanh", False, heads)
    elif family != "mistral":
        config = written(family, num_key_value_heads=None)
        assert shape_of(config).kv_heads == theirs(config, tmp_path).num_key_value_heads == 4


FULL, SLIDING = "full_attention", "sliding_attention"
SLIDES = {"sliding_window": 9, "use_sliding_window": True}
WINDOWS = [
    ("mistral", {"sliding_window": 100}, (100,) * 4),
    ("mistral", {"sliding_window": None}, ()),
    ("mistral", {}, (4096,) * 4),
    ("mistral", {"sliding_window": 9, "layer_types": [FULL, SLIDING] * 2}, (None, 9, None, 9)),
    ("mistral", {"sliding_window": 9, "layer_types": [FULL] * 4}, ()),
    ("mistral", {"sliding_window": 9, "layer_types": None}, (9,) * 4),
    ("ministral", {"sliding_window": 9, "layer_types": [SLIDING, FULL] * 2}, (9, None, 9, None)),
    ("llama", {"sliding_window": None}, ()),
    ("qwen2", {"sliding_window": 100, "use_sliding_window": False}, ()),
    ("qwen2", {**SLIDES, "max_window_layers": 3}, (None, None, None, 9)),
    ("qwen3", {**SLIDES, "max_window_layers": 0}, (9,) * 4),
    ("qwen3", SLIDES, ()),
    ("qwen3", {**SLIDES, "layer_types": [FULL, SLIDING] * 2}, (None, 9, None, 9)),
]


@pytest.mark.parametrize(("family", "changes", "windows"), WINDOWS, ids=str)
def test_windows(family, changes, windows, tmp_path):
    config = written(family, **changes)
    assert shape_of(config).windows == windows
    them = theirs(config, tmp_path)
    if family.startswith("qwen") or "layer_types" in changes:
        sliding = [kind == "sliding_attention" for kind in them.layer_types]
        assert sliding == [window is not None for window in windows or (None,) * 4]
    elif family == "mistral":
        assert (them.sliding_window or None) == (windows[0] if windows else None)


@pytest.mark.parametrize("given_name", ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "relu"])
def test_activations_are_those_of_transformers(given_name):
    own = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "relu": torch.relu,
    }
    values = torch.linspace(-8, 8, 4001)
    mine = own[shape_of(written("llama", hidden_act=given_name)).activation](values)
    torch.testing.assert_close(mine, transformers.activations.ACT2FN[given_name](values), atol=2e-6, rtol=2e-6)


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02, "intermediate_size": 96, "max_position_embeddings": 4096, "model_type": "llama",
    "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
    "transformers_version": "4.31.0", "use_cache": True, "vocab_size": 128,
}  # fmt: skip
MISTRAL = {
    **LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "attention_dropout": 0.0,
    "rope_theta": 10000.0, "sliding_window": 4096,
}  # fmt: skip
QWEN2 = {
    **LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_dropout": 0.0,
    "max_window_layers": 28, "rope_theta": 1000000.0, "sliding_window": 32768, "use_sliding_window": False,
}  # fmt: skip
GPT2 = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 127,
    "embd_pdrop": 0.1, "eos_token_id": 127, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 1024, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 1024,
    "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 128,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip
LLAMA3_ROPE = {**LLAMA3, "rope_type": "llama3"}
HEALTHY = {
    "Llama 2 chat, its first release": {
        **LLAMA, "_name_or_path": "meta-llama/Llama-2-7b-hf", "max_length": 4096, "do_sample": True, "temperature": 0.6,
        "top_p": 0.9, "pad_token_id": 0, "attention_bias": False,
    },
    "Llama 3.1": {**LLAMA, "mlp_bias": False, "rope_scaling": LLAMA3_ROPE, "eos_token_id": [2, 3, 4]},
    "Llama 3.2": {**LLAMA, "head_dim": 16, "rope_scaling": {**LLAMA3_ROPE, "factor": 32.0}, "rope_theta": 500000.0},
    "Llama through Unsloth": {**LLAMA, "unsloth_fixed": True, "unsloth_version": "2024.9", "pad_token_id": 5},
    "Vicuna": {**LLAMA, "max_sequence_length": 2048, "rope_scaling": {"factor": 4.0, "type": "linear"}},
    "Yarn Llama 2": {
        **LLAMA,
        "rope_scaling": {"factor": 16.0, "finetuned": True, "original_max_position_embeddings": 4096, "type": "yarn"},
    },
    "SmolLM2": {
        **LLAMA, "is_llama_config": True, "rope_interleaved": False, "rope_theta": 130000,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "_attn_implementation": "sdpa",
    },
    "Mistral 0.1": MISTRAL,
    "Mistral Nemo": {**MISTRAL, "sliding_window": None, "head_dim": 32, "rope_theta": 1000000.0},
    "Qwen2.5": {**QWEN2, "use_mrope": False, "rope_scaling": None, "max_window_layers": 21},
    "Qwen2.5 with YaRN": {
        **QWEN2, "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    },
    "Qwen3": {
        **QWEN2, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": False,
        "head_dim": 32, "sliding_window": None,
    },
    "DialoGPT": {**GPT2, "output_past": True, "n_special": 0, "predict_special_tokens": True},
    "GPT-2 as others name it": {
        **{name: value for name, value in GPT2.items() if name not in ("n_embd", "n_head")},
        "hidden_size": 64, "num_attention_heads": 4,
    },
    "a Llama of version 5": {
        **LLAMA, "dtype": "bfloat16", "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    },
    "what versions 4 wrote whole": {
        **LLAMA, "add_cross_attention": False, "bad_words_ids": None, "begin_suppress_tokens": None,
        "chunk_size_feed_forward": 0, "cross_attention_hidden_size": None, "decoder_start_token_id": None,
        "diversity_penalty": 0.0, "early_stopping": False, "finetuning_task": None, "forced_bos_token_id": None,
        "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "is_decoder": False, "is_encoder_decoder": False,
        "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "num_beam_groups": 1, "output_attentions": False,
        "prefix": None, "problem_type": None, "pruned_heads": {}, "remove_invalid_values": False, "return_dict": True,
        "suppress_tokens": None, "tf_legacy_loss": False, "tie_encoder_decoder": False, "tokenizer_class": None,
        "torchscript": False, "typical_p": 1.0, "use_bfloat16": False, "xla_device": None, "quantization_config": None,
    },
}  # fmt: skip


def test_healthy_models_and_what_transformers_writes_pass():
    assert {name: shape_of(config).hidden for name, config in HEALTHY.items()} == dict.fromkeys(HEALTHY, 64)
    for family in ("Llama", "Mistral", "Ministral", "Qwen2", "Qwen3", "GPT2"):
        config = getattr(transformers, f"{family}Config")()
        assert shape_of(config.to_dict()) == shape_of({"model_type": config.model_type, **config.to_diff_dict()})
    neutral = {"logit_scale": 1, "residual_multiplier": 1.0, "attn_logit_softcapping": None, "is_causal": True}
    for more in (neutral, {"something_new": None, "num_experts": 0}, {"something_new": {}, "layer_types": [FULL] * 2}):
        assert shape_of({**LLAMA, **more}) == shape_of(LLAMA)


ELSEWHERE = f"which gpuinfer's own decoders do not run. {ANOTHER_DECODER}"
REFUSED = {  # by how the message ends: family, changes, what it names
    ELSEWHERE: [
    ("llama", {"model_type": "mixtral"}, "mixtral"),
    ("llama", {"model_type": "qwen2_moe"}, "qwen2_moe"),
    ("llama", {"num_local_experts": 8}, "mixture of experts"),
    ("llama", {"quantization_config": {"quant_method": "aqlm"}}, "aqlm"),
    ("llama", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
    ("llama", {"rope_scaling": {"rope_type": "proportional"}}, "proportional"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rotary"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"hidden_act": "relu2"}, "relu2"),
    ("llama", {"model_type": "qwen2", "layer_types": ["linear_attention"] * 4}, "linear_attention"),
    ("llama", {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "attention"),
    ],
    "no backend of gpuinfer serves such models. Run it with transformers.": [
    ("llama", {"model_type": "t5", "is_encoder_decoder": True}, "an encoder with a decoder (type 't5')"),
    ("llama", {"model_type": "bert"}, "an encoder (type 'bert'), which reads text and writes none"),
    ("llama", {"model_type": "nomic_bert", "auto_map": {"AutoModel": "modeling.Own"}}, "an encoder"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "a LlamaForSequence"),
    ("llama", {"model_type": "gpt2", "add_cross_attention": True}, "attends to an encoder"),
    ],
    "remove it from config.json.": [
    ("llama", {"logit_scale": 0.25}, "'logit_scale': 0.25"),
    ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("llama", {"sliding_window": 512}, "sliding_window"),
    ("llama", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
    ("llama", {"is_causal": False}, "'is_causal': False"),
    ("llama", {"something_new": True}, "something_new"),
    ("llama", {"pruned_heads": {"0": [1]}}, "pruned_heads"),
    ("qwen2", {"use_mrope": True}, "use_mrope"),
    ("gpt2", {"alibi": True}, "alibi"),
    ("gpt2", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}}, "mrope"),
    ("llada", {"scale_logits": True}, "'scale_logits': True"),
    ("llada", {"block_type": "sequential"}, "'block_type': 'sequential'"),
    ("llada", {"rope": False}, "'rope': False"),
    ("llada-moe", {"norm_topk_prob": True}, "norm_topk_prob"),
    ("llada-moe", {"shared_expert_intermediate_size": 64}, "shared_expert"),
    ("llada2", {"score_function": "softmax"}, "score_function"),
    ("llada2", {"use_qk_norm": False}, "use_qk_norm"),
    ("dream", {"use_sliding_window": True}, "use_sliding_window"),
    ("dream", {"num_experts": 8}, "num_experts"),
    ("sdar", {"qk_layernorm": True}, "qk_layernorm"),
    ],
    ".": [
    ("llama", {"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}}, "gpuinfer's own decoders never do. If you"),
    ("llada", {"embedding_size": 100}, "'embedding_size' is 100, not 384 or more"),
    ("llada", {"multi_query_attention": True}, "'n_kv_heads' is 2, not 1"),
    ("llada", {"n_kv_heads": 3}, "a divisor of 4 heads"),
    ("llada", {"tie_word_embeddings": True}, "as 'weight_tying' says"),
    ("llada", {"d_model": 68}, "an even size"),
    ("llada", {"d_model": None}, "has no 'd_model'"),
    ("llada", {"model_type": "llama"}, "'model_type' is 'llama', not 'llada'"),
    ("llada-moe", {"moe_layer_freq": [1]}, "for each of 2 layers"),
    ("llada-moe", {"moe_layer_freq": [1, 2]}, "a list of 0 or 1"),
    ("llada-moe", {"num_experts_per_tok": 9}, "at most the 8"),
    ("llada-moe", {"num_experts": None}, "has no 'num_experts'"),
    ("llada2", {"n_group": 3}, "a divisor of 8 experts"),
    ("llada2", {"n_group": 8, "topk_group": 8}, "two or more in each"),
    ("llada2", {"topk_group": 5}, "at most 4"),
    ("llada2", {"topk_group": 1}, "at most the 2"),
    ("llada2", {"rotary_dim": 16}, "as 'partial_rotary_factor' says"),
    ("llada2", {"partial_rotary_factor": 0.2}, "even number of a head's 16"),
    ("llada2", {"moe_shared_expert_intermediate_size": 9}, "as 'moe_intermediate_size'"),
    ("sdar", {"block_size": 0}, "'block_size' is 0"),
    ("dream", {"mask_token_id": 384}, "there are 384 tokens, from 0 on"),
    ("dream", {"mask_token_id": 2}, "which ends an answer"),
    ("dream", {"mask_token_id": "<|mask|>"}, "a token id"),
    ("dream", {"quantization_config": {"quant_method": "aqlm"}}, "quantised by aqlm"),
    ],
}  # fmt: skip
SENSELESS = [  # changes of a Llama's config
    {"hidden_size": "64"}, {"hidden_size": -64}, {"hidden_size": 1 << 60}, {"num_hidden_layers": 10**6},
    {"num_attention_heads": 5}, {"num_key_value_heads": 3}, {"head_dim": 15}, {"rms_norm_eps": "small"},
    {"rope_scaling": "linear"}, {"rope_scaling": {"type": "linear"}},
    {"rope_scaling": {"type": "linear", "factor": 0}},
    {"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, {"rope_theta": float("nan")},
    {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}}, {"tie_word_embeddings": "yes"},
    {"eos_token_id": "</s>"}, {"model_type": 7}, {"model_type": "qwen3", "layer_types": ["full_attention"]},
    {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 4},
    {"model_type": "mistral", "sliding_window": None, "layer_types": ["sliding_attention"] * 4},
    {"model_type": "gpt2", "n_embd": 32},
]  # fmt: skip
CASES = [pytest.param(ending, *row, id=f"{row[0]} {row[1]}") for ending, rows in REFUSED.items() for row in rows]


def refusal(config):
    with pytest.raises(UsageError) as refused:
        shape_of(config)
    assert str(refused.value).endswith(".")
    return str(refused.value)


def test_a_config_that_makes_no_sense_is_refused():
    for changes in SENSELESS:
        refusal({**written("llama"), **changes})


@pytest.mark.parametrize(("ending", "family", "changes", "named"), CASES)
def test_a_config_that_is_not_served_here_is_refused(ending, family, changes, named):
    message = refusal({**written(family), **changes})
    assert named in message
    assert ending in message


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


BILLIONS = {"llada": 8.016, "llada-moe": 7.357, "llada2": 16.256, "dream": 7.616, "sdar": 4.022}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_published_config_becomes_the_published_model(family):
    config, names = config_of(family, **PUBLISHED[family]), names_of(family)
    shape = shape_of(config)
    assert (shape.family, shape.masking) == (family, MASKINGS[family])
    assert shape.end_tokens[0] == {"dream": 151643, "sdar": 151643, "llada": 126081}.get(family, 156892)
    layout = RotaryLayout(shape, biases_of(config), names.prefix, None, names)
    assert sum(prod(part.shape) for part in tensor_parts(layout)) / 1e9 == pytest.approx(BILLIONS[family], abs=1e-3)
    few = ("auto_map", "initializer_range", "transformers_version", "init_fn", "precision", "debug", "output_dropout")
    assert shape_of({name: value for name, value in config.items() if name not in few}) == shape


def test_what_published_configs_say_of_ends_experts_and_blocks():
    shape = shape_of(config_of("llada", **LLADA_8B))
    assert shape.end_tokens == (126081, 126348)  # of the text, of a turn
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate) == (32, 32, 128, 12288)
    assert (shape.norm_eps, shape.positions) == (1e-5, 4096)
    mini = shape_of(config_of("llada2", **LLADA2_MINI))
    assert mini.experts == Experts(256, 8, 512, 512, (0,), "sigmoid", True, 2.5, 8, 4)
    assert len(mini.rope.inverse_frequencies) == 32
    assert shape_of(config_of("llada-moe", **LLADA_MOE)).experts == Experts(64, 8, 1024)
    assert shape_of(config_of("llada-moe", moe_layer_freq=[0, 1])).experts == Experts(8, 3, 48, dense=(0,))
    for family, size in (("sdar", 16), ("llada2", 64)):
        assert shape_of(config_of(family, block_size=size)).masking.block == size


def test_models_of_one_type_are_told_apart_by_their_architecture():
    assert config_of("llada")["model_type"] == config_of("llada-moe")["model_type"] == "llada"
    message = refusal(config_of("llada", architectures=None))
    assert '"architectures": ["LLaDAModelLM"]' in message
    assert "LLaDAModelLM, LLaDAMoEModelLM" in message
    assert shape_of(config_of("llada-moe", model_type="lladamoe")).family == "llada-moe"
    message = refusal(config_of("dream", architectures=["DreamForCausalLM"]))
    assert "the model is a DreamForCausalLM (DreamModel of type 'Dream' runs here)" in message


def masking_of(model, mask_token):
    return open_checkpoint(ModelSpec(str(model), arguments={"mask_token": mask_token}, kind="text")).shape.masking


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unknown_mask_is_given_by_a_flag_which_goes_before_the_config(family):
    assert "Give its number: --mask-token-id." in refusal(config_of(family, mask_token_id=None))
    assert masking_of(tiny_diffusion(family, mask_token_id=None), 7).mask_token == 7
    assert opened(tiny_diffusion(family)).shape.masking.mask_token == MASK
    assert masking_of(tiny_diffusion(family), 9).mask_token == 9


@pytest.mark.parametrize(
    ("model", "mask", "why"),
    [
        ("sdar", 384, "--mask-token-id is 384, and there are 384 tokens"),
        *(("sdar", wrong, "a whole number") for wrong in (-1, "3", True)),
        *((model, 9, r"goes from left to right and has none\. Leave") for model in ("tiny", "null")),
        ("tiny-llada", 9, "'tiny-llada' knows its own, 257"),
    ],
)
def test_a_mask_that_cannot_be_is_refused(model, mask, why):
    with pytest.raises(UsageError, match=why):
        masking_of(tiny_diffusion(model) if model in FAMILIES else model, mask)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from(["yarn", "linear"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "factor", "rope_type", "beta_fast", "rope_theta"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
FIELDS = sorted(frozenset().union(*HONOURED.values(), *(one.honoured | {*one.neutral} for one in MASKED.values())))


@given(
    family=st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "gpt2", *FAMILIES]),
    changes=st.dictionaries(st.sampled_from([*FIELDS, "logit_scale"]), anything, max_size=4),
)
@settings(max_examples=examples(500), deadline=None)
def test_any_config_is_read_or_refused(family, changes):
    try:
        shape = shape_of({**written(family), **changes})
    except UsageError:
        return
    assert shape.heads % shape.kv_heads == 0
    assert len(shape.windows) in (0, shape.layers)
    assert shape.masking is None or 0 <= shape.masking.mask_token < shape.vocabulary
    assert shape.experts is None or 1 <= shape.experts.chosen <= shape.experts.count
