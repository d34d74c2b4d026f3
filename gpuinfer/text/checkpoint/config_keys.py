"""Every key of config.json is honoured, changes no logit, or is an error: an unknown key may change what a model
computes.

Also: how masked diffusion families are recognised, which models are not served, and typed access to fields.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuinfer.errors import UsageError


@dataclass(frozen=True)
class PublishedFamily:
    """A masked diffusion family as its makers publish it."""

    architecture: str
    types: tuple[str, ...]  # model_type
    honoured: frozenset[str]
    harmless: frozenset[str]
    neutral: Mapping[str, tuple[Any, ...]]  # the only values that are implemented here


def key_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SHARED = "mask_token_id hidden_act rms_norm_eps rope_theta rope_scaling rope_parameters partial_rotary_factor"
_SIZES = (
    "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim max_position_embeddings "
    "original_max_position_embeddings"
)
_DENSE = f"{_SHARED} {_SIZES} intermediate_size"
_NO_WINDOW = "sliding_window max_window_layers"  # without effect, as use_sliding_window is false

MASKED: Mapping[str, PublishedFamily] = {
    "llada": PublishedFamily(
        "LLaDAModelLM",
        ("llada",),
        key_set(
            "mask_token_id d_model n_heads n_kv_heads multi_query_attention n_layers mlp_hidden_size mlp_ratio "
            "embedding_size max_sequence_length weight_tying activation_type rms_norm_eps rope_theta include_qkv_bias"
        ),
        key_set(
            "alibi_bias_max attention_layer_norm_with_affine init_cutoff_factor init_device init_fn init_std precision"
        )
        | key_set("rope_full_precision"),  # angles are always float32 here
        {
            "attention_layer_norm": (False,),
            "bias_for_layer_norm": (False,),
            "block_group_size": (1,),
            "block_type": ("llama",),
            "include_bias": (False,),
            "input_emb_norm": (False,),
            "layer_norm_type": ("rms",),
            "layer_norm_with_affine": (True,),
            "rope": (True,),
            "scale_logits": (False,),
        },
    ),
    "llada-moe": PublishedFamily(
        "LLaDAMoEModelLM",
        ("llada", "lladamoe", "llada_moe"),
        key_set(
            f"{_SHARED} {_SIZES} attention_bias qk_layernorm dense_intermediate_size expert_intermediate_size "
            "moe_layer_freq num_experts num_experts_per_tok"
        ),
        frozenset(),
        {
            "moe_router_enable_expert_bias": (False,),
            "moe_router_score_function": ("softmax",),
            "norm_topk_prob": (False,),  # what its own code computes, whatever this says
            "routed_scaling_factor": (1,),
            "router_num_group": (1,),
            "router_topk_group": (1,),
            "shared_expert_intermediate_size": (0,),
        },
    ),
    "llada2": PublishedFamily(
        "LLaDA2MoeModelLM",
        ("llada2_moe",),
        key_set(
            f"{_DENSE} block_size first_k_dense_replace moe_intermediate_size moe_shared_expert_intermediate_size "
            "n_group num_experts num_experts_per_tok num_shared_experts rotary_dim routed_scaling_factor topk_group "
            "use_bias use_qkv_bias"
        ),
        key_set(f"{_NO_WINDOW} output_dropout mtp_loss_scaling_factor"),
        {
            "moe_router_enable_expert_bias": (True,),
            "norm_head": (False,),
            "norm_softmax": (False,),
            "norm_topk_prob": (True,),
            "router_dtype": ("fp32", "float32"),
            "score_function": ("sigmoid",),
            "use_qk_norm": (True,),
            "use_rmsnorm": (True,),
        },
    ),
    "dream": PublishedFamily("DreamModel", ("Dream", "dream"), key_set(_DENSE), key_set(_NO_WINDOW), {}),
    "sdar": PublishedFamily(
        "SDARForCausalLM",
        ("sdar",),
        key_set(f"{_DENSE} attention_bias block_size"),
        key_set(
            f"{_NO_WINDOW} debug ep_size fuse_cross_entropy micro_forward save_gate skip_checkpoint use_deepep "
            "use_fused_linear_cross_entropy"
        ),
        {},
    ),
}

TOKENIZERS = {"dream": "DreamTokenizer"}  # own classes that add nothing to their files (Qwen's vocabulary)


MOST_JSON_BYTES = 64 << 20
MOST = 1 << 28  # of any size: more than any model has, and a product of two fits in 64 bits


def shown_value(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class ConfigFields:
    """A mapping and its name in messages. null counts as absent, as in transformers."""

    values: Mapping[str, Any]
    where: str = "config.json"

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = MOST) -> int:
        """Raises `UsageError` if the field is absent without a default, no whole number, or out of bounds."""
        value = self._value(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(name, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(name, "a number")
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value) or value <= above:
            raise self.wrong(name, f"a number above {above:g}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a text")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self._value(name, {})
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._value(name, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.wrong(name, "a list of texts")
        return tuple(value)

    def ids(self, name: str, default: int | None = None) -> tuple[int, ...]:
        """One token id or a list of them."""
        value = self.values.get(name, default)  # null: there is no such token
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in listed):
            raise self.wrong(name, "a token id or a list of them")
        return tuple(dict.fromkeys(listed))

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None and default is None:
            raise UsageError(f"{self.where} has no '{name}'. Copy it again from where the model came.")
        return default if value is None else value

    def wrong(self, name: str, wanted: str) -> UsageError:
        shown = shown_value(self.values.get(name))
        return UsageError(f"{self.where}: '{name}' is {shown}, not {wanted}. Mend it, or copy the file again.")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `UsageError` if the file is absent, too large or holds no object."""
    try:
        if path.stat().st_size > MOST_JSON_BYTES:
            raise UsageError(f"{path} is over {MOST_JSON_BYTES >> 20} MiB, too much for what it should be. Check it.")
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no {path}. Copy the whole model folder.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}. Copy it again from where the model came.") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} does not hold a JSON object. Copy it again from where the model came.")
    return value


