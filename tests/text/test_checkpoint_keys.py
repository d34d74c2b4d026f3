"""A key of config.json that may change the computation is honoured or refused; a healthy model's keys all pass."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.model_family import shape_of

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
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
HEALTHY = {
    "Llama 2, its first release": {**LLAMA, "_name_or_path": "meta-llama/Llama-2-7b-hf", "max_length": 4096},
    "Llama 2 chat": {**LLAMA, "do_sample": True, "temperature": 0.6, "top_p": 0.9, "pad_token_id": 0},
    "Llama 3": {**LLAMA, "attention_bias": False, "attention_dropout": 0.0, "rope_theta": 500000.0},
    "Llama 3.1": {
        **LLAMA, "mlp_bias": False, "rope_scaling": {**LLAMA3, "rope_type": "llama3"},
        "eos_token_id": [2, 3, 4],
    },
    "Llama 3.2": {**LLAMA, "head_dim": 16, "rope_scaling": {**LLAMA3, "rope_type": "llama3", "factor": 32.0}},
    "Llama through Unsloth": {**LLAMA, "unsloth_fixed": True, "unsloth_version": "2024.9", "pad_token_id": 5},
    "Vicuna": {**LLAMA, "max_sequence_length": 2048, "rope_scaling": {"factor": 4.0, "type": "linear"}},
    "Yarn Llama 2": {
        **LLAMA,
        "rope_scaling": {"factor": 16.0, "finetuned": True, "original_max_position_embeddings": 4096, "type": "yarn"},
    },
    "SmolLM2": {
        **LLAMA, "is_llama_config": True, "rope_interleaved": False, "rope_theta": 130000,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    },
    "TinyLlama": {**LLAMA, "torch_dtype": "bfloat16", "attention_bias": False},
    "R1-Distill-Llama": {**LLAMA, "rope_scaling": {**LLAMA3, "rope_type": "llama3"}, "_attn_implementation": "sdpa"},
    "Mistral 0.1": MISTRAL,
    "Mistral 0.3": {**MISTRAL, "sliding_window": None, "rope_theta": 1000000.0},
    "Mistral Nemo": {**MISTRAL, "sliding_window": None, "head_dim": 32},
    "Qwen2": QWEN2,
    "Qwen2.5 7B": {**QWEN2, "use_mrope": False, "rope_scaling": None},
    "Qwen2.5 with YaRN": {
        **QWEN2, "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    },
    "R1-Distill-Qwen": {**QWEN2, "use_mrope": False, "max_window_layers": 21},
    "Qwen3": {
        **QWEN2, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": False,
        "head_dim": 32, "sliding_window": None,
    },
    "GPT-2": GPT2,
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


@pytest.mark.parametrize("model", HEALTHY)
def test_a_healthy_model_passes(model: str) -> None:
    assert shape_of(HEALTHY[model]).hidden == 64


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Ministral", "Qwen2", "Qwen3", "GPT2"])
def test_what_transformers_writes_passes(family: str) -> None:
    config = getattr(transformers, f"{family}Config")()
    assert shape_of(config.to_dict()) == shape_of({"model_type": config.model_type, **config.to_diff_dict()})


STRANGE = [
    pytest.param(LLAMA, {"logit_scale": 0.25}, "'logit_scale': 0.25", id="a factor of the logits"),
    pytest.param(LLAMA, {"residual_multiplier": 0.22}, "residual_multiplier", id="a factor of the residual stream"),
    pytest.param(LLAMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping", id="capped attention"),
    pytest.param(LLAMA, {"sliding_window": 512}, "sliding_window", id="a window where there is none"),
    pytest.param(LLAMA, {"layer_types": ["sliding_attention"] * 2}, "layer_types", id="sliding layers of a Llama"),
    pytest.param(LLAMA, {"no_rope_layers": [1, 1]}, "no_rope_layers", id="layers without positions"),
    pytest.param(LLAMA, {"is_causal": False}, "'is_causal': False", id="a look ahead"),
    pytest.param(LLAMA, {"something_new": True}, "something_new", id="what nobody knows"),
    pytest.param(LLAMA, {"pruned_heads": {"0": [1]}}, "pruned_heads", id="heads cut off"),
    pytest.param(LLAMA, {"per_layer_config": {"0": {"hidden_act": "relu"}}}, "per_layer_config", id="one layer apart"),
    pytest.param(QWEN2, {"dual_chunk_attention_config": {"chunk_size": 9}}, "dual_chunk", id="attention in chunks"),
    pytest.param(QWEN2, {"use_mrope": True}, "use_mrope", id="positions of pictures"),
    pytest.param(MISTRAL, {"attention_multiplier": 0.1}, "attention_multiplier", id="attention scaled"),
    pytest.param(GPT2, {"alibi": True}, "alibi", id="a GPT-2 with slopes"),
    pytest.param(GPT2, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling", id="a GPT-2 that turns"),
    pytest.param(LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}}, "mrope", id="rope"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "changes", "named"), STRANGE)
def test_a_key_that_may_change_the_computation_is_named_with_the_cure(
    config: dict[str, Any], changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UsageError) as refused:
        shape_of({**config, **changes})
    assert named in str(refused.value)
    assert "remove it from config.json" in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_scale": 1},
        {"residual_multiplier": 1.0},
        {"attn_logit_softcapping": None},
        {"something_new": None},
        {"something_new": {}},
        {"layer_types": ["full_attention", "full_attention"]},
        {"is_causal": True},
        {"num_experts": 0},
    ],
    ids=str,
)
def test_a_value_that_changes_nothing_passes(changes: dict[str, Any]) -> None:
    assert shape_of({**LLAMA, **changes}) == shape_of(LLAMA)
