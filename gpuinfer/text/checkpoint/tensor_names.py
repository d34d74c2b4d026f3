"""What families call their tensors, where they are built like Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TensorNames:
    """Names without ".weight" and ".bias". Those of a layer come after `layer`, with the layer's number in it."""

    prefix: str = "model."
    embedding: str = "embed_tokens"
    layer: str = "layers.{}."
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # or one that is all three
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    out: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp."  # before the names of its products
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    norm: str = "norm"
    head: str = "lm_head"
    head_within: bool = False  # the prefix is before the head's name too
    router: str = "mlp.gate"
    router_bias: str | None = None  # a tensor's whole name within the layer
    expert: str = "mlp.experts.{}."  # before the names of one expert's products
    shared: str = "mlp.shared_experts."

    def embedding_of(self, prefix: str) -> str:
        return f"{prefix}{self.embedding}.weight"

    def head_of(self, prefix: str) -> str:
        return f"{prefix if self.head_within else ''}{self.head}.weight"


LLAMA = TensorNames()
NAMES: Mapping[str, TensorNames] = {
    "llada": TensorNames(
        prefix="model.transformer.",
        embedding="wte",
        layer="blocks.{}.",
        attention_norm="attn_norm",
        qkv=("q_proj", "k_proj", "v_proj"),
        out="attn_out",
        mlp_norm="ff_norm",
        mlp="",
        gate="ff_proj",
        up="up_proj",
        down="ff_out",
        norm="ln_f",
        head="ff_out",
        head_within=True,
    ),
    "llada2": TensorNames(
        embedding="word_embeddings",
        qkv=("attention.query_key_value",),
        query_norm="attention.query_layernorm",
        key_norm="attention.key_layernorm",
        out="attention.dense",
        router_bias="mlp.gate.expert_bias",
    ),
}


def names_of(family: str) -> TensorNames:
    return NAMES.get(family, LLAMA)
