"""A transformer in plain torch, float64, whose attention is a matrix and a mask: the judge of what tokens see."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gpuinfer.text.transformer import Layer, Linear, Mixture, Norm, Shape, Weights

EXACT = torch.float64


def masked_logits(shape: Shape, weights: Weights, tokens: Sequence[int], sees: Sequence[int]) -> Tensor:
    """Float64 logits [tokens, vocabulary] of one row at positions 0…, of which token i sees the first `sees[i]`."""
    x = weights.embedding[torch.tensor(tokens)].to(EXACT)
    if weights.positions is not None:
        x = x + weights.positions[: len(tokens)].to(EXACT)
    for number, layer in enumerate(weights.layers):
        window = (shape.windows or (None,) * shape.layers)[number]
        x = x + _applied(_attended(shape, layer, _normed(x, layer.attention_norm, shape), sees, window), layer.out)
        given = _normed(x, layer.mlp_norm, shape)
        x = x + _mlp(shape, given, layer.up, layer.down)
        if layer.mixture is not None:
            x = x + torch.stack([_of_experts(shape, layer.mixture, row) for row in given])
    return _applied(_normed(x, weights.norm, shape), weights.head)


def mixed_by_pages(
    shape: Shape, cache, queries: Tensor, pages: Sequence[Tensor], sees: Sequence[int], window=None
) -> Tensor:
    """Float64 [rows, heads × head_dim] of `queries` [rows, heads, head_dim] over a layer's pages, those of each row."""
    found = []
    for query, own, seen in zip(queries.double(), pages, sees, strict=True):
        held = [one[0, own].flatten(0, 1)[:seen].double() for one in (cache.keys, cache.values)]
        keys, values = (one.repeat_interleave(shape.heads // shape.kv_heads, 1).transpose(0, 1) for one in held)
        scores = torch.einsum("hd,hpd->hp", query, keys) / shape.head_dim**0.5
        if window is not None:
            scores[:, : max(0, seen - window)] = -torch.inf
        found.append(torch.einsum("hp,hpd->hd", scores.softmax(-1), values).flatten())
    return torch.stack(found)


def _applied(x: Tensor, linear: Linear) -> Tensor:
    return F.linear(x, linear.weight.to(EXACT), None if linear.bias is None else linear.bias.to(EXACT))


def _normed(x: Tensor, norm: Norm, shape: Shape) -> Tensor:
    if shape.norm == "layer":
        return F.layer_norm(x, x.shape[-1:], norm.scale.to(EXACT), norm.shift.to(EXACT), shape.norm_eps)
    return F.rms_norm(x, x.shape[-1:], norm.scale.to(EXACT), shape.norm_eps)


def _attended(shape: Shape, layer: Layer, x: Tensor, sees: Sequence[int], window: int | None) -> Tensor:
    sizes = [count * shape.head_dim for count in (shape.heads, shape.kv_heads, shape.kv_heads)]
    queries, keys, values = (
        part.unflatten(-1, (-1, shape.head_dim)) for part in _applied(x, layer.qkv).split(sizes, -1)
    )
    if layer.query_norm is not None:
        queries = F.rms_norm(queries, queries.shape[-1:], layer.query_norm.scale.to(EXACT), shape.norm_eps)
        keys = F.rms_norm(keys, keys.shape[-1:], layer.key_norm.scale.to(EXACT), shape.norm_eps)
    queries, keys = _turned(shape, queries), _turned(shape, keys)
    keys, values = (part.repeat_interleave(shape.heads // shape.kv_heads, 1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries, keys) / shape.head_dim**0.5
    places = torch.arange(len(x))
    hidden = places >= torch.tensor(sees)[:, None]
    if window is not None:
        hidden |= places <= places[:, None] - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values).flatten(1)


def _turned(shape: Shape, heads: Tensor) -> Tensor:
    if shape.rope is None:
        return heads
    half = len(shape.rope.inverse_frequencies)
    angle = torch.arange(len(heads), dtype=EXACT)[:, None, None] * torch.tensor(shape.rope.inverse_frequencies)
    turn = torch.polar(torch.full_like(angle, shape.rope.attention_factor), angle)
    pairs = torch.complex(heads[..., :half], heads[..., half : 2 * half]) * turn
    return torch.cat([pairs.real, pairs.imag, heads[..., 2 * half :]], -1)


def _mlp(shape: Shape, x: Tensor, up: Linear, down: Linear) -> Tensor:
    inner = _applied(x, up)
    kinds = {"silu": F.silu, "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda t: F.gelu(t, approximate="tanh")}
    if shape.gated:
        gate, value = inner.chunk(2, -1)
        return _applied(kinds[shape.activation](gate) * value, down)
    return _applied(kinds[shape.activation](inner), down)


def _of_experts(shape: Shape, mixture: Mixture, row: Tensor) -> Tensor:
    """One row's experts, one after another."""
    experts = shape.experts
    logits = mixture.router.to(EXACT) @ row
    scores = (logits.sigmoid() if experts.scores == "sigmoid" else logits.softmax(-1)).tolist()
    bias = [0.0] * experts.count if mixture.bias is None else mixture.bias.tolist()
    ranked = [score + extra for score, extra in zip(scores, bias, strict=True)]
    size = experts.count // experts.groups
    groups = [range(group * size, (group + 1) * size) for group in range(experts.groups)]
    groups.sort(key=lambda group: -sum(sorted(ranked[i] for i in group)[-2:]))
    allowed = [i for group in groups[: experts.groups_chosen] for i in group]
    chosen = sorted(allowed, key=lambda i: -ranked[i])[: experts.chosen]
    total = sum(scores[i] for i in chosen) if experts.normalised else 1.0
    found = torch.zeros_like(row)
    for i in chosen:
        given = _mlp(shape, row, Linear(mixture.up[i]), Linear(mixture.down[i]))
        found = found + experts.scale * scores[i] / total * given
    return found
