"""Adapters as PEFT saves them (adapter_config.json, adapter_model.safetensors), for an opened model.

An unknown key of adapter_config.json is refused.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.checkpoint import Checkpoint
from gpuinfer.text.checkpoint.config_keys import ConfigFields, key_set, read_json
from gpuinfer.text.checkpoint.safetensors_folder import SafetensorsStore, read_header
from gpuinfer.text.checkpoint.tensor_layout import Gpt2Layout, RotaryLayout
from gpuinfer.text.checkpoint.transformers_folder import TransformersCheckpoint
from gpuinfer.text.transformer import Adapter, LowRank, Shape

CONFIG = "adapter_config.json"
MOST_RANK = 512
MERGE = "Merge it into its base model (PEFT's merge_and_unload), and serve that."


HONOURED = frozenset(["peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"])
HARMLESS = key_set("""
    base_model_name_or_path revision task_type inference_mode lora_dropout auto_mapping peft_version target_modules
    exclude_modules layers_to_transform layers_pattern fan_in_fan_out ensure_weight_tying low_cpu_mem_usage
    runtime_config ephemeral_gpu_offload megatron_core qalora_group_size eva_config corda_config loftq_config
    lora_ga_config
    """)  # the file itself shows which tensors there are; the other keys matter in training only
REFUSED: Mapping[str, str] = {
    "use_dora": "is a DoRA adapter, which scales whole columns of the base",
    "modules_to_save": "holds whole modules beside its low ranks",
    "trainable_token_indices": "changes embeddings of single tokens",
    "target_parameters": "adapts parameters that are no linear layers",
    "layer_replication": "repeats layers of its base",
    "lora_bias": "has biases of its own",
    "use_qalora": "is for quantised weights",
    "alora_invocation_tokens": "is switched on by tokens of the prompt (aLoRA)",
    "arrow_config": "is routed between several adapters",
    "use_bdlora": "has blocks on its diagonal",
    "megatron_config": "is sharded by Megatron",
}
STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that do not change the base model: PiSSA, OLoRA, CorDA and LoftQ change it."""


