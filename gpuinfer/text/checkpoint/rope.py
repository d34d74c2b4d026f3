"""Rotary angles with a checkpoint's scaling folded in, computed in float32 as transformers computes them, bit for bit.

Linear: Chen et al. 2023, "Extending context window … via positional interpolation". Dynamic: NTK-aware scaling, which
leaves the angles as they are up to `max_position_embeddings`, and further we do not go: beyond it they change with the
length of the sequence, while the keys that are cached keep the angles of when they came, so that an answer would depend
on how its prompt was cut and cached. YaRN: Peng et al. 2023. Llama 3: Meta
2024, "The Llama 3 herd of models", and its published code.

How far back each layer looks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.keys import Fields, elsewhere, refuse_unknown_rope_keys
from gpuinfer.text.shape import Rope

BASE = 10_000.0


def rope_of(config: Fields, head_dim: int, positions: int, *, partial: bool = False) -> tuple[Rope, int]:
    """The angles, and the longest context that they were made for. `partial`: only a part of each head may turn."""
    scaling = rope_fields(config, positions)
    refuse_unknown_rope_keys(scaling)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    head_dim = _turned(scaling, head_dim, partial)
    base = scaling.number("rope_theta", BASE)
    if kind == "yarn":
        return _yarn(scaling, base, head_dim, positions)
    plain = _plain(base, head_dim)
    if kind in ("default", "dynamic"):
        return _rope(plain), positions
    if kind == "linear":
        factor = scaling.number("factor")
        return _rope(plain / factor), int(positions * max(1.0, factor))
    if kind == "llama3":
        return _rope(_llama3(scaling, plain)), positions
    raise elsewhere(
        f"rotary positions of type '{kind[:40]}' are asked for (default, linear, dynamic, llama3, yarn run here)"
    )


def _turned(scaling: Fields, head_dim: int, partial: bool) -> int:
    """How many of a head's values turn."""
    share = scaling.number("partial_rotary_factor", 1.0)
    if share == 1.0:
        return head_dim
    if not partial:
        raise elsewhere("only a part of each head turns (partial_rotary_factor)")
    turned = int(head_dim * share)
    if turned % 2 or not 0 < turned <= head_dim:
        raise scaling.wrong("partial_rotary_factor", f"a share that makes an even number of a head's {head_dim} values")
    return turned


def rope_fields(config: Fields, positions: int) -> Fields:
    """Base and scaling as one object, whichever of both layouts the file has."""
    name = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    merged: dict[str, Any] = dict(config.mapping(name))
    if any(isinstance(value, Mapping) for value in merged.values()):
        raise elsewhere("each kind of layer has rotary positions of its own")
    for field in ("rope_theta", "partial_rotary_factor"):
        if merged.get(field) is None and config.has(field):
            merged[field] = config.values[field]
    original = "original_max_position_embeddings"
    if config.has(original):
        merged[original] = config.values[original]
    elif merged.get(original) is None:
        merged[original] = positions
    return Fields(merged, f"{config.where}: {name}")


def _plain(base: float, head_dim: int) -> Tensor:
    return 1.0 / _powers(base, head_dim)


