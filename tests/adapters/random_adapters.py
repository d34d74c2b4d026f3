"""Adapters with random weights, the weights that they come to, folders of them as PEFT writes them, and one prompt
under weights that change.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from gpuinfer.text.transformer import Adapter, Layer, Linear, LowRank, Shape, Weights

ALL = ("q", "k", "v", "o", "gate", "up", "down")
SIZE = 0.3  # of what an adapter adds, beside weights of about 1 / √in


def sizes_of(shape: Shape, name: str) -> tuple[str, int, int, int]:
    """Product, first output, outputs, inputs."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    hidden, inner = shape.hidden, shape.intermediate
    return {
        "q": ("qkv", 0, queries, hidden),
        "k": ("qkv", queries, keys, hidden),
        "v": ("qkv", queries + keys, keys, hidden),
        "o": ("out", 0, hidden, queries),
        "gate": ("up", 0, inner, hidden),
        "up": ("up", inner if shape.gated else 0, inner, hidden),
        "down": ("down", 0, hidden, inner),
    }[name]


def random_adapter(shape: Shape, rank: int = 4, seed: int = 0, targets=ALL) -> Adapter:
    dice = torch.Generator().manual_seed(1000 + seed)
    targets = [name for name in targets if shape.gated or name != "gate"]

    def low(name: str) -> LowRank:
        product, first, out, inner = sizes_of(shape, name)
        down = torch.randn(rank, inner, generator=dice) / inner**0.5
        return LowRank(product, first, down, SIZE * torch.randn(out, rank, generator=dice) / rank**0.5)

    return Adapter(tuple(tuple(low(name) for name in targets) for _ in range(shape.layers)))


def merged(weights: Weights, adapter: Adapter) -> Weights:
    """W + up · down, everywhere."""

    def linear(given: Linear, lows: list[LowRank]) -> Linear:
        weight = given.weight.float().clone()
        for low in lows:
            weight[low.first : low.first + len(low.up)] += low.up @ low.down
        return replace(given, weight=weight.to(given.weight.dtype))

    def layer(given: Layer, lows: tuple[LowRank, ...]) -> Layer:
        own = {name: [low for low in lows if low.product == name] for name in ("qkv", "out", "up", "down")}
        return replace(given, **{name: linear(getattr(given, name), found) for name, found in own.items()})

    layers = tuple(layer(*pair) for pair in zip(weights.layers, adapter.layers, strict=True))
    return replace(weights, layers=layers)


MODULES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip


def peft_folder(folder: Path, shape: Shape, rank: int = 4, seed: int = 0, targets=ALL, **config) -> Path:
    """A folder with a random adapter whose scale is 1, unless `config` says otherwise."""
    adapter = random_adapter(shape, rank, seed, targets)
    tensors = {}
    for number, layer in enumerate(adapter.layers):
        for name, low in zip(targets, layer, strict=True):
            before = f"base_model.model.model.layers.{number}.{MODULES[name]}"
            tensors[f"{before}.lora_A.weight"], tensors[f"{before}.lora_B.weight"] = low.down, low.up
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    own = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none",
        "target_modules": [MODULES[name].rpartition(".")[2] for name in targets], "lora_dropout": 0.05,
        "base_model_name_or_path": "somewhere/else", "inference_mode": True, "use_rslora": False,
        "modules_to_save": None, "use_dora": False, "fan_in_fan_out": False, "init_lora_weights": True,
        "rank_pattern": {}, "alpha_pattern": {}, "layers_to_transform": None, "layers_pattern": None,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(own | config))
    return folder


def stepped(generator, asked, changes, *, parts=True):
    """The answer and the parts of one prompt, with other weights before the steps of these numbers."""
    [prepared] = generator.prepare([asked])
    if isinstance(prepared, Exception):
        raise prepared
    generator.add(0, replace(prepared, parts=parts))
    given, number = [], 0
    while True:
        if number in changes:
            generator.update(*changes[number])
        step = generator.step()
        given += [part for _, part in step.parts]
        number += 1
        if step.finished:
            return step.finished[0][1], given
