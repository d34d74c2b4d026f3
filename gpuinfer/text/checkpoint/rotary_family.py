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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.config_keys import ConfigFields, elsewhere, refuse_unknown_keys
from gpuinfer.text.transformer import Rope, Shape

BASE = 10_000.0


def rope_of(config: ConfigFields, head_dim: int, positions: int, *, partial: bool = False) -> tuple[Rope, int]:
    """The angles, and the longest context that they are for. `partial`: a part of each head may be left unrotated."""
    scaling = rope_fields(config, positions)
    refuse_unknown_keys("rope", scaling)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    share, turned = scaling.number("partial_rotary_factor", 1.0), head_dim
    if share != 1.0:
        if not partial:
            raise elsewhere("only a part of each head turns (partial_rotary_factor)")
        turned = int(head_dim * share)
        if turned % 2 or not 0 < turned <= head_dim:
            wanted = f"a share that makes an even number of a head's {head_dim} values"
            raise scaling.wrong("partial_rotary_factor", wanted)
    base = scaling.number("rope_theta", BASE)
    # float32 [turned / 2]: positions per radian
    powers = torch.pow(base, torch.arange(0, turned, 2, dtype=torch.float32) / turned)
    plain = 1.0 / powers
    if kind in ("default", "dynamic"):
        return Rope(tuple(plain.tolist()), 1.0), positions
    if kind == "linear":
        factor = scaling.number("factor")
        return Rope(tuple((plain / factor).tolist()), 1.0), int(positions * max(1.0, factor))
    original = scaling.number("original_max_position_embeddings")
    if kind == "llama3":
        return Rope(tuple(_llama3_angles(scaling, plain, original).tolist()), 1.0), positions
    if kind == "yarn":
        factor = scaling.number("factor", positions / original)
        angles = _yarn_angles(scaling, powers, base, factor, original)
        longest = max(positions, int(original * factor))
        return Rope(tuple(angles.tolist()), _attention_factor(scaling, factor)), longest
    raise elsewhere(
        f"rotary positions of type '{kind[:40]}' are asked for (default, linear, dynamic, llama3, yarn run here)"
    )


def _llama3_angles(scaling: ConfigFields, plain: Tensor, original: float) -> Tensor:
    factor = scaling.number("factor")
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if high == low:
        raise scaling.wrong("high_freq_factor", "different from low_freq_factor")
    wavelengths = 2 * math.pi / plain
    slowed = torch.where(wavelengths > original / low, plain / factor, plain)
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * slowed / factor + smooth * slowed
    between = ~(wavelengths < original / high) & ~(wavelengths > original / low)
    return torch.where(between, blended, slowed)


def _yarn_angles(scaling: ConfigFields, powers: Tensor, base: float, factor: float, original: float) -> Tensor:
    """Between two dimensions angles change from the plain to the slowed ones."""
    turned = 2 * len(powers)
    if base == 1.0:
        raise scaling.wrong("rope_theta", "other than 1")

    def dimension(turns: float) -> float:
        return (turned * math.log(original / (turns * 2 * math.pi))) / (2 * math.log(base))

    low = dimension(scaling.number("beta_fast", 32.0))
    high = dimension(scaling.number("beta_slow", 1.0))
    if scaling.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, turned - 1)
    high += 0.001 if low == high else 0.0  # else a division by zero
    kept = 1 - ((torch.arange(turned // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept


def _attention_factor(scaling: ConfigFields, factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if scaling.has("attention_factor"):
        return scaling.number("attention_factor")
    if scaling.values.get("mscale") and scaling.values.get("mscale_all_dim"):
        return magnitude(scaling.number("mscale")) / magnitude(scaling.number("mscale_all_dim"))
    return magnitude(1)


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


FULL, SLIDING = "full_attention", "sliding_attention"


def windows_of(family: str, config: ConfigFields, layers: int) -> tuple[int | None, ...]:
    """Positions that each layer attends to, the current one included; None: all. Empty: all layers attend to all."""
    if family == "mistral":  # an absent window is transformers' default; null or 0: none
        slides = bool(config.values.get("sliding_window", 4096))
    elif family in ("qwen2", "qwen3"):
        slides = config.flag("use_sliding_window", False)
    else:
        return ()
    window = config.integer("sliding_window", 4096) if slides else None
    kinds = config.texts("layer_types")
    if kinds and len(kinds) != layers:
        raise UsageError(
            f"{config.where}: layer_types names {len(kinds)} layers, num_hidden_layers says {layers}. Mend one of them."
        )
    if strange := set(kinds) - {FULL, SLIDING}:
        raise elsewhere(f"layers of kind '{min(strange)[:40]}' are asked for")
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
    if config.has("head_dim") or known.head_dim is not None:
        head_dim = config.integer("head_dim", known.head_dim, most=MOST_HEAD_DIM)
    else:
        head_dim = divided(config, hidden, heads)
    if head_dim % 2:
        raise config.wrong("head_dim", f"even, as rotary positions need ({head_dim})")
    # absent: the family's own number; null: as many as heads
    own = heads if known.kv_heads is None or "num_key_value_heads" in config.values else known.kv_heads
    kv_heads = config.integer("num_key_value_heads", own)
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of {heads} heads")
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
        kv_heads=kv_heads,
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


def divided(config: ConfigFields, hidden: int, heads: int) -> int:
    """Values of one head."""
    if hidden % heads or hidden // heads > MOST_HEAD_DIM:
        raise UsageError(f"{config.where}: {heads} heads do not divide {hidden} values. Copy it again.")
    return hidden // heads


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