SHOWN = 3  # keys in a message


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
    family: key_set(names)
    for family, names in {
        "llama": f"{_ANY} {_ROTARY} attention_bias mlp_bias",
        "mistral": f"{_ANY} {_ROTARY} sliding_window layer_types",
        "qwen2": f"{_ANY} {_ROTARY} {_QWEN}",
        "qwen3": f"{_ANY} {_ROTARY} {_QWEN} attention_bias",
        "gpt2": f"{_ANY} {_GPT2}",
        "nanogpt": "n_layer n_head n_embd block_size vocab_size",
    }.items()
}

# Keys without effect on the logits. Keys of biases are here because the tensors are checked instead: one too many, or a
# missing one, is refused when the weights are opened.
HARMLESS = key_set("""
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
    """)  # fmt: skip
HARMLESS_BEGINNINGS: tuple[str, ...] = ("_", "unsloth_", "axolotl_", "summary_")

# Features of other models, and the values that switch them off.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        key_set("""
        is_encoder_decoder add_cross_attention tie_encoder_decoder use_parallel_residual parallel_residual parallel_attn
        alibi use_alibi new_decoder_architecture use_mrope use_qk_norm qk_norm qk_layernorm use_logn_attn
        use_dynamic_ntk logn rope_interleaved rope_interleave use_rope_scaling scale_embeddings scale_embedding
        normalize_embedding use_sliding_window use_scaled_rope norm_after_attention sandwich_norm use_post_norm
        use_lora use_mup shared_input_output_embedding disable_qkv_norm use_mla enable_moe use_moe moe
        """),
        (False,),
    ),
    **dict.fromkeys(key_set("is_causal use_rope use_rotary_embeddings causal"), (True,)),
    **dict.fromkeys(
        key_set("""
        embedding_multiplier residual_multiplier logits_scaling logit_scale embedding_scale lm_head_multiplier
        scale_emb width_multiplier output_multiplier_scale rope_ratio rotary_pct rotary_percent rope_scaling_factor
        partial_rotary_factor
        """),
        (1,),
    ),
    **dict.fromkeys(
        key_set("""
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

