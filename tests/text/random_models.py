"""Shapes and random weights for decoders under test."""

from __future__ import annotations

from typing import Any

import torch

from gpuinfer.text.transformer import Experts, Layer, Linear, Mixture, Norm, Rope, Shape, Weights

LLAMA = Shape("llama", 61, 32, 2, 4, 2, 16, 48, 256, rope=Rope(tuple(10.0 ** (-i / 2) for i in range(8))))
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "heads of 8 values": {"head_dim": 8, "rope": Rope((1.0, 0.3, 0.1, 0.03))},
    "heads of 32 values": {"head_dim": 32, "rope": Rope(tuple(0.7**i for i in range(16)), 1.1)},
    "part of a head turns": {"rope": Rope((1.0, 0.1))},
    "one key head for all": {"kv_heads": 1},
    "a key head for each": {"kv_heads": 4},
    "windows": {"windows": (5, None)},
    "q and k norms": {"qk_norm": True},
    "tied": {"tied": True},
    "layer norms, learned positions, gelu": {
        "norm": "layer", "rope": None, "learned_positions": True, "gated": False, "activation": "gelu_tanh",
    },
    "exact gelu": {"gated": False, "activation": "gelu"},
    "relu": {"gated": False, "activation": "relu"},
}  # fmt: skip

MIXTURES: dict[str, dict[str, Any]] = {
    "experts": {"experts": Experts(8, 2, 24)},
    "one expert each, and a layer without": {"experts": Experts(5, 1, 40, dense=(0,))},
    "experts beside one for all": {"experts": Experts(6, 3, 20, shared=28, normalised=True)},
    "experts in groups, by sigmoid": {
        "experts": Experts(
            16, 3, 16, shared=16, dense=(0,), scores="sigmoid", normalised=True, scale=2.5, groups=4, groups_chosen=2
        )
    },
    "experts of plain inner layers": {"experts": Experts(4, 2, 33), "gated": False, "activation": "gelu_tanh"},
}  # fmt: skip


def random_weights(shape: Shape, dtype: torch.dtype = torch.float32, seed: int = 0) -> Weights:
    """Weights of this shape, with a bias wherever there may be one."""
    dice = torch.Generator().manual_seed(seed)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=dice)

    def linear(out: int, inner: int) -> Linear:
        return Linear((drawn(out, inner) / inner**0.5).to(dtype), (0.1 * drawn(out)).to(dtype))

    def norm(size: int, shifted: bool = shape.norm == "layer") -> Norm:
        return Norm(1 + 0.1 * drawn(size), 0.1 * drawn(size) if shifted else None)

    def mixture() -> Mixture:
        experts = shape.experts
        count, inner = experts.count, experts.intermediate
        up = drawn(count, (2 if shape.gated else 1) * inner, shape.hidden) / shape.hidden**0.5
        down = drawn(count, shape.hidden, inner) / inner**0.5
        bias = 0.1 * drawn(count) if experts.scores == "sigmoid" else None
        return Mixture(drawn(count, shape.hidden) / shape.hidden**0.5, bias, up.to(dtype), down.to(dtype))

    def layer(number: int) -> Layer:
        inner = shape.inner(number)
        width = shape.heads * shape.head_dim
        return Layer(
            norm(shape.hidden),
            linear(width + 2 * shape.kv_heads * shape.head_dim, shape.hidden),
            linear(shape.hidden, width),
            norm(shape.hidden),
            linear((2 if shape.gated else 1) * inner, shape.hidden),
            linear(shape.hidden, inner) if inner else Linear(torch.zeros(shape.hidden, 0, dtype=dtype)),
            *((norm(shape.head_dim, False), norm(shape.head_dim, False)) if shape.qk_norm else (None, None)),
            mixture() if shape.mixed(number) else None,
        )

    embedding = drawn(shape.vocabulary, shape.hidden).to(dtype)
    layers = tuple(layer(number) for number in range(shape.layers))
    head = Linear(embedding) if shape.tied else Linear(linear(shape.vocabulary, shape.hidden).weight)
    places = drawn(shape.positions, shape.hidden).to(dtype) if shape.learned_positions else None
    return Weights(embedding, layers, norm(shape.hidden), head, places)
