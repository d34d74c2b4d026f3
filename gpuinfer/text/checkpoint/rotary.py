"""From config.json to the shape of a transformer with rotary positions, as Llama and most others have it.

What a file leaves out has the value that transformers gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.keys import Fields, elsewhere
from gpuinfer.text.checkpoint.rope import rope_of, windows_of
from gpuinfer.text.shape import Shape

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
    """What is assumed of a family when config.json is silent. None: it must not be."""

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
    family: str, config: Fields, generation: Fields, *, intermediate: str = "intermediate_size", partial: bool = False
) -> Shape:
    """`intermediate` is the key that holds the size of an ordinary MLP; `partial`: a part of each head may turn."""
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


def _head_dim(family: str, config: Fields, hidden: int, heads: int) -> int:
    known = DEFAULTS[family].head_dim
    if config.has("head_dim") or known is not None:
        size = config.integer("head_dim", known, most=MOST_HEAD_DIM)
    else:
        size = divided(config, hidden, heads)
    if size % 2:
        raise config.wrong("head_dim", f"even, as rotary positions need ({size})")
    return size


def divided(config: Fields, hidden: int, heads: int) -> int:
    """Values of one head."""
    if hidden % heads or hidden // heads > MOST_HEAD_DIM:
        raise UsageError(f"{config.where}: {heads} heads do not divide {hidden} values. Copy it again.")
    return hidden // heads


def _kv_heads(family: str, config: Fields, heads: int) -> int:
    """Absent: the family's own number; null: as many as heads."""
    known = DEFAULTS[family].kv_heads
    kv_heads = heads if known is None or "num_key_value_heads" in config.values else known
    kv_heads = config.integer("num_key_value_heads", kv_heads)
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of {heads} heads")
    return kv_heads


def activation_of(config: Fields, name: str, default: str) -> Activation:
    given = config.text(name, default)
    if given not in ACTIVATIONS:
        raise elsewhere(f"the activation '{given[:40]}' is asked for ({', '.join(ACTIVATIONS)} run here)")
    return ACTIVATIONS[given]


def end_tokens_of(config: Fields, generation: Fields, default: int | None, vocabulary: int) -> tuple[int, ...]:
    """Those of generation_config.json; if it names none, those of config.json, as transformers chooses.

    One that is outside the vocabulary can never come.
    """
    ends = generation.ids("eos_token_id") or config.ids("eos_token_id", default)
    return tuple(token for token in ends if 0 <= token < vocabulary)


def beginning_of(config: Fields, default: int | None, vocabulary: int) -> int | None:
    return next((token for token in config.ids("bos_token_id", default) if 0 <= token < vocabulary), None)
