"""What an adapter says of itself (PEFT's adapter_config.json), as far as it can be honoured: no key passes unknown."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.keys import Fields, read_json

CONFIG = "adapter_config.json"
MOST_RANK = 512
MERGE = "Merge it into its base model (PEFT's merge_and_unload), and serve that."


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


HONOURED = frozenset(["peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"])
HARMLESS = frozenset(
    _names("""
    base_model_name_or_path revision task_type inference_mode lora_dropout auto_mapping peft_version target_modules
    exclude_modules layers_to_transform layers_pattern fan_in_fan_out ensure_weight_tying low_cpu_mem_usage
    runtime_config ephemeral_gpu_offload megatron_core qalora_group_size eva_config corda_config loftq_config
    lora_ga_config
    """)
)  # which tensors there are is seen in the file; the rest is of training
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
"""Of `init_lora_weights` those that leave the base as it is: PiSSA, OLoRA, CorDA and LoftQ change it."""


@dataclass(frozen=True)
class AdapterConfig:
    """`rank` and `scale` are asked for by a module's name, such as `model.layers.0.self_attn.q_proj`."""

    where: str
    own_rank: int
    alpha: float
    root: bool  # the scale is alpha / √rank (Kalajdzievski 2023, rsLoRA), else alpha / rank
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def rank(self, module: str) -> int:
        return int(_matching(self.ranks, module, self.own_rank))

    def scale(self, module: str) -> float:
        rank, alpha = self.rank(module), float(_matching(self.alphas, module, self.alpha))
        return alpha / (math.sqrt(rank) if self.root else rank)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Raises `UsageError` that says what cannot be honoured, and the cure."""
    path = folder / CONFIG
    if not path.is_file():
        raise UsageError(f"there is no {path}: give a folder as PEFT saves it (save_pretrained).")
    config = Fields(read_json(path), str(path))
    if (kind := str(config.values.get("peft_type", "")).upper()) != "LORA":
        raise UsageError(f"{path} is of type '{kind[:40]}', and adapters here are of type LORA. {MERGE}")
    _refuse(config)
    return AdapterConfig(
        where=str(folder),
        own_rank=config.integer("r", most=MOST_RANK),
        alpha=config.number("lora_alpha", 8.0),
        root=config.flag("use_rslora", False),
        ranks={name: _rank(config, value) for name, value in config.mapping("rank_pattern").items()},
        alphas={name: _alpha(config, value) for name, value in config.mapping("alpha_pattern").items()},
    )


def _refuse(config: Fields) -> None:
    if (bias := config.values.get("bias", "none")) not in ("none", None):
        raise UsageError(f"{config.where} has bias '{str(bias)[:40]}': biases of the base that were trained. {MERGE}")
    for name, why in REFUSED.items():
        if not _nothing(config.values.get(name)):
            raise UsageError(f"{config.where} {why} ('{name}'), which is not served here. {MERGE}")
    if (start := config.values.get("init_lora_weights", True)) not in STARTS:
        raise UsageError(
            f"{config.where} was begun with init_lora_weights '{str(start)[:40]}', which changes the base too. Save it "
            "for the base as it was (PEFT: path_initial_model_for_weight_conversion)."
        )
    known = HONOURED | HARMLESS | REFUSED.keys() | {"bias", "init_lora_weights"}
    strange = [name for name, value in config.values.items() if name not in known and not _nothing(value)]
    if strange:
        raise UsageError(
            f"{config.where} has '{strange[0][:60]}', which may change what is computed and is not known here. {MERGE} "
            "If you know that it changes nothing, remove it."
        )


def _nothing(value: Any) -> bool:
    return value is None or value is False or value in ({}, [], "")


def _rank(config: Fields, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_RANK:
        raise config.wrong("rank_pattern", f"ranks from 1 to {MOST_RANK}")
    return value


def _alpha(config: Fields, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise config.wrong("alpha_pattern", "numbers")
    return float(value)


def _matching(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """As PEFT has it: the first pattern that is the end of the module's name."""
    for pattern, value in patterns.items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error:
            continue
    return otherwise