def _powers(base: float, head_dim: int) -> Tensor:
    """Float32 [head_dim / 2]: positions that make one radian."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return torch.pow(base, exponents)


def _rope(angles: Tensor, attention_factor: float = 1.0) -> Rope:
    return Rope(tuple(angles.tolist()), attention_factor)


def _llama3(scaling: Fields, plain: Tensor) -> Tensor:
    factor, original = scaling.number("factor"), scaling.number("original_max_position_embeddings")
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if high == low:
        raise scaling.wrong("high_freq_factor", "different from low_freq_factor")
    wavelengths = 2 * math.pi / plain
    slowed = torch.where(wavelengths > original / low, plain / factor, plain)
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * slowed / factor + smooth * slowed
    between = ~(wavelengths < original / high) & ~(wavelengths > original / low)
    return torch.where(between, blended, slowed)


def _yarn(scaling: Fields, base: float, head_dim: int, positions: int) -> tuple[Rope, int]:
    original = scaling.number("original_max_position_embeddings")
    factor = scaling.number("factor", positions / original)
    powers = _powers(base, head_dim)
    slow, fast = 1.0 / (factor * powers), 1.0 / powers
    kept = 1 - _ramp(*_range(scaling, base, head_dim, original), head_dim // 2)
    angles = slow * (1 - kept) + fast * kept
    return _rope(angles, _attention_factor(scaling, factor)), max(positions, int(original * factor))


def _range(scaling: Fields, base: float, head_dim: int, original: float) -> tuple[float, float]:
    """Between which dimensions the angles go over from their own to the slowed ones."""
    if base == 1.0:
        raise scaling.wrong("rope_theta", "other than 1")

    def dimension(turns: float) -> float:
        return (head_dim * math.log(original / (turns * 2 * math.pi))) / (2 * math.log(base))

    low = dimension(scaling.number("beta_fast", 32.0))
    high = dimension(scaling.number("beta_slow", 1.0))
    if scaling.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, head_dim - 1)


def _ramp(low: float, high: float, size: int) -> Tensor:
    if low == high:
        high += 0.001  # else a division by zero
    return ((torch.arange(size, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def _attention_factor(scaling: Fields, factor: float) -> float:
    if scaling.has("attention_factor"):
        return scaling.number("attention_factor")
    above, below = scaling.values.get("mscale"), scaling.values.get("mscale_all_dim")
    if above and below:
        return _magnitude(factor, scaling.number("mscale")) / _magnitude(factor, scaling.number("mscale_all_dim"))
    return _magnitude(factor, 1)


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


FULL, SLIDING = "full_attention", "sliding_attention"


def windows_of(family: str, config: Fields, layers: int) -> tuple[int | None, ...]:
    """For each layer the number of positions that it sees, itself included; None: all. Empty: all layers see all."""
    if family not in SLIDES:
        return ()
    window = SLIDES[family](config)
    kinds = _listed(config, layers) or _unlisted(family, config, layers, window)
    if window is None and SLIDING in kinds:
        raise UsageError(
            f"{config.where}: layer_types names sliding layers, but there is no sliding_window, or use_sliding_window "
            "is false. Mend one of them."
        )
    windows = tuple(window if kind == SLIDING else None for kind in kinds)
    return windows if any(windows) else ()


def _mistral(config: Fields) -> int | None:
    """Absent: transformers' default; null or 0: none."""
    return config.integer("sliding_window", 4096) if config.values.get("sliding_window", 4096) else None


def _qwen(config: Fields) -> int | None:
    return config.integer("sliding_window", 4096) if config.flag("use_sliding_window", False) else None


SLIDES: Mapping[str, Callable[[Fields], int | None]] = {"mistral": _mistral, "qwen2": _qwen, "qwen3": _qwen}


def _listed(config: Fields, layers: int) -> tuple[str, ...]:
    listed = config.texts("layer_types")
    if listed and len(listed) != layers:
        raise UsageError(
            f"{config.where}: layer_types names {len(listed)} layers, num_hidden_layers says {layers}. "
            "Mend one of them."
        )
    if strange := set(listed) - {FULL, SLIDING}:
        raise elsewhere(f"layers of kind '{min(strange)[:40]}' are asked for")
    return listed


def _unlisted(family: str, config: Fields, layers: int, window: int | None) -> tuple[str, ...]:
    """Each layer's kind where no list says it: Mistral's are alike, Qwen's slide from `max_window_layers` on."""
    first = 0 if family == "mistral" else config.integer("max_window_layers", 28, least=0)
    return tuple(SLIDING if window is not None and layer >= first else FULL for layer in range(layers))
