"""From config.json to the shape of a transformer with rotary positions, such as Llama: angles, windows and sizes.

A missing key has transformers' default. Angles have the checkpoint's scaling applied, and are computed in float32 with
the same bits as transformers' own. Linear scaling: Chen et al. 2023, "Extending context window … via positional
interpolation". YaRN: Peng et al. 2023. Llama 3: Meta 2024, "The Llama 3 herd of models", and its published code.
Dynamic: NTK-aware scaling, which does not change the angles up to `max_position_embeddings`, where we stop: beyond,
angles depend on the length of the sequence, but cached keys keep older angles, so an answer would depend on how its
prompt was cut and cached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.config_keys import ConfigFields, elsewhere, refuse_unknown_rope_keys
from gpuinfer.text.transformer import Rope, Shape

BASE = 10_000.0


def rope_of(config: ConfigFields, head_dim: int, positions: int, *, partial: bool = False) -> tuple[Rope, int]:
    """The angles, and the longest context that they are for. `partial`: a part of each head may be left unrotated."""
    scaling = rope_fields(config, positions)
    refuse_unknown_rope_keys(scaling)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    head_dim = _turned(scaling, head_dim, partial)
    base = scaling.number("rope_theta", BASE)
    if kind == "yarn":
        return _yarn(scaling, base, head_dim, positions)
    plain = 1.0 / _powers(base, head_dim)
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


def _turned(scaling: ConfigFields, head_dim: int, partial: bool) -> int:
    """How many of a head's values are rotated."""
    share = scaling.number("partial_rotary_factor", 1.0)
    if share == 1.0:
        return head_dim
    if not partial:
        raise elsewhere("only a part of each head turns (partial_rotary_factor)")
    turned = int(head_dim * share)
    if turned % 2 or not 0 < turned <= head_dim:
        raise scaling.wrong("partial_rotary_factor", f"a share that makes an even number of a head's {head_dim} values")
    return turned


def rope_fields(config: ConfigFields, positions: int) -> ConfigFields:
    """Base and scaling as one object, from either of the two layouts of a config.json."""
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
    return ConfigFields(merged, f"{config.where}: {name}")


def _powers(base: float, head_dim: int) -> Tensor:
    """Float32 [head_dim / 2]: positions per radian."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return torch.pow(base, exponents)


def _rope(angles: Tensor, attention_factor: float = 1.0) -> Rope:
    return Rope(tuple(angles.tolist()), attention_factor)


def _llama3(scaling: ConfigFields, plain: Tensor) -> Tensor:
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


def _yarn(scaling: ConfigFields, base: float, head_dim: int, positions: int) -> tuple[Rope, int]:
    original = scaling.number("original_max_position_embeddings")
    factor = scaling.number("factor", positions / original)
    powers = _powers(base, head_dim)
    slow, fast = 1.0 / (factor * powers), 1.0 / powers
    low, high = _range(scaling, base, head_dim, original)
    high += 0.001 if low == high else 0.0  # else a division by zero
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    angles = slow * (1 - kept) + fast * kept
    return _rope(angles, _attention_factor(scaling, factor)), max(positions, int(original * factor))


def _range(scaling: ConfigFields, base: float, head_dim: int, original: float) -> tuple[float, float]:
    """The dimensions between which angles change from the plain to the slowed ones."""
    if base == 1.0:
        raise scaling.wrong("rope_theta", "other than 1")

    def dimension(turns: float) -> float:
        return (head_dim * math.log(original / (turns * 2 * math.pi))) / (2 * math.log(base))

    low = dimension(scaling.number("beta_fast", 32.0))
    high = dimension(scaling.number("beta_slow", 1.0))
    if scaling.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, head_dim - 1)


def _attention_factor(scaling: ConfigFields, factor: float) -> float:
    if scaling.has("attention_factor"):
        return scaling.number("attention_factor")
    above, below = scaling.values.get("mscale"), scaling.values.get("mscale_all_dim")
    if above and below:
        return _magnitude(factor, scaling.number("mscale")) / _magnitude(factor, scaling.number("mscale_all_dim"))
    return _magnitude(factor, 1)


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


FULL, SLIDING = "full_attention", "sliding_attention"


def windows_of(family: str, config: ConfigFields, layers: int) -> tuple[int | None, ...]:
    """Positions that each layer attends to, the current one included; None: all. Empty: all layers attend to all."""
    if family not in SLIDES:
        return ()
    window = SLIDES[family](config)
    kinds = _listed(config, layers)
    if not kinds:  # Mistral's layers are alike, Qwen's have a window from `max_window_layers` on
        first = 0 if family == "mistral" else config.integer("max_window_layers", 28, least=0)
        kinds = tuple(SLIDING if window is not None and layer >= first else FULL for layer in range(layers))
    if window is None and SLIDING in kinds:
        raise UsageError(
            f"{config.where}: layer_types names sliding layers, but there is no sliding_window, or use_sliding_window "
            "is false. Mend one of them."
        )
    windows = tuple(window if kind == SLIDING else None for kind in kinds)
    return windows if any(windows) else ()


def _mistral(config: ConfigFields) -> int | None:
    """Absent: transformers' default; null or 0: none."""
    return config.integer("sliding_window", 4096) if config.values.get("sliding_window", 4096) else None


def _qwen(config: ConfigFields) -> int | None:
    return config.integer("sliding_window", 4096) if config.flag("use_sliding_window", False) else None