ROPE_KNOWN = key_set(
    "rope_type type rope_theta factor original_max_position_embeddings attention_factor beta_fast beta_slow "
    "low_freq_factor high_freq_factor mscale mscale_all_dim truncate partial_rotary_factor short_factor long_factor "
    "finetuned original_rope_theta"  # the last two change nothing
)
ROPE_NEUTRAL: Mapping[str, tuple[Any, ...]] = dict.fromkeys(("attn_factor", "extrapolation_factor", "alpha"), (1,))


def refuse_unknown_keys(family: str, config: ConfigFields) -> None:
    """Raises `UsageError` with keys and values, unless each is honoured, harmless or neutral. The family "rope" is that
    of rope_scaling and rope_parameters.
    """
    neutral: Mapping[str, tuple[Any, ...]]
    beginnings, who = HARMLESS_BEGINNINGS, f"a {family} model here does not know"
    if family == "rope":
        known, neutral, beginnings, who = ROPE_KNOWN, ROPE_NEUTRAL, (), "the rotary positions here do not know"
    elif family in MASKED:
        own = MASKED[family]
        known = own.honoured | key_set(_ANY) | own.harmless | (HARMLESS - own.neutral.keys())
        neutral = {**NEUTRAL, **own.neutral}
    else:
        known, neutral = HONOURED[family] | HARMLESS, NEUTRAL

    def is_neutral(name: str, value: Any) -> bool:
        """Whether the value switches the feature off. An empty value always does."""
        if value is None or value in ({}, [], ""):
            return True
        off = neutral.get(name, ())
        if isinstance(value, list) and not isinstance(value[0], dict | list):
            return all(one in off for one in value)
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in off)

    strange = [
        name
        for name, value in config.values.items()
        if name not in known and not name.startswith(beginnings) and not is_neutral(name, value)
    ]
    if not strange:
        return
    cure = "Generate with the program that trained it." if family == "nanogpt" else ANOTHER_PROGRAM
    shown = ", ".join(f"'{name[:60]}': {shown_value(config.values[name])}" for name in strange[:SHOWN])
    more = f" and {len(strange) - SHOWN} more" if len(strange) > SHOWN else ""
    raise UsageError(
        f"{config.where} has {shown}{more}, which {who}: it may change what the model computes. "
        f"{cure} If you know that it changes nothing, remove it from {config.where.partition(':')[0]}."
    )


FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
ALIASES = {"ministral": "mistral"}  # in transformers, a Mistral with layers of two kinds
GENERATORS = ("ForCausalLM", "LMHeadModel", "Model")  # ends of the names of classes that can generate
ENCODERS = {
    *("albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet"),
    *("nomic_bert", "roberta", "xlm-roberta"),
}
ANOTHER_PROGRAM = "Serve it with --backend vllm, if vLLM serves it: docs/vllm.md."
ANOTHER_DECODER = (
    "Use -B decoder=transformers, which has transformers' own code compute it, or --backend vllm, if they know it."
)


def elsewhere(what: str) -> UsageError:
    """The error for a model that our own decoders do not run. The backend vllm does not read the folder here."""
    return UsageError(f"{what}, which gpuinfer's own decoders do not run. {ANOTHER_DECODER}")


def no_generator(what: str) -> UsageError:
    return UsageError(f"{what}, and no backend of gpuinfer serves such models. Run it with transformers.")


def refuse_remote_code(settings: Mapping[str, Any], where: str) -> None:
    """Raises `UsageError` for a model that brings its own code, which never runs here."""
    if settings.get("auto_map"):
        raise UsageError(
            f"{where} asks to run code of its own (auto_map), which gpuinfer's own decoders never do. If you know that "
            f"the model is a plain one of its type, remove auto_map from {where}. vLLM runs such code where you trust "
            "it: --backend vllm --trust-remote-code."
        )


def is_native(settings: Mapping[str, Any]) -> bool:
    """Whether a decoder of ours is for the model of this config.json, or its refusal is ours to word."""
    kind = settings.get("model_type")
    if not isinstance(kind, str) or settings.get("is_encoder_decoder") is True or kind in ENCODERS:
        return True
    if any(kind in one.types for one in MASKED.values()):
        return True
    architectures = settings.get("architectures")
    listed = architectures if isinstance(architectures, list) else []
    if any(one.architecture in listed for one in MASKED.values()):
        return True
    quantised = settings.get("quantization_config")
    return ALIASES.get(kind, kind) in FAMILIES and (not quantised or quantisation_method(quantised) in DEQUANTISED)


