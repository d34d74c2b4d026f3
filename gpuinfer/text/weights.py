"""A transformer's weights by neutral names, whatever its checkpoint calls them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Norm:
    """Scale and, for LayerNorm, shift: float32 [size]."""

    scale: Tensor
    shift: Tensor | None = None


@dataclass(frozen=True)
class Linear:
    """`weight` [out, in] in the model's dtype, `bias` [out] in the model's dtype."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Layer:
    """One block. `qkv` gives queries, keys, values after one another: [(heads + 2 × kv_heads) × head_dim, hidden];
    `up` gives gate then value when gated: [2 × intermediate, hidden], else [intermediate, hidden].
    """

    attention_norm: Norm
    qkv: Linear
    out: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear
    query_norm: Norm | None = None
    key_norm: Norm | None = None


@dataclass(frozen=True)
class Weights:
    """All of a model's weights, on the CPU, contiguous."""

    embedding: Tensor  # [vocabulary, hidden]
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear  # [vocabulary, hidden]; the embedding itself when tied
    positions: Tensor | None = None  # learned: [positions, hidden]
