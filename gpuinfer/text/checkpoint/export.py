"""Writes an opened checkpoint as a Hugging Face folder, so that other programs can be given the built-in model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.assembly import parts_of
from gpuinfer.text.checkpoint.checkpoint import Checkpoint
from gpuinfer.text.checkpoint.masked_keys import MASKED
from gpuinfer.text.shape import Experts, Shape


def save_folder(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """config.json, generation_config.json and model.safetensors. Of the built-in models "tiny", "tiny-llada" and so on
    without a tokenizer: prompts travel as tokens. Of a model in training with all settings of its base model.

    Raises `UsageError` for any other.
    """
    shape, base = checkpoint.shape, checkpoint.language.folder
    in_training = checkpoint.folder is None and base is not None and shape.family != "nanogpt"
    if not in_training and (checkpoint.folder is not None or shape.family not in CONFIGS):
        raise UsageError(f"model '{checkpoint.name}' is not one that can be written out. Use 'tiny'.")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for part in parts_of(checkpoint.layout):
        tensors[part.name] = torch.empty(part.shape, dtype=dtype)
        checkpoint.store.read(part.name, tensors[part.name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if in_training:
        for path in checkpoint.settings:
            shutil.copyfile(path, folder / path.name)
        return
    (folder / "config.json").write_text(json.dumps(config_of(checkpoint, dtype), indent=2))
    ends = {"eos_token_id": list(checkpoint.shape.end_tokens)}
    (folder / "generation_config.json").write_text(json.dumps(ends))


def config_of(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Any]:
    shape = checkpoint.shape
    config = {
        "vocab_size": shape.vocabulary,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": 10_000.0,
        "eos_token_id": shape.end_tokens[0],
        "bos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **CONFIGS[shape.family](shape),
    }
    if shape.masking is None:
        return {"model_type": shape.family, "architectures": ["Qwen2ForCausalLM"], **config}
    own = MASKED[shape.family]
    masked = {
        "model_type": own.types[0],
        "architectures": [own.architecture],
        "mask_token_id": shape.masking.mask_token,
    }
    return {**masked, **config}


def _usual(shape: Shape, intermediate: str = "intermediate_size") -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        intermediate: shape.intermediate,
        "max_position_embeddings": shape.positions,
        "hidden_act": shape.activation,
        "tie_word_embeddings": shape.tied,
    }


def _llada(shape: Shape) -> dict[str, Any]:
    return {
        "d_model": shape.hidden,
        "n_layers": shape.layers,
        "n_heads": shape.heads,
        "n_kv_heads": shape.kv_heads,
        "mlp_hidden_size": shape.intermediate,
        "embedding_size": shape.vocabulary,
        "max_sequence_length": shape.positions,
        "activation_type": shape.activation,
        "block_type": "llama",
        "layer_norm_type": "rms",
        "include_bias": False,
        "weight_tying": shape.tied,
    }


def _llada_moe(shape: Shape) -> dict[str, Any]:
    experts = shape.experts or Experts(0, 0, 0)
    return {
        **_usual(shape, "dense_intermediate_size"),
        "head_dim": shape.head_dim,
        "qk_layernorm": shape.qk_norm,
        "expert_intermediate_size": experts.intermediate,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "moe_layer_freq": [int(layer not in experts.dense) for layer in range(shape.layers)],
    }


def _llada2(shape: Shape) -> dict[str, Any]:
    experts = shape.experts or Experts(0, 0, 0)
    turned = 2 * len(shape.rope.inverse_frequencies) if shape.rope else 0
    return {
        **_usual(shape),
        "head_dim": shape.head_dim,
        "partial_rotary_factor": turned / shape.head_dim,
        "rotary_dim": turned,
        "use_bias": False,
        "moe_intermediate_size": experts.intermediate,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "num_shared_experts": experts.shared // experts.intermediate,
        "first_k_dense_replace": len(experts.dense),
        "n_group": experts.groups,
        "topk_group": experts.groups_chosen,
        "routed_scaling_factor": experts.scale,
        "score_function": "sigmoid",
        "norm_topk_prob": True,
        "use_qk_norm": True,
    }


def _sdar(shape: Shape) -> dict[str, Any]:
    return {**_usual(shape), "head_dim": shape.head_dim, "block_size": shape.masking and shape.masking.block}


CONFIGS: Mapping[str, Callable[[Shape], dict[str, Any]]] = {
    "qwen2": _usual,
    "llada": _llada,
    "llada-moe": _llada_moe,
    "llada2": _llada2,
    "dream": _usual,
    "sdar": _sdar,
}
