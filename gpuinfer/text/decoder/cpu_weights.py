"""A model's weights as the compiled step reads them: cut into lanes, and packed for their products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuinfer.text.decoder.cpu_product import panels_of
from gpuinfer.text.decoder.cpu_vectors import TILE
from gpuinfer.text.shape import Shape
from gpuinfer.text.weights import Linear, Mixture, Norm, Weights


@dataclass(frozen=True)
class Share:
    """What one lane has of each layer: ranges of heads, inner columns and logits."""

    heads: range
    kv_heads: range
    added: range  # columns of what attention and MLP add to a row
    inner: tuple[range, ...]  # of each layer
    expert: range  # of the columns between an expert's products
    columns: range


@dataclass(frozen=True)
class LaneWeights:
    """`addresses` of qkv, out, up, down of each layer, then of the head, then of experts; `kept` is what they point to.

    Of experts: each layer's router, then up and down of each one; 0 in a layer that has none.
    """

    addresses: list[int]
    kept: list[Any]
    qkv_biases: NDArray[np.float32]  # [layers, this lane's columns]
    up_biases: NDArray[np.float32]


def lanes_for(shape: Shape, threads: int) -> int:
    """The most lanes, up to `threads`, that the heads divide into."""
    fits = (n for n in range(threads, 0, -1) if shape.heads % n == 0)
    return next(n for n in fits if shape.kv_heads % n == 0 or n % shape.kv_heads == 0)


def share_of(shape: Shape, lane: int, lanes: int) -> Share:
    """A lane's part. Where there are fewer key/value heads than lanes, several lanes hold the same one."""
    per_lane = shape.heads // lanes
    group = shape.heads // shape.kv_heads
    heads = range(lane * per_lane, (lane + 1) * per_lane)
    return Share(
        heads,
        range(heads[0] // group, heads[-1] // group + 1),
        _part(shape.hidden, lane, lanes),
        tuple(_part(shape.inner(layer), lane, lanes) for layer in range(shape.layers)),
        _part(shape.experts.intermediate if shape.experts else 0, lane, lanes),
        _part(shape.vocabulary, lane, lanes),
    )


def lane_weights(weights: Weights, shape: Shape, share: Share, panels: bool) -> LaneWeights:
    """In panels for our own products; as they are, rows one after another, for a library's."""
    keep = _Keep(panels)
    qkv_rows = _rows_of_heads(shape, share)
    added = slice(share.added.start, share.added.stop)
    qkv_biases, up_biases = [], []
    for number, layer in enumerate(weights.layers):
        up_rows = _rows_of_inner(shape, share.inner[number], shape.inner(number))
        keep.add(layer.qkv.weight[qkv_rows])
        keep.add(layer.out.weight[added])
        keep.add(layer.up.weight[up_rows])
        keep.add(layer.down.weight[added])
        qkv_biases.append(bias_of(layer.qkv)[qkv_rows])
        up_biases.append(bias_of(layer.up)[up_rows])
    keep.add(weights.head.weight[share.columns.start : share.columns.stop])
    for layer in weights.layers:
        _keep_experts(keep, shape, share, layer.mixture)
    return LaneWeights(keep.addresses, keep.kept, _stack(qkv_biases), _stack_unequal(up_biases))


def _keep_experts(keep: _Keep, shape: Shape, share: Share, mixture: Mixture | None) -> None:
    if shape.experts is None:
        return
    if mixture is None:
        keep.addresses += [0] * (1 + 2 * shape.experts.count)
        return
    keep.add(mixture.router.float(), panels=True)
    rows = _rows_of_inner(shape, share.expert, shape.experts.intermediate)
    for up, down in zip(mixture.up, mixture.down, strict=True):
        keep.add(up[rows])
        keep.add(down[share.added.start : share.added.stop])


def bias_of(linear: Linear) -> torch.Tensor:
    """A product's bias, float32 [out]; zeros when it has none."""
    if linear.bias is None:
        return torch.zeros(linear.weight.shape[0])
    return linear.bias.float()


def norms(weights: Weights) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and shifts [2 × layers + 1, hidden] in the order in which rows pass them."""
    found: list[Norm] = []
    for layer in weights.layers:
        found += [layer.attention_norm, layer.mlp_norm]
    found.append(weights.norm)
    shifts = [torch.zeros_like(norm.scale) if norm.shift is None else norm.shift for norm in found]
    return _stack([norm.scale for norm in found]), _stack(shifts)


def as_stored(tensor: torch.Tensor) -> NDArray[Any]:
    """A tensor for compiled code: float32 as it is, bfloat16 as its bits in uint16."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


class _Keep:
    def __init__(self, panels: bool) -> None:
        self._panels = panels
        self.addresses: list[int] = []
        self.kept: list[Any] = []

    def add(self, weight: torch.Tensor, panels: bool = False) -> None:
        form = panels_of(weight) if self._panels or panels else as_stored(weight)
        self.addresses.append(form.ctypes.data)
        self.kept.append(form)


def _rows_of_heads(shape: Shape, share: Share) -> torch.Tensor:
    """Rows of the qkv weight: this lane's queries, keys, values."""
    dim, keys_at = shape.head_dim, shape.heads * shape.head_dim
    values_at = keys_at + shape.kv_heads * dim
    kv = range(share.kv_heads.start * dim, share.kv_heads.stop * dim)
    queries = range(share.heads.start * dim, share.heads.stop * dim)
    return torch.tensor([*queries, *(keys_at + row for row in kv), *(values_at + row for row in kv)])


def _rows_of_inner(shape: Shape, inner: range, width: int) -> torch.Tensor:
    """Rows of an up weight: of the gate, then of the value."""
    rows = torch.arange(inner.start, inner.stop)
    return torch.cat([rows, rows + width]) if shape.gated else rows


def _part(size: int, lane: int, lanes: int) -> range:
    """A lane's columns: whole panels, so that no loop over them has another remainder for another number of lanes."""
    panels = -(-size // TILE)
    begin, end = (min(size, panels * number // lanes * TILE) for number in (lane, lane + 1))
    return range(begin, end)


def _stack_unequal(rows: list[torch.Tensor]) -> NDArray[np.float32]:
    """With zeros behind the shorter ones."""
    width = max(len(row) for row in rows)
    return _stack([torch.nn.functional.pad(row.float(), (0, width - len(row))) for row in rows])


def _stack(rows: list[torch.Tensor]) -> NDArray[np.float32]:
    return torch.stack([row.float() for row in rows]).contiguous().numpy()