SLIDES: Mapping[str, Callable[[ConfigFields], int | None]] = {"mistral": _mistral, "qwen2": _qwen, "qwen3": _qwen}


def _listed(config: ConfigFields, layers: int) -> tuple[str, ...]:
    listed = config.texts("layer_types")
    if listed and len(listed) != layers:
        raise UsageError(
            f"{config.where}: layer_types names {len(listed)} layers, num_hidden_layers says {layers}. "
            "Mend one of them."
        )
    if strange := set(listed) - {FULL, SLIDING}:
        raise elsewhere(f"layers of kind '{min(strange)[:40]}' are asked for")
    return listed


Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "relu": "relu",
}
MOST_LAYERS = 4096
MOST_HEAD_DIM = 4096


@dataclass(frozen=True)
class FamilyDefaults:
    """Defaults of a family for keys that config.json lacks. None: the key is required."""

    vocabulary: int | None
    intermediate: int | None
    layers: int | None
    heads: int | None
    kv_heads: int | None  # None: as many as heads
    head_dim: int | None  # None: hidden / heads
    positions: int | None
    end: int | None
    beginning: int | None
    hidden: int | None = 4096


_QWEN2 = FamilyDefaults(151936, 22016, 32, 32, 32, None, 32768, None, None)
_QWEN3 = FamilyDefaults(151936, 22016, 32, 32, 32, 128, 32768, None, None)
_NOTHING = FamilyDefaults(None, None, None, None, None, None, None, None, None, None)
DEFAULTS: Mapping[str, FamilyDefaults] = {
    "llama": FamilyDefaults(32000, 11008, 32, 32, None, None, 2048, 2, 1),
    "mistral": FamilyDefaults(32000, 14336, 32, 32, 8, None, 131072, 2, 1),
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "dream": _QWEN2,
    "sdar": _QWEN3,
    "llada-moe": _NOTHING,
    "llada2": _NOTHING,
}


def rotary_shape(
    family: str,
    config: ConfigFields,
    generation: ConfigFields,
    *,
    intermediate: str = "intermediate_size",
    partial: bool = False,
) -> Shape:
    """`intermediate`: the key with the size of a dense MLP. `partial`: a part of each head may be left unrotated."""
    known = DEFAULTS[family]
    hidden, heads = config.integer("hidden_size", known.hidden), config.integer("num_attention_heads", known.heads)
    head_dim = _head_dim(family, config, hidden, heads)
    layers = config.integer("num_hidden_layers", known.layers, most=MOST_LAYERS)
    longest = config.integer("max_position_embeddings", known.positions)
    rope, positions = rope_of(config, head_dim, longest, partial=partial)
    vocabulary = config.integer("vocab_size", known.vocabulary)
    return Shape(
        family=family,
        vocabulary=vocabulary,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_kv_heads(family, config, heads),
        head_dim=head_dim,
        intermediate=config.integer(intermediate, known.intermediate),
        positions=positions,
        norm_eps=config.number("rms_norm_eps", 1e-6, above=-1.0),
        activation=activation_of(config, "hidden_act", "silu"),
        qk_norm=family == "qwen3",
        rope=rope,
        windows=windows_of(family, config, layers),
        tied=config.flag("tie_word_embeddings", False),
        end_tokens=end_tokens_of(config, generation, known.end, vocabulary),
        beginning_token=beginning_of(config, known.beginning, vocabulary),
    )


def _head_dim(family: str, config: ConfigFields, hidden: int, heads: int) -> int:
    known = DEFAULTS[family].head_dim
    if config.has("head_dim") or known is not None:
        size = config.integer("head_dim", known, most=MOST_HEAD_DIM)
    else:
        size = divided(config, hidden, heads)
    if size % 2:
        raise config.wrong("head_dim", f"even, as rotary positions need ({size})")
    return size


def divided(config: ConfigFields, hidden: int, heads: int) -> int:
    """Values of one head."""
    if hidden % heads or hidden // heads > MOST_HEAD_DIM:
        raise UsageError(f"{config.where}: {heads} heads do not divide {hidden} values. Copy it again.")
    return hidden // heads


def _kv_heads(family: str, config: ConfigFields, heads: int) -> int:
    """Absent: the family's own number; null: as many as heads."""
    known = DEFAULTS[family].kv_heads
    kv_heads = heads if known is None or "num_key_value_heads" in config.values else known
    kv_heads = config.integer("num_key_value_heads", kv_heads)
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of {heads} heads")
    return kv_heads


def activation_of(config: ConfigFields, name: str, default: str) -> Activation:
    given = config.text(name, default)
    if given not in ACTIVATIONS:
        raise elsewhere(f"the activation '{given[:40]}' is asked for ({', '.join(ACTIVATIONS)} run here)")
    return ACTIVATIONS[given]


def end_tokens_of(
    config: ConfigFields, generation: ConfigFields, default: int | None, vocabulary: int
) -> tuple[int, ...]:
    """The end tokens of generation_config.json, or else of config.json, as in transformers; in the vocabulary alone."""
    ends = generation.ids("eos_token_id") or config.ids("eos_token_id", default)
    return tuple(token for token in ends if 0 <= token < vocabulary)


def beginning_of(config: ConfigFields, default: int | None, vocabulary: int) -> int | None:
    return next((token for token in config.ids("bos_token_id", default) if 0 <= token < vocabulary), None)
