"""PEFT folders for "tiny", whose adapters turn its answers about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, LAYERS, RANK = 256, 6, 4


def adapter(folder: Path, seed: int, *, rank: int = RANK, hidden: int = HIDDEN, scale: float = 0.3) -> Path:
    """On q_proj alone, of random matrices."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Any] = {}
    for layer in range(LAYERS):
        place = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{place}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator) * scale
        tensors[f"{place}.lora_B.weight"] = torch.randn(hidden, rank, generator=generator) * scale
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
