"""Adapters as PEFT saves them (adapter_config.json, adapter_model.safetensors), for a model that has been opened."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.adapter_config import MERGE, AdapterConfig, read_adapter_config
from gpuinfer.text.checkpoint.assembly import Gpt2Layout, RotaryLayout
from gpuinfer.text.checkpoint.checkpoint import Checkpoint
from gpuinfer.text.checkpoint.safetensors import SafetensorsStore, read_header
from gpuinfer.text.shape import Shape
from gpuinfer.text.weights import Adapter, LowRank, Product

FILE = "adapter_model.safetensors"
WHOLE = re.compile(r"(?:base_model\.model\.)?(?:model\.)?(?:transformer\.)?(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
MODULE = re.compile(r"(?:layers|blocks|h)\.([0-9]{1,6})\.(.+)")
SHOWN = 3


@dataclass(frozen=True)
class Target:
    """A linear layer that may be adapted: which outputs of which product of ours it is, and its inputs."""

    product: Product
    first: int
    outputs: int
    inputs: int


def targets_of(layout: RotaryLayout | Gpt2Layout) -> dict[str, Target]:
    """By the name within a layer. What stands for the MLP is not among them where it is experts."""
    shape = layout.shape
    hidden, inner = shape.hidden, shape.intermediate
    if isinstance(layout, Gpt2Layout):
        return {
            "attn.c_attn": Target("qkv", 0, 3 * hidden, hidden),
            "attn.c_proj": Target("out", 0, hidden, hidden),
            "mlp.c_fc": Target("up", 0, inner, hidden),
            "mlp.c_proj": Target("down", 0, hidden, inner),
        }
    names, sizes = layout.names, qkv_sizes(shape)
    queries = sizes[0]
    outputs = sizes if len(names.qkv) == len(sizes) else (sum(sizes),)
    firsts = (0, queries, queries + sizes[1])
    parts = zip(names.qkv, firsts, outputs, strict=False)
    attention = {name: Target("qkv", first, size, hidden) for name, first, size in parts}
    attention[names.out] = Target("out", 0, hidden, queries)
    if shape.experts is not None:
        return attention
    return {
        **attention,
        f"{names.mlp}{names.gate}": Target("up", 0, inner, hidden),
        f"{names.mlp}{names.up}": Target("up", inner, inner, hidden),
        f"{names.mlp}{names.down}": Target("down", 0, hidden, inner),
    }


def qkv_sizes(shape: Shape) -> tuple[int, int, int]:
    """Outputs that are queries, keys, values."""
    keys = shape.kv_heads * shape.head_dim
    return shape.heads * shape.head_dim, keys, keys


def read_adapter(checkpoint: Checkpoint, place: str) -> Adapter:
    """The adapter in the folder `place`, for the model that `checkpoint` opened.

    Raises `UsageError` for what is not there, is damaged, is for a model of another shape, or does more than to add low
    ranks to linear layers.
    """
    shape, folder = checkpoint.shape, Path(place).expanduser()
    if shape.layers == 0:
        raise UsageError(f"the model '{checkpoint.name}' has no layers that could be adapted. Choose another.")
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder} with an adapter. Give one as PEFT saves it (save_pretrained).")
    config = read_adapter_config(folder)
    store = _store(folder)
    layout = checkpoint.layout
    targets = targets_of(layout)
    before = "transformer.h.{}." if isinstance(layout, Gpt2Layout) else layout.names.prefix + layout.names.layer
    found = _pairs(store, shape.layers, targets)
    layers: list[list[LowRank]] = [[] for _ in range(shape.layers)]
    for (number, name), pair in sorted(found.items()):
        target, module = targets[name], before.format(number) + name
        _check(store, config, module, pair, target)
        layers[number] += _read(store, pair, target, config.scale(module), shape)
    return Adapter(tuple(map(tuple, layers)))


def _store(folder: Path) -> SafetensorsStore:
    if (folder / FILE).is_file():
        return SafetensorsStore(str(folder), dict(read_header(folder / FILE)))
    if (folder / "adapter_model.bin").is_file():
        raise UsageError(
            f"{folder} holds its weights as a pickle (adapter_model.bin), which is not read, as it can run code. Save "
            "it again where you trust it: model.save_pretrained(folder, safe_serialization=True)"
        )
    raise UsageError(f"{folder} has no {FILE}. Copy the whole folder.")


Pairs = dict[tuple[int, str], dict[str, str]]


def _pairs(store: SafetensorsStore, layers: int, targets: dict[str, Target]) -> Pairs:
    """By layer and module the names of its two tensors, "A" and "B". Raises `UsageError` for any other tensor."""
    found: Pairs = {}
    for name in store.tensors:
        whole = WHOLE.fullmatch(name)
        module = None if whole is None else MODULE.fullmatch(whole[1])
        if whole is None or module is None or module[2] not in targets:
            known = ", ".join(one.rpartition(".")[2] for one in targets)
            raise UsageError(
                f"{store.where} adapts '{name[:120]}', and here only {known} of the layers can be. {MERGE}"
            )
        number = int(module[1])
        if number >= layers:
            raise UsageError(
                f"{store.where} adapts layer {number}, and this model has {layers} layers: it is for another "
                "base. Serve it with its own."
            )
        found.setdefault((number, module[2]), {})[whole[2]] = name
    if not found:
        raise UsageError(f"{store.where} holds no tensor at all. Save the adapter again.")
    return found


def _check(store: SafetensorsStore, config: AdapterConfig, module: str, pair: dict[str, str], target: Target) -> None:
    if pair.keys() != {"A", "B"}:
        lacking = min({"A", "B"} - pair.keys())
        raise UsageError(f"{store.where} has no lora_{lacking} of {module}, only the other half. Copy it again.")
    rank = config.rank(module)
    wanted = {"A": (rank, target.inputs), "B": (target.outputs, rank)}
    for half, shape in wanted.items():
        stored = store.tensors[pair[half]].shape
        if stored == shape:
            continue
        if len(stored) == 2 and stored[half == "A"] == shape[half == "A"]:
            own = stored[half == "B"]
            raise UsageError(
                f"{store.where} says rank {rank}, and its lora_{half} of {module} has rank {own} ({list(stored)}). "
                f"Correct r or rank_pattern in adapter_config.json, or save it again."
            )
        raise UsageError(
            f"{store.where} is for another base: its lora_{half} of {module} is {list(stored)}, and this model's must "
            f"be {list(shape)}. Serve it with the model that it was trained on."
        )


def _read(store: SafetensorsStore, pair: dict[str, str], target: Target, scale: float, shape: Shape) -> list[LowRank]:
    """One for each of queries, keys and values where the layer holds all three."""
    halves = [torch.empty(store.tensors[pair[half]].shape, dtype=torch.float32) for half in "AB"]
    for half, into in zip("AB", halves, strict=True):
        store.read(pair[half], into)
        if not bool(torch.isfinite(into).all()):
            raise UsageError(f"{store.where} holds NaN or infinity in '{pair[half]}'. Use another step.")
    down, up = halves
    up *= scale
    if target.product != "qkv" or target.outputs <= shape.heads * shape.head_dim:
        return [LowRank(target.product, target.first, down, up)]
    queries, keys, _ = qkv_sizes(shape)
    edges = itertools.pairwise((0, queries, queries + keys, target.outputs))
    return [LowRank("qkv", first, down, up[first:end].contiguous()) for first, end in edges]
