"""Tiny folders of masked diffusion models, as their makers publish them: random weights, a real tokenizer, no network.

`from text.tiny_diffusion import tiny_diffusion`. A folder is written in a temporary place, once for all processes of a
test run: the tests that share it must not change it (`text.tiny.copy_of` gives one that may be changed).
"""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from text.tiny import END, PAD, POSITIONS, SPECIAL, VOCABULARY, folder_name, publish, session_folder, write_tokenizer

MASK = len(SPECIAL)  # the token that follows those of the other tiny models
MASK_TEXT = "<|mask|>"
HEAD = 1.0  # of the head's weights: the likeliest of some masks has a probability over 0.9, of others under 0.3
FAMILIES = ("llada", "llada-moe", "llada2", "dream", "sdar")

Tensors = Iterator[tuple[str, tuple[int, ...]]]


def tiny_diffusion(family: str, *, seed: int = 0, dtype: str = "float32", head: float = HEAD, **changes: Any) -> Path:
    """A folder: 2 layers (llada2: 3, the first without experts), 64 values, 4 heads over 2, 384 tokens, 256 positions.

    `changes` are keys of config.json; None takes one away. `head` scales the head, and so how sure the model is.
    """
    name = folder_name(family, [seed, dtype, head, changes])
    made = session_folder() / name
    if not made.is_dir():
        draft = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=session_folder()))
        _write(draft, family, seed, getattr(torch, dtype), head, changes)
        publish(draft, made)
    return made


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """config.json as this family has it."""
    config = {**CONFIGS[family], **changes}
    return {name: value for name, value in config.items() if value is not None}