@dataclass(frozen=True)
class AdapterConfig:
    """`rank` and `scale` take a module's name, such as `model.layers.0.self_attn.q_proj`."""

    own_rank: int
    alpha: float
    root: bool  # the scale is alpha / √rank (Kalajdzievski 2023, rsLoRA), else alpha / rank
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def rank(self, module: str) -> int:
        return int(self._matching(self.ranks, module, self.own_rank))

    def scale(self, module: str) -> float:
        rank, alpha = self.rank(module), self._matching(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.root else rank)

    def _matching(self, patterns: Mapping[str, float], module: str, otherwise: float) -> float:
        """As PEFT has it: the first pattern that is the end of the module's name."""
        for pattern, value in patterns.items():
            with contextlib.suppress(re.error):
                if re.match(rf"(.*\.)?({pattern})$", module):
                    return value
        return otherwise


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Raises `UsageError` for a setting that cannot be honoured."""
    path = folder / CONFIG
    if not path.is_file():
        raise UsageError(f"there is no {path}: give a folder as PEFT saves it (save_pretrained).")
    config = ConfigFields(read_json(path), str(path))
    if (kind := str(config.values.get("peft_type", "")).upper()) != "LORA":
        raise UsageError(f"{path} is of type '{kind[:40]}', and adapters here are of type LORA. {MERGE}")
    if (bias := config.values.get("bias", "none")) not in ("none", None):
        raise UsageError(f"{path} has bias '{str(bias)[:40]}': biases of the base that were trained. {MERGE}")
    for name, why in REFUSED.items():
        if not _nothing(config.values.get(name)):
            raise UsageError(f"{path} {why} ('{name}'), which is not served here. {MERGE}")
    if (start := config.values.get("init_lora_weights", True)) not in STARTS:
        raise UsageError(
            f"{path} was begun with init_lora_weights '{str(start)[:40]}', which changes the base too. Save it "
            "for the base as it was (PEFT: path_initial_model_for_weight_conversion)."
        )
    known = HONOURED | HARMLESS | REFUSED.keys() | {"bias", "init_lora_weights"}
    strange = [name for name, value in config.values.items() if name not in known and not _nothing(value)]
    if strange:
        raise UsageError(
            f"{path} has '{strange[0][:60]}', which may change what is computed and is not known here. {MERGE} "
            "If you know that it changes nothing, remove it."
        )
    ranks, alphas = config.mapping("rank_pattern"), config.mapping("alpha_pattern")
    for value in ranks.values():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_RANK:
            raise config.wrong("rank_pattern", f"ranks from 1 to {MOST_RANK}")
    for value in alphas.values():
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise config.wrong("alpha_pattern", "numbers")
    return AdapterConfig(
        own_rank=config.integer("r", most=MOST_RANK),
        alpha=config.number("lora_alpha", 8.0),
        root=config.flag("use_rslora", False),
        ranks=ranks,
        alphas=alphas,
    )


def _nothing(value: Any) -> bool:
    return value is None or value is False or value in ({}, [], "")


FILE = "adapter_model.safetensors"
WHOLE = re.compile(r"(?:base_model\.model\.)?(?:model\.)?(?:transformer\.)?(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
BY_MODULE = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
MODULE = re.compile(r"(?:layers|blocks|h)\.([0-9]{1,6})\.(.+)")
SHOWN = 3


@dataclass(frozen=True)
class AdapterTarget:
    """A linear layer that may be adapted: which outputs of which product of ours it is, and its inputs."""

    product: str
    first: int
    outputs: int
    inputs: int


def targets_of(layout: RotaryLayout | Gpt2Layout) -> dict[str, AdapterTarget]:
    """By the name within a layer. What stands for the MLP is not among them where it is experts."""
    shape = layout.shape
    hidden, inner = shape.hidden, shape.intermediate
    if isinstance(layout, Gpt2Layout):
        return {
            "attn.c_attn": AdapterTarget("qkv", 0, 3 * hidden, hidden),
            "attn.c_proj": AdapterTarget("out", 0, hidden, hidden),
            "mlp.c_fc": AdapterTarget("up", 0, inner, hidden),
            "mlp.c_proj": AdapterTarget("down", 0, hidden, inner),
        }
    names, queries, keys = layout.names, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    outputs = (queries, keys, keys) if len(names.qkv) == 3 else (queries + 2 * keys,)
    parts = zip(names.qkv, (0, queries, queries + keys), outputs, strict=False)
    attention = {name: AdapterTarget("qkv", first, size, hidden) for name, first, size in parts}
    attention[names.out] = AdapterTarget("out", 0, hidden, queries)
    if shape.experts is not None:
        return attention
    return {
        **attention,
        f"{names.mlp}{names.gate}": AdapterTarget("up", 0, inner, hidden),
        f"{names.mlp}{names.up}": AdapterTarget("up", inner, inner, hidden),
        f"{names.mlp}{names.down}": AdapterTarget("down", 0, hidden, inner),
    }


def read_adapter(checkpoint: Checkpoint, place: str) -> Adapter:
    """The adapter in the folder `place`, for the model of `checkpoint`.

    Raises `UsageError` if the adapter is missing, damaged, for a model of another shape, or does more than add low
    ranks to linear layers.
    """
    shape, folder = checkpoint.shape, Path(place).expanduser()
    if shape.layers == 0:
        raise UsageError(f"the model '{checkpoint.name}' has no layers that could be adapted. Choose another.")
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder} with an adapter. Give one as PEFT saves it (save_pretrained).")
    config = read_adapter_config(folder)
    if not (folder / FILE).is_file():
        if (folder / "adapter_model.bin").is_file():
            raise UsageError(
                f"{folder} holds its weights as a pickle (adapter_model.bin), which is not read, as it can run code. "
                "Save it again where you trust it: model.save_pretrained(folder, safe_serialization=True)"
            )
        raise UsageError(f"{folder} has no {FILE}. Copy the whole folder.")
    store = SafetensorsStore(str(folder), dict(read_header(folder / FILE)))
    if isinstance(checkpoint, TransformersCheckpoint):
        return _read_by_modules(store, config, checkpoint)
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


def _read_by_modules(store: SafetensorsStore, config: AdapterConfig, checkpoint: TransformersCheckpoint) -> Adapter:
    """PEFT's names are those of the model's own modules."""
    linears, found = checkpoint.traced.linears, dict[str, dict[str, str]]()
    for name in store.tensors:
        whole = BY_MODULE.fullmatch(name)
        if whole is None or whole[1] not in linears:
            known = ", ".join(dict.fromkeys(one.rpartition(".")[2] for one in linears))
            raise UsageError(
                f"{store.where} adapts '{name[:120]}'. Of this {checkpoint.shape.family} model with "
                f"{checkpoint.shape.layers} layers {known} can be adapted, which all tokens go through: not experts, "
                f"and not the head. {MERGE}"
            )
        found.setdefault(whole[1], {})[whole[2]] = name
    if not found:
        raise UsageError(f"{store.where} holds no tensor at all. Save the adapter again.")
    lows: list[LowRank] = []
    for module, pair in sorted(found.items()):
        target = AdapterTarget(module, 0, *linears[module])
        _check(store, config, module, pair, target)
        lows += _read(store, pair, target, config.scale(module), checkpoint.shape)
    return Adapter((tuple(lows),))


Pairs = dict[tuple[int, str], dict[str, str]]


def _pairs(store: SafetensorsStore, layers: int, targets: dict[str, AdapterTarget]) -> Pairs:
    """The names of the two tensors "A" and "B" by layer and module. Raises `UsageError` for any other tensor."""
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


def _check(
    store: SafetensorsStore, config: AdapterConfig, module: str, pair: dict[str, str], target: AdapterTarget
) -> None:
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


def _read(
    store: SafetensorsStore, pair: dict[str, str], target: AdapterTarget, scale: float, shape: Shape
) -> list[LowRank]:
    """One low rank, or three if the layer computes queries, keys and values at once."""
    halves = [torch.empty(store.tensors[pair[half]].shape, dtype=torch.float32) for half in "AB"]
    for half, into in zip("AB", halves, strict=True):
        store.read(pair[half], into)
        if not bool(torch.isfinite(into).all()):
            raise UsageError(f"{store.where} holds NaN or infinity in '{pair[half]}'. Use another step.")
    down, up = halves
    up *= scale
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if target.product != "qkv" or target.outputs <= queries:
        return [LowRank(target.product, target.first, down, up)]
    edges = itertools.pairwise((0, queries, queries + keys, target.outputs))
    return [LowRank("qkv", first, down, up[first:end].contiguous()) for first, end in edges]
