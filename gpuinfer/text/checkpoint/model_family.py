"""From config.json to the shape of a model of any family, masked diffusion models included: LLaDA (Nie et al. 2025),
LLaDA-MoE (Zhu et al. 2025), LLaDA2 (Bie et al. 2025), Dream and SDAR. A missing key has transformers' default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.config_keys import (
    MASKED,
    ConfigFields,
    elsewhere,
    no_generator,
    refuse_unknown_keys,
    supported_family,
)
from gpuinfer.text.checkpoint.rotary_family import (
    MOST_LAYERS,
    activation_of,
    beginning_of,
    divided,
    end_tokens_of,
    rope_of,
    rotary_shape,
)
from gpuinfer.text.transformer import Experts, Masking, Shape


@dataclass(frozen=True)
class KnownTokens:
    """Special tokens of one published vocabulary, for configs that lack some of them."""

    mask: int
    ends: tuple[int, ...]  # in addition to those of the files


KNOWN: Mapping[tuple[str, int], KnownTokens] = {  # by family and size of the vocabulary
    ("llada", 126464): KnownTokens(126336, (126081, 126348)),  # end of text, end of turn
    ("llada-moe", 157184): KnownTokens(156895, (156892,)),
    ("llada2", 157184): KnownTokens(156895, (156892,)),
    ("dream", 152064): KnownTokens(151666, ()),
    ("sdar", 151936): KnownTokens(151669, ()),
}
BLOCKS = {"llada2": 32, "sdar": 4}  # positions, the default of `block_size`
MOST_EXPERTS = 1 << 16


def masking_of(family: str, mask_token: int, block: int | None = None) -> Masking:
    """`block`: of a block-causal family; None: its default."""
    return Masking(
        mask_token=mask_token,
        block=block or BLOCKS.get(family),
        shifted=family == "dream",
        guided=family in ("llada", "llada-moe"),
    )


def _mask_token(config: ConfigFields, known: KnownTokens | None, given: int | None, shape: Shape) -> int:
    mask = next(iter(config.ids("mask_token_id")), known.mask if known else None) if given is None else given
    if mask is None:
        raise UsageError(
            f"{config.where} does not say which token is the mask, and for a {shape.family} model of "
            f"{shape.vocabulary} tokens it is not known. Give its number: --mask-token-id."
        )
    where = f"{config.where}: 'mask_token_id'" if given is None else "--mask-token-id"
    if not 0 <= mask < shape.vocabulary:
        raise UsageError(
            f"{where} is {mask}, and there are {shape.vocabulary} tokens, from 0 on. Give the mask's number."
        )
    if mask in shape.end_tokens:
        raise UsageError(f"{where} is {mask}, which ends an answer. Give the mask's own number: --mask-token-id.")
    return mask


def _llada(config: ConfigFields, generation: ConfigFields) -> Shape:
    hidden, heads = config.integer("d_model"), config.integer("n_heads")
    head_dim, tokens = divided(config, hidden, heads), config.integer("vocab_size")
    vocabulary = config.integer("embedding_size", tokens)
    if vocabulary < tokens:
        raise config.wrong("embedding_size", f"{tokens} or more, as 'vocab_size' says")
    if head_dim % 2:
        raise config.wrong("n_heads", f"such that heads have an even size ({head_dim})")
    single = config.flag("multi_query_attention", False)
    kv_heads = config.integer("n_kv_heads", 1 if single else heads)
    if heads % kv_heads or (single and kv_heads != 1):
        raise config.wrong(
            "n_kv_heads", "1, as 'multi_query_attention' says" if single else f"a divisor of {heads} heads"
        )
    rope, positions = rope_of(config, head_dim, config.integer("max_sequence_length"))
    tied = config.flag("weight_tying", False)
    if config.flag("tie_word_embeddings", tied) != tied:
        raise config.wrong("tie_word_embeddings", f"{str(tied).lower()}, as 'weight_tying' says")
    return Shape(
        family="llada",
        vocabulary=vocabulary,
        hidden=hidden,
        layers=config.integer("n_layers", most=MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=config.integer("mlp_hidden_size", hidden * config.integer("mlp_ratio", 4)),
        positions=positions,
        norm_eps=config.number("rms_norm_eps", 1e-5, above=-1.0),
        activation=activation_of(config, "activation_type", "silu"),
        rope=rope,
        tied=tied,
        end_tokens=end_tokens_of(config, generation, None, vocabulary),
        beginning_token=beginning_of(config, None, vocabulary),
    )


def _llada_moe(config: ConfigFields, generation: ConfigFields) -> Shape:
    shape = rotary_shape("llada-moe", config, generation, intermediate="dense_intermediate_size")
    mixed = config.values.get("moe_layer_freq") or [1] * shape.layers  # of each layer 1 for experts, 0 for a dense MLP
    if not isinstance(mixed, list) or len(mixed) != shape.layers or any(one not in (0, 1) for one in mixed):
        raise config.wrong("moe_layer_freq", f"a list of 0 or 1 for each of {shape.layers} layers")
    experts = Experts(
        count=config.integer("num_experts", most=MOST_EXPERTS),
        chosen=config.integer("num_experts_per_tok"),
        intermediate=config.integer("expert_intermediate_size"),
        dense=tuple(layer for layer, one in enumerate(mixed) if not one),
    )
    _check_choice(config, experts)
    return replace(shape, qk_norm=config.flag("qk_layernorm", False), experts=experts)


def _llada2(config: ConfigFields, generation: ConfigFields) -> Shape:
    shape = rotary_shape("llada2", config, generation, partial=True)
    turned = 2 * len(shape.rope.inverse_frequencies) if shape.rope else 0
    if config.integer("rotary_dim", turned) != turned:
        raise config.wrong("rotary_dim", f"{turned}, as 'partial_rotary_factor' says")
    chosen, inner = config.integer("num_experts_per_tok"), config.integer("moe_intermediate_size")
    shared = config.integer("num_shared_experts", 0, least=0) * inner
    if config.integer("moe_shared_expert_intermediate_size", inner) * (shared // inner) != shared:
        raise config.wrong("moe_shared_expert_intermediate_size", f"{inner}, as 'moe_intermediate_size' says")
    experts = Experts(
        count=config.integer("num_experts", most=MOST_EXPERTS),
        chosen=chosen,
        intermediate=inner,
        shared=shared,
        dense=tuple(range(min(shape.layers, config.integer("first_k_dense_replace", 0, least=0)))),
        scores="sigmoid",
        normalised=chosen > 1,
        scale=config.number("routed_scaling_factor", 2.5),
        groups=config.integer("n_group", 1, most=MOST_EXPERTS),
        groups_chosen=config.integer("topk_group", 1, most=MOST_EXPERTS),
    )
    _check_choice(config, experts)
    return replace(shape, qk_norm=True, experts=experts)


def _check_choice(config: ConfigFields, experts: Experts) -> None:
    size, remainder = divmod(experts.count, experts.groups)
    if remainder or (experts.groups > 1 and size < 2):
        raise config.wrong("n_group", f"a divisor of {experts.count} experts that leaves two or more in each group")
    if experts.groups_chosen > experts.groups:
        raise config.wrong("topk_group", f"at most {experts.groups}, as many as there are groups")
    if experts.chosen > experts.groups_chosen * size:
        raise config.wrong("num_experts_per_tok", f"at most the {experts.groups_chosen * size} that can be chosen from")


SHAPES: Mapping[str, Callable[[ConfigFields, ConfigFields], Shape]] = {
    "llada": _llada,
    "llada-moe": _llada_moe,
    "llada2": _llada2,
    "dream": partial(rotary_shape, "dream"),
    "sdar": lambda config, generation: replace(rotary_shape("sdar", config, generation), qk_norm=True),
}


GPT2_NAMES = {  # other families' names for the same keys: transformers accepts both
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}


@dataclass(frozen=True)
class Biases:
    """Which products have a bias."""

    qkv: bool = False
    out: bool = False
    up: bool = False
    down: bool = False


@dataclass(frozen=True)
class MaskHints:
    """Settings of a diffusion model that go before those of its config.json; None: not given."""

    mask_token: int | None = None
    block: int | None = None  # positions, of a block-causal model


NO_HINTS = MaskHints()


def shape_of(
    config: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    hints: MaskHints = NO_HINTS,
    where: str = "config.json",
) -> Shape:
    """The shape that config.json and generation_config.json, when there is one, describe. `where`: in messages.

    Raises `UsageError` for a model that does not run here, and for a file that contradicts itself.
    """
    fields, ends = ConfigFields(config, where), ConfigFields(generation or {}, "generation_config.json")
    family = supported_family(fields)
    if family in MASKED:
        shape = SHAPES[family](fields, ends)
        known = KNOWN.get((family, shape.vocabulary))
        shape = replace(shape, end_tokens=tuple(dict.fromkeys([*shape.end_tokens, *(known.ends if known else ())])))
        block = None
        if family in BLOCKS:
            block = fields.integer("block_size", BLOCKS[family]) if hints.block is None else hints.block
        mask = _mask_token(fields, known, hints.mask_token, shape)
        shape = replace(shape, masking=masking_of(family, mask, block))
    elif family == "gpt2":
        values = dict(fields.values)
        for other, own in GPT2_NAMES.items():  # all under GPT-2's own names
            given = values.pop(other, None)
            if given is not None and values.setdefault(own, given) != given:
                raise fields.wrong(other, f"{values[own]!r}, as '{own}' says"[:90])
        fields = ConfigFields(values, where)
        shape = _gpt2(fields, ends)
    else:
        shape = rotary_shape(family, fields, ends)
    refuse_unknown_keys(family, fields)
    return shape


def biases_of(config: Mapping[str, Any]) -> Biases:
    fields = ConfigFields(config)
    family = supported_family(fields)
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


def _gpt2(config: ConfigFields, generation: ConfigFields) -> Shape:
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
