"""Every key of config.json is one that we honour, one that changes no logit, or an error.

A key that nobody here knows may well change what a model computes: passed over, it would make wrong answers in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuinfer.errors import UsageError
from gpuinfer.models.text.checkpoint.fields import Fields

SHOWN = 3  # keys in a message


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ANY = "model_type architectures auto_map quantization_config vocab_size tie_word_embeddings eos_token_id bos_token_id"
_ROTARY = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act "
    "max_position_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters partial_rotary_factor "
    "original_max_position_embeddings num_experts num_local_experts n_routed_experts"
)
_QWEN = "use_sliding_window sliding_window max_window_layers layer_types"
_GPT2 = (
    "n_embd n_head n_layer n_inner n_positions layer_norm_epsilon activation_function scale_attn_weights "
    "scale_attn_by_inverse_layer_idx add_cross_attention"
)

HONOURED: Mapping[str, frozenset[str]] = {
    family: frozenset(names.split())
    for family, names in {
        "llama": f"{_ANY} {_ROTARY} attention_bias mlp_bias",
        "mistral": f"{_ANY} {_ROTARY} sliding_window layer_types",
        "qwen2": f"{_ANY} {_ROTARY} {_QWEN}",
        "qwen3": f"{_ANY} {_ROTARY} {_QWEN} attention_bias",
        "gpt2": f"{_ANY} {_GPT2}",
        "nanogpt": "n_layer n_head n_embd block_size vocab_size",
    }.items()
}

# Whatever they hold, the logits are the same. Those of biases are here because the tensors themselves tell: one too
# many, or one that is missing, is refused when the weights are opened.
HARMLESS = frozenset(
    _names("""
    name_or_path transformers_version torch_dtype dtype tokenizer_class finetuning_task task_specific_params prefix
    license model_name model_revision is_llama_config transformers.js_config

    output_hidden_states output_attentions output_scores output_logits return_dict return_dict_in_generate
    use_return_dict use_cache cache_implementation torchscript use_bfloat16 tf_legacy_loss xla_device
    chunk_size_feed_forward is_decoder tie_last_hidden_states attn_implementation experts_implementation
    use_flash_attention use_flash_attention_2 use_flash_attn flash_attention use_fused_rms_norm
    use_fused_rotary_embedding use_fused_cross_entropy fused_mlp reorder_and_upcast_attn pretraining_tp
    tensor_parallel_degree
    base_model_tp_plan base_model_pp_plan base_model_ep_plan keys_to_ignore_at_inference attention_softmax_in_fp32

    initializer_range initializer_factor attention_dropout hidden_dropout hidden_dropout_prob residual_dropout
    attention_probs_dropout_prob attn_pdrop resid_pdrop embd_pdrop dropout classifier_dropout classifier_dropout_prob
    embedding_dropout attention_dropout_prob ffn_dropout gradient_checkpointing use_gradient_checkpointing
    gradient_checkpointing_use_reentrant neftune_noise_alpha router_aux_loss_coef output_router_logits output_past
    label2id id2label num_labels problem_type loss_type label_smoothing
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout summary_last_dropout

    pad_token_id sep_token_id unk_token_id cls_token_id mask_token_id decoder_start_token_id pad_token bos_token
    eos_token unk_token chat_template add_bos_token add_eos_token n_special predict_special_tokens padding_side
    tokenizer_padding_side tokenizer_model_max_length padding_idx

    max_length min_length max_new_tokens min_new_tokens do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p min_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size encoder_repetition_penalty bad_words_ids num_return_sequences forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    epsilon_cutoff eta_cutoff num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    assistant_lookbehind target_lookbehind penalty_alpha renormalize_logits generation_config

    max_window_layers n_ctx seq_length max_seq_len max_seq_length max_sequence_length model_max_length max_tokens

    attention_bias mlp_bias qkv_bias use_bias bias use_qkv_bias attention_out_bias o_proj_bias lm_head_bias
    """)
)  # fmt: skip
HARMLESS_BEGINNINGS = ("_", "unsloth_", "axolotl_", "summary_")

# Features of other models, and the values that say that they are not used.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        _names("""
        is_encoder_decoder add_cross_attention tie_encoder_decoder use_parallel_residual parallel_residual parallel_attn
        alibi use_alibi new_decoder_architecture use_mrope use_qk_norm qk_norm qk_layernorm use_logn_attn
        use_dynamic_ntk logn rope_interleaved rope_interleave use_rope_scaling scale_embeddings scale_embedding
        normalize_embedding use_sliding_window use_scaled_rope norm_after_attention sandwich_norm use_post_norm
        use_lora use_mup shared_input_output_embedding disable_qkv_norm use_mla enable_moe use_moe moe
        """),
        (False,),
    ),
    **dict.fromkeys(_names("is_causal use_rope use_rotary_embeddings causal"), (True,)),
    **dict.fromkeys(
        _names("""
        embedding_multiplier residual_multiplier logits_scaling logit_scale embedding_scale lm_head_multiplier
        scale_emb width_multiplier output_multiplier_scale rope_ratio rotary_pct rotary_percent rope_scaling_factor
        partial_rotary_factor
        """),
        (1,),
    ),
    **dict.fromkeys(
        _names("""
        num_experts num_local_experts n_routed_experts n_shared_experts num_nextn_predict_layers attn_logit_softcapping
        final_logit_softcapping logit_softcapping router_jitter_noise mtp_num_layers num_mtp_layers clip_qkv
        """),
        (0,),
    ),
    "hidden_activation": ("silu",),
    "position_embedding_type": ("rope", "absolute"),
    "normalization": ("rmsnorm",),
    "norm_type": ("rmsnorm", "rms_norm"),
    "rope_type": ("default",),
    "layer_types": ("full_attention",),  # each of them
}  # fmt: skip

_ROPE = (
    "rope_type type rope_theta factor original_max_position_embeddings attention_factor beta_fast beta_slow "
    "low_freq_factor high_freq_factor mscale mscale_all_dim truncate partial_rotary_factor short_factor long_factor"
)
ROPE_HONOURED = frozenset(_ROPE.split())
ROPE_HARMLESS = frozenset({"finetuned", "original_rope_theta"})
ROPE_NEUTRAL: Mapping[str, tuple[Any, ...]] = dict.fromkeys(("attn_factor", "extrapolation_factor", "alpha"), (1,))


def refuse_unknown_keys(family: str, config: Fields) -> None:
    """Raises `UsageError` that names keys and values, unless each is honoured, harmless, or says that nothing is so."""
    known = HONOURED[family] | HARMLESS
    strange = [
        name
        for name, value in config.values.items()
        if name not in known and not name.startswith(HARMLESS_BEGINNINGS) and not _neutral(NEUTRAL, name, value)
    ]
    otherwise = "generate with the program that trained it" if family == "nanogpt" else "use --backend vllm"
    _refuse(config, strange, f"a {family} model here does not know", otherwise)


def refuse_unknown_rope_keys(scaling: Fields) -> None:
    """The same within rope_scaling or rope_parameters."""
    known = ROPE_HONOURED | ROPE_HARMLESS
    strange = [
        name for name, value in scaling.values.items() if name not in known and not _neutral(ROPE_NEUTRAL, name, value)
    ]
    _refuse(scaling, strange, "the rotary positions here do not know")


def _neutral(neutral: Mapping[str, tuple[Any, ...]], name: str, value: Any) -> bool:
    """Nothing at all is always neutral."""
    if value is None or value in ({}, [], ""):
        return True
    if isinstance(value, list) and not isinstance(value[0], dict | list):
        return all(one in neutral.get(name, ()) for one in value)
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral.get(name, ()))


def _refuse(config: Fields, strange: list[str], who: str, otherwise: str = "use --backend vllm") -> None:
    if not strange:
        return
    file = config.where.partition(":")[0]
    shown = ", ".join(f"'{name[:60]}': {_short(config.values[name])}" for name in strange[:SHOWN])
    more = f" and {len(strange) - SHOWN} more" if len(strange) > SHOWN else ""
    raise UsageError(
        f"{config.where} has {shown}{more}, which {who}: it may change what the model computes. "
        f"If you know that it changes nothing, remove it from {file}; if not, {otherwise}."
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