def supported_family(config: ConfigFields) -> str:
    """The family's name. Raises `UsageError` for a model that is not served here."""
    if (masked := _masked_family(config)) is not None:
        return masked
    kind = config.values.get("model_type")
    if config.values.get("is_encoder_decoder") is True:
        raise no_generator(f"the model is an encoder with a decoder (type '{str(kind)[:40]}')")
    if isinstance(kind, str) and kind in ENCODERS:
        raise no_generator(f"the model is an encoder (type '{kind}'), which reads text and writes none")
    refuse_remote_code(config.values, config.where)
    if not isinstance(kind, str):
        raise UsageError(
            f"{config.where} does not say its model_type. Save the model again with transformers "
            f"(save_pretrained); these run here: {', '.join(FAMILIES)}."
        )
    if (family := ALIASES.get(kind, kind)) not in FAMILIES:
        raise elsewhere(f"the model is of type '{kind[:40]}' ({', '.join(FAMILIES)} run here)")
    quantisation_of(config)
    if any(config.values.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise elsewhere("the model is a mixture of experts")
    for name in config.texts("architectures"):
        if not name.endswith(GENERATORS):
            raise no_generator(f"the model is a {name[:60]}")
    return family


def _masked_family(config: ConfigFields) -> str | None:
    """The family of a masked diffusion model, by its architecture; None: the model is none.

    Code in the folder (auto_map) is no error: all these families bring some, and none is needed here.
    """
    architecture = next(iter(config.texts("architectures")), "")
    family = next((family for family, one in MASKED.items() if one.architecture == architecture), None)
    kind = config.values.get("model_type")
    known = [one.architecture for one in MASKED.values() if isinstance(kind, str) and kind in one.types]
    if family is None:
        if known and not architecture:
            raise UsageError(
                f"{config.where} does not say its architecture, and models of type '{kind}' are of several kinds. Add "
                f'"architectures": ["{known[0]}"], or which of these it is: {", ".join(known)}.'
            )
        if known:
            raise elsewhere(f"the model is a {architecture[:60]} ({', '.join(known)} of type '{kind}' runs here)")
        return None
    if kind is not None and architecture not in known:
        raise config.wrong(
            "model_type", f"{' or '.join(repr(one) for one in MASKED[family].types)}, as a {architecture} has"
        )
    quantisation_of(config)
    return family


def masked_family_in(folder: Path) -> str | None:
    """The family of the masked diffusion model in a folder, by the architecture that its config.json names; None: it is
    no such model, or its config.json cannot be read.
    """
    try:
        architectures = ConfigFields(read_json(folder / "config.json"), "config.json").texts("architectures")
    except UsageError:
        return None
    return next((family for family, one in MASKED.items() if one.architecture in architectures), None)


DEQUANTISED = ("gptq", "awq", "fp8", "fbgemm_fp8", "compressed-tensors", "bitsandbytes")
"""Methods of quantization_config whose weights are read as plain numbers."""


def quantisation_method(settings: Any) -> str:
    """What quantization_config says."""
    if not isinstance(settings, Mapping):
        return "an unnamed method"
    old = "bitsandbytes" if settings.get("load_in_4bit") or settings.get("load_in_8bit") else "an unnamed method"
    return str(settings.get("quant_method") or old)  # bitsandbytes had no name in its first files


def quantisation_of(config: ConfigFields) -> ConfigFields | None:
    """How the weights are quantised; None: they are not. Raises `UsageError` for a method that is not read."""
    if not config.has("quantization_config"):
        return None
    settings = ConfigFields(config.mapping("quantization_config"), f"{config.where}: quantization_config")
    method = quantisation_method(settings.values)
    if method not in DEQUANTISED:
        raise elsewhere(f"the weights are quantised by {method[:40]} ({', '.join(DEQUANTISED)} are read here)")
    return settings
