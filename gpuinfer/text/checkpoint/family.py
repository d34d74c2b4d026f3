"""From config.json to a shape, of whatever family. What a file leaves out has the value that transformers gives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuinfer.text.checkpoint.keys import Fields, elsewhere, no_generator, refuse_unknown, refuse_unknown_keys
from gpuinfer.text.checkpoint.masked import masked_shape
from gpuinfer.text.checkpoint.masked_keys import MASKED
from gpuinfer.text.checkpoint.rotary import (
    MOST_LAYERS,
    activation_of,
    beginning_of,
    divided,
    end_tokens_of,
    rotary_shape,
)
from gpuinfer.text.shape import Shape

GPT2_NAMES = {  # how other families call them: transformers takes either
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}


@dataclass(frozen=True)
class Biases:
    """Which products have one."""

    qkv: bool = False
    out: bool = False
    up: bool = False
    down: bool = False


@dataclass(frozen=True)
class Told:
    """What is known of a diffusion model, whatever its config.json says or does not; None: nothing."""

    mask_token: int | None = None
    block: int | None = None  # positions, of a block-causal model


NOTHING = Told()


def shape_of(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None, told: Told = NOTHING) -> Shape:
    """The shape that config.json and generation_config.json, when there is one, describe.

    Raises `UsageError` for a model that does not run here, and for a file that contradicts itself.
    """
    fields, ends = Fields(config), Fields(generation or {}, "generation_config.json")
    family = refuse_unknown(fields)
    if family in MASKED:
        shape = masked_shape(family, fields, ends, told.mask_token, told.block)
    elif family == "gpt2":
        fields = _renamed(fields)
        shape = _gpt2(fields, ends)
    else:
        shape = rotary_shape(family, fields, ends)
    refuse_unknown_keys(family, fields)
    return shape


def biases_of(config: Mapping[str, Any]) -> Biases:
    fields = Fields(config)
    family = refuse_unknown(fields)
    match family:
        case "gpt2":
            return Biases(True, True, True, True)
        case "qwen2" | "dream":
            return Biases(qkv=True)
        case "llada":
            return Biases(qkv=fields.flag("include_qkv_bias", False))
        case "llada2":
            return Biases(qkv=fields.flag("use_qkv_bias", False), out=fields.flag("use_bias", False))
    attention = family in ("llama", "qwen3", "sdar", "llada-moe") and fields.flag("attention_bias", False)
    inner = family == "llama" and fields.flag("mlp_bias", False)
    return Biases(attention, attention, inner, inner)


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
        raise no_generator("the model attends to an encoder")
    hidden, heads = config.integer("n_embd", 768), config.integer("n_head", 12)
    vocabulary = config.integer("vocab_size", 50257)
    return Shape(
        family="gpt2",
        vocabulary=vocabulary,
        hidden=hidden,
        layers=config.integer("n_layer", 12, most=MOST_LAYERS),
        heads=heads,
        kv_heads=heads,
        head_dim=divided(config, hidden, heads),
        intermediate=config.integer("n_inner", 4 * hidden),
        positions=config.integer("n_positions", 1024),
        norm="layer",
        norm_eps=config.number("layer_norm_epsilon", 1e-5, above=-1.0),
        activation=activation_of(config, "activation_function", "gelu_new"),
        gated=False,
        learned_positions=True,
        tied=config.flag("tie_word_embeddings", True),
        end_tokens=end_tokens_of(config, generation, 50256, vocabulary),
        beginning_token=beginning_of(config, 50256, vocabulary),
    )