def tensors_of(family: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a model of this config has."""
    return dict(TENSORS[family](config))


def _write(folder: Path, family: str, seed: int, dtype: torch.dtype, head: float, changes: dict[str, Any]) -> None:
    write_tokenizer(folder, [*SPECIAL, MASK_TEXT], mask_token=MASK_TEXT)
    config = config_of(family, **changes)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    drawn = {name: _drawn(name, shape, seed, head).to(dtype) for name, shape in tensors_of(family, config).items()}
    save_file(drawn, folder / "model.safetensors", metadata={"format": "pt"})


def _drawn(name: str, shape: tuple[int, ...], seed: int, head: float) -> torch.Tensor:
    """So large that neighbours and positions matter to what stands at a mask, which the mask itself is hardly ever."""
    dice = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    drawn = torch.randn(shape, generator=dice)
    if len(shape) == 1:
        return 0.1 * drawn + _middle(name)
    if name in ("lm_head.weight", "model.transformer.ff_out.weight"):
        drawn[MASK] = 0.0
        return head * drawn
    return 0.5 * drawn if "wte" in name or "embed" in name else 0.25 * drawn


def _middle(name: str) -> float:
    """Of a vector's values. Queries and keys are long enough that attention is not even."""
    if "norm" not in name and not name.endswith("ln_f.weight"):
        return 0.0
    return 2.0 if any(kind in name for kind in ("q_norm", "k_norm", "query_layernorm", "key_layernorm")) else 1.0


def _linear(name: str, out: int, inner: int, bias: bool = False) -> Tensors:
    yield f"{name}.weight", (out, inner)
    if bias:
        yield f"{name}.bias", (out,)


def _mlp(prefix: str, hidden: int, inner: int) -> Tensors:
    yield from _linear(f"{prefix}gate_proj", inner, hidden)
    yield from _linear(f"{prefix}up_proj", inner, hidden)
    yield from _linear(f"{prefix}down_proj", hidden, inner)


def _ends(config: Mapping[str, Any], embedding: str) -> Tensors:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield f"model.{embedding}.weight", (vocabulary, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.get("tie_word_embeddings", False):
        yield "lm_head.weight", (vocabulary, hidden)


def _llada(config: Mapping[str, Any]) -> Tensors:
    hidden, inner, heads = config["d_model"], config["mlp_hidden_size"], config["n_heads"]
    size, keys, bias = hidden // heads, config.get("n_kv_heads", 1), config.get("include_bias", False)
    qkv = bias or config.get("include_qkv_bias", False)
    rows = config.get("embedding_size", config["vocab_size"])
    yield "model.transformer.wte.weight", (rows, hidden)
    for number in range(config["n_layers"]):
        block = f"model.transformer.blocks.{number}."
        yield f"{block}attn_norm.weight", (hidden,)
        yield from _linear(f"{block}q_proj", hidden, hidden, qkv)
        yield from _linear(f"{block}k_proj", keys * size, hidden, qkv)
        yield from _linear(f"{block}v_proj", keys * size, hidden, qkv)
        yield from _linear(f"{block}attn_out", hidden, hidden, bias)
        yield f"{block}ff_norm.weight", (hidden,)
        yield from _linear(f"{block}ff_proj", inner, hidden, bias)
        yield from _linear(f"{block}up_proj", inner, hidden, bias)
        yield from _linear(f"{block}ff_out", hidden, inner, bias)
    yield "model.transformer.ln_f.weight", (hidden,)
    if not config.get("weight_tying", False):
        yield from _linear("model.transformer.ff_out", rows, hidden, bias)


def _llama_names(config: Mapping[str, Any], *, bias: bool, normed: bool) -> Tensors:
    """Everything but what stands for the MLP."""
    hidden, heads, keys = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim", hidden // heads)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        yield f"{layer}input_layernorm.weight", (hidden,)
        yield f"{layer}post_attention_layernorm.weight", (hidden,)
        yield from _linear(f"{layer}self_attn.q_proj", heads * size, hidden, bias)
        yield from _linear(f"{layer}self_attn.k_proj", keys * size, hidden, bias)
        yield from _linear(f"{layer}self_attn.v_proj", keys * size, hidden, bias)
        yield from _linear(f"{layer}self_attn.o_proj", hidden, heads * size, config.get("attention_bias", False))
        if normed:
            yield f"{layer}self_attn.q_norm.weight", (size,)
            yield f"{layer}self_attn.k_norm.weight", (size,)
    yield from _ends(config, "embed_tokens")


def _dense(config: Mapping[str, Any], *, bias: bool, normed: bool) -> Tensors:
    yield from _llama_names(config, bias=bias, normed=normed)
    for number in range(config["num_hidden_layers"]):
        yield from _mlp(f"model.layers.{number}.mlp.", config["hidden_size"], config["intermediate_size"])


def _llada_moe(config: Mapping[str, Any]) -> Tensors:
    yield from _llama_names(config, bias=config["attention_bias"], normed=config["qk_layernorm"])
    hidden = config["hidden_size"]
    for number, mixed in enumerate(config["moe_layer_freq"]):
        mlp = f"model.layers.{number}.mlp."
        if not mixed:
            yield from _mlp(mlp, hidden, config["dense_intermediate_size"])
            continue
        yield from _linear(f"{mlp}gate", config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            yield from _mlp(f"{mlp}experts.{expert}.", hidden, config["expert_intermediate_size"])


def _llada2(config: Mapping[str, Any]) -> Tensors:
    hidden, heads, keys = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    size = config["head_dim"]
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        yield f"{layer}input_layernorm.weight", (hidden,)
        yield f"{layer}post_attention_layernorm.weight", (hidden,)
        yield from _linear(
            f"{layer}attention.query_key_value", (heads + 2 * keys) * size, hidden, config["use_qkv_bias"]
        )
        yield from _linear(f"{layer}attention.dense", hidden, heads * size, config["use_bias"])
        yield f"{layer}attention.query_layernorm.weight", (size,)
        yield f"{layer}attention.key_layernorm.weight", (size,)
        if number < config["first_k_dense_replace"]:
            yield from _mlp(f"{layer}mlp.", hidden, config["intermediate_size"])
        else:
            yield from _llada2_experts(f"{layer}mlp.", config)
    yield from _ends(config, "word_embeddings")


def _llada2_experts(prefix: str, config: Mapping[str, Any]) -> Tensors:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    yield f"{prefix}gate.weight", (config["num_experts"], hidden)
    yield f"{prefix}gate.expert_bias", (config["num_experts"],)
    for expert in range(config["num_experts"]):
        yield from _mlp(f"{prefix}experts.{expert}.", hidden, inner)
    if config["num_shared_experts"]:
        yield from _mlp(f"{prefix}shared_experts.", hidden, inner * config["num_shared_experts"])


_IDS = {"vocab_size": VOCABULARY, "eos_token_id": END, "pad_token_id": PAD, "mask_token_id": MASK}
_WIDE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.2",
    **_IDS,
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llada": {
        "architectures": ["LLaDAModelLM"],
        "auto_map": {
            "AutoConfig": "configuration_llada.LLaDAConfig",
            "AutoModelForCausalLM": "modeling_llada.LLaDAModelLM",
            "AutoModel": "modeling_llada.LLaDAModelLM",
        },
        "model_type": "llada",
        "activation_type": "silu",
        "alibi": False,
        "alibi_bias_max": 8.0,
        "attention_dropout": 0.0,
        "attention_layer_norm": False,
        "attention_layer_norm_with_affine": True,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "d_model": 64,
        "embedding_dropout": 0.0,
        "embedding_size": VOCABULARY,
        "flash_attention": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "init_cutoff_factor": None,
        "init_device": "meta",
        "init_fn": "mitchell",
        "init_std": 0.02,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "max_sequence_length": POSITIONS,
        "mlp_hidden_size": 160,
        "mlp_ratio": 4,
        "multi_query_attention": None,
        "n_heads": 4,
        "n_kv_heads": 2,
        "n_layers": 2,
        "precision": "amp_bf16",
        "residual_dropout": 0.0,
        "rms_norm_eps": 1e-05,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": 10_000.0,
        "scale_logits": False,
        "transformers_version": "4.46.3",
        "use_cache": False,
        "weight_tying": False,
        **_IDS,
    },
    "llada-moe": {
        **_WIDE,
        "architectures": ["LLaDAMoEModelLM"],
        "auto_map": {
            "AutoConfig": "configuration_lladamoe.LLaDAConfig",
            "AutoModelForCausalLM": "modeling_lladamoe.LLaDAMoEModelLM",
        },
        "model_type": "llada",
        "attention_bias": False,
        "clip_qkv": None,
        "dense_intermediate_size": 160,
        "expert_intermediate_size": 48,
        "shared_expert_intermediate_size": None,
        "moe_layer_freq": [1, 1],
        "moe_router_enable_expert_bias": False,
        "moe_router_score_function": "softmax",
        "norm_topk_prob": None,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "output_router_logits": False,
        "partial_rotary_factor": 1,
        "qk_layernorm": True,
        "routed_scaling_factor": 1,
        "router_aux_loss_coef": 0.01,
        "router_num_group": None,
        "router_topk_group": None,
    },
    "llada2": {
        **_WIDE,
        "architectures": ["LLaDA2MoeModelLM"],
        "auto_map": {
            "AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig",
            "AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM",
        },
        "model_type": "llada2_moe",
        "embedding_dropout": 0.0,
        "first_k_dense_replace": 1,
        "head_dim": 16,
        "intermediate_size": 160,
        "max_window_layers": 28,
        "moe_intermediate_size": 48,
        "moe_router_enable_expert_bias": True,
        "n_group": 4,
        "norm_head": False,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 3,
        "num_shared_experts": 1,
        "output_dropout": 0.0,
        "output_router_logits": False,
        "partial_rotary_factor": 0.5,
        "rotary_dim": 8,
        "routed_scaling_factor": 2.5,
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "sliding_window": 4096,
        "topk_group": 2,
        "use_bias": False,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "use_rmsnorm": True,
        "use_sliding_window": False,
    },
    "dream": {
        **_WIDE,
        "architectures": ["DreamModel"],
        "auto_map": {
            "AutoConfig": "configuration_dream.DreamConfig",
            "AutoModel": "modeling_dream.DreamModel",
        },
        "model_type": "Dream",
        "bos_token_id": END,
        "intermediate_size": 160,
        "max_window_layers": 28,
        "sliding_window": None,
        "use_mrope": False,
        "use_sliding_window": False,
    },
    "sdar": {
        **_WIDE,
        "architectures": ["SDARForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_sdar.SDARConfig",
            "AutoModel": "modeling_sdar.SDARForCausalLM",
            "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM",
        },
        "model_type": "sdar",
        "attention_bias": False,
        "block_size": 4,
        "debug": False,
        "ep_size": 1,
        "fuse_cross_entropy": True,
        "head_dim": 32,
        "intermediate_size": 160,
        "max_window_layers": 28,
        "micro_forward": False,
        "save_gate": False,
        "skip_checkpoint": False,
        "sliding_window": None,
        "use_deepep": False,
        "use_sliding_window": False,
    },
}
TENSORS: Mapping[str, Callable[[Mapping[str, Any]], Tensors]] = {
    "llada": _llada,
    "llada-moe": _llada_moe,
    "llada2": _llada2,
    "dream": lambda config: _dense(config, bias=True, normed=False),
    "sdar": lambda config: _dense(config, bias=config["attention_bias"], normed=True),
}
