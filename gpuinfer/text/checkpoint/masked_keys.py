"""Masked diffusion models: how each family is known, and what the keys of its config.json mean here.

Which keys decide what is computed, which change no logit, and which must say that a feature is not used, or is: what
their own code computes whatever the key says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    """A family as its makers publish it."""

    architecture: str
    types: tuple[str, ...]  # model_type
    honoured: frozenset[str]
    harmless: frozenset[str]
    neutral: Mapping[str, tuple[Any, ...]]  # the values that are computed here


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SHARED = "mask_token_id hidden_act rms_norm_eps rope_theta rope_scaling rope_parameters partial_rotary_factor"
_SIZES = (
    "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim max_position_embeddings "
    "original_max_position_embeddings"
)
_DENSE = f"{_SHARED} {_SIZES} intermediate_size"
_NO_WINDOW = "sliding_window max_window_layers"  # which say nothing where use_sliding_window is false

MASKED: Mapping[str, Published] = {
    "llada": Published(
        "LLaDAModelLM",
        ("llada",),
        _names(
            "mask_token_id d_model n_heads n_kv_heads multi_query_attention n_layers mlp_hidden_size mlp_ratio "
            "embedding_size max_sequence_length weight_tying activation_type rms_norm_eps rope_theta include_qkv_bias"
        ),
        _names(
            "alibi_bias_max attention_layer_norm_with_affine init_cutoff_factor init_device init_fn init_std precision"
        )
        | _names("rope_full_precision"),  # angles are always float32 here
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
    "llada-moe": Published(
        "LLaDAMoEModelLM",
        ("llada", "lladamoe", "llada_moe"),
        _names(
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
    "llada2": Published(
        "LLaDA2MoeModelLM",
        ("llada2_moe",),
        _names(
            f"{_DENSE} block_size first_k_dense_replace moe_intermediate_size moe_shared_expert_intermediate_size "
            "n_group num_experts num_experts_per_tok num_shared_experts rotary_dim routed_scaling_factor topk_group "
            "use_bias use_qkv_bias"
        ),
        _names(f"{_NO_WINDOW} output_dropout mtp_loss_scaling_factor"),
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
    "dream": Published("DreamModel", ("Dream", "dream"), _names(_DENSE), _names(_NO_WINDOW), {}),
    "sdar": Published(
        "SDARForCausalLM",
        ("sdar",),
        _names(f"{_DENSE} attention_bias block_size"),
        _names(
            f"{_NO_WINDOW} debug ep_size fuse_cross_entropy micro_forward save_gate skip_checkpoint use_deepep "
            "use_fused_linear_cross_entropy"
        ),
        {},
    ),
}

TOKENIZERS = {"dream": "DreamTokenizer"}  # classes of their own that only say what their files say: Qwen's vocabulary


def family_of_architecture(architecture: str) -> str | None:
    return next((family for family, one in MASKED.items() if one.architecture == architecture), None)


def architectures_of(kind: str) -> tuple[str, ...]:
    """Those that go by this model_type. None at all: it is no diffusion model's."""
    return tuple(one.architecture for one in MASKED.values() if kind in one.types)
