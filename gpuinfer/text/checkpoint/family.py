"""From config.json to a shape. What a file leaves out has the value that transformers gives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.keys import Fields, elsewhere, family_of, refuse_unknown, refuse_unknown_keys
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
GPT2_NAMES = {  # how other families call them: transformers takes either
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}
MOST_LAYERS = 4096
MOST_HEAD_DIM = 4096


@dataclass(frozen=True)
class FamilyDefaults:
    """What transformers assumes of a family when config.json is silent."""

    vocabulary: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int | None  # None: as many as heads
    head_dim: int | None  # None: hidden / heads
    positions: int
    end: int | None
    beginning: int | None


DEFAULTS: Mapping[str, FamilyDefaults] = {
    "llama": FamilyDefaults(32000, 11008, 32, 32, None, None, 2048, 2, 1),
    "mistral": FamilyDefaults(32000, 14336, 32, 32, 8, None, 131072, 2, 1),
    "qwen2": FamilyDefaults(151936, 22016, 32, 32, 32, None, 32768, None, None),
    "qwen3": FamilyDefaults(151936, 22016, 32, 32, 32, 128, 32768, None, None),
}


@dataclass(frozen=True)
class Biases:
    """Which products have one."""

    qkv: bool = False
    out: bool = False
    up: bool = False
    down: bool = False


def shape_of(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> Shape:
    """The shape that config.json and generation_config.json, when there is one, describe.

    Raises `UsageError` for a model that does not run here, and for a file that contradicts itself.
    """
    fields = Fields(config)
    family = refuse_unknown(fields)
    if family == "gpt2":
        fields = _renamed(fields)
    ends = Fields(generation or {}, "generation_config.json")
    shape = _gpt2(fields, ends) if family == "gpt2" else _rotary(family, fields, ends)
    refuse_unknown_keys(family, fields)
    return shape


def biases_of(config: Mapping[str, Any]) -> Biases:
    fields, family = Fields(config), family_of(config["model_type"])
    if family == "gpt2":
        return Biases(True, True, True, True)
    if family == "qwen2":
        return Biases(qkv=True)
    attention = family in ("llama", "qwen3") and fields.flag("attention_bias", False)
    inner = family == "llama" and fields.flag("mlp_bias", False)
    return Biases(attention, attention, inner, inner)


def _rotary(family: str, config: Fields, generation: Fields) -> Shape:
    known = DEFAULTS[family]
    hidden, heads = config.integer("hidden_size", 4096), config.integer("num_attention_heads", known.heads)
    head_dim = _head_dim(family, config, hidden, heads)
    layers = config.integer("num_hidden_layers", known.layers, most=MOST_LAYERS)
    rope, positions = rope_of(config, head_dim, config.integer("max_position_embeddings", known.positions))
    vocabulary = config.integer("vocab_size", known.vocabulary)
    return Shape(
        family=family,
        vocabulary=vocabulary,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_kv_heads(family, config, heads),
        head_dim=head_dim,
        intermediate=config.integer("intermediate_size", known.intermediate),
        positions=positions,
        norm_eps=config.number("rms_norm_eps", 1e-6, above=-1.0),
        activation=_activation(config, "hidden_act", "silu"),
        qk_norm=family == "qwen3",
        rope=rope,
        windows=windows_of(family, config, layers),
        tied=config.flag("tie_word_embeddings", False),
        end_tokens=_end_tokens(config, generation, known.end, vocabulary),
        beginning_token=_beginning(config, known.beginning, vocabulary),
    )


def _renamed(config: Fields) -> Fields:
    """With GPT-2's own names alone. Raises `UsageError` where both names are there and differ."""
    values = dict(config.values)
    for other, own in GPT2_NAMES.items():
        given = values.pop(other, None)
        if given is not None and values.setdefault(own, given) != given:
            raise config.wrong(other, f"{values[own]!r}, as '{own}' says"[:90])
    return Fields(values, config.where)


def _gpt2(config: Fields, generation: Fields) -> Shape:
    if not config.flag("scale_attn_weights", True) or config.flag("scale_attn_by_inverse_layer_idx", False):
        raise elsewhere("the model scales its attention in a way of its own")
    if config.flag("add_cross_attention", False):
        raise elsewhere("the model attends to an encoder")
    hidden, heads = config.integer("n_embd", 768), config.integer("n_head", 12)
    vocabulary = config.integer("vocab_size", 50257)
    return Shape(
        family="gpt2",
        vocabulary=vocabulary,
        hidden=hidden,
        layers=config.integer("n_layer", 12, most=MOST_LAYERS),
        heads=heads,
        kv_heads=heads,
        head_dim=_divided(config, hidden, heads),
        intermediate=config.integer("n_inner", 4 * hidden),
        positions=config.integer("n_positions", 1024),
        norm="layer",
        norm_eps=config.number("layer_norm_epsilon", 1e-5, above=-1.0),
        activation=_activation(config, "activation_function", "gelu_new"),
        gated=False,
        learned_positions=True,
        tied=config.flag("tie_word_embeddings", True),
        end_tokens=_end_tokens(config, generation, 50256, vocabulary),
        beginning_token=_beginning(config, 50256, vocabulary),
    )


def _head_dim(family: str, config: Fields, hidden: int, heads: int) -> int:
    known = DEFAULTS[family].head_dim
    if config.has("head_dim") or known is not None:
        size = config.integer("head_dim", known, most=MOST_HEAD_DIM)
    else:
        size = _divided(config, hidden, heads)
    if size % 2:
        raise config.wrong("head_dim", f"even, as rotary positions need ({size})")
    return size


def _divided(config: Fields, hidden: int, heads: int) -> int:
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


def _activation(config: Fields, name: str, default: str) -> Activation:
    given = config.text(name, default)
    if given not in ACTIVATIONS:
        raise elsewhere(f"the activation '{given[:40]}' is asked for ({', '.join(ACTIVATIONS)} run here)")
    return ACTIVATIONS[given]


def _end_tokens(config: Fields, generation: Fields, default: int | None, vocabulary: int) -> tuple[int, ...]:
    """Those of generation_config.json; if it names none, those of config.json, as transformers chooses.

    One that is outside the vocabulary can never come.
    """
    ends = generation.ids("eos_token_id") or config.ids("eos_token_id", default)
    return tuple(token for token in ends if 0 <= token < vocabulary)


def _beginning(config: Fields, default: int | None, vocabulary: int) -> int | None:
    return next((token for token in config.ids("bos_token_id", default) if 0 <= token < vocabulary), None)
