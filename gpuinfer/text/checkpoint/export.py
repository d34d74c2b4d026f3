"""Writes an opened checkpoint as a Hugging Face folder, so that other programs can be given the built-in model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.assembly import parts_of
from gpuinfer.text.checkpoint.checkpoint import Checkpoint


def save_folder(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """config.json, generation_config.json and model.safetensors. Of the built-in model "tiny" without a tokenizer:
    prompts travel as tokens. Of a model in training with all settings of its base model.

    Raises `UsageError` for any other.
    """
    shape, base = checkpoint.shape, checkpoint.language.folder
    in_training = checkpoint.folder is None and base is not None and shape.family != "nanogpt"
    if not in_training and (checkpoint.folder is not None or shape.family != "qwen2"):
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
    return {
        "model_type": shape.family,
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": 10_000.0,
        "hidden_act": shape.activation,
        "tie_word_embeddings": shape.tied,
        "eos_token_id": shape.end_tokens[0],
        "bos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
