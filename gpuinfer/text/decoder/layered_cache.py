"""Keys and values in pages where layers differ in heads and sizes, and attention of any decoder over them: with a
scale, a soft cap and sinks of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gpuinfer.models.pinned_memory import queued
from gpuinfer.text.checkpoint.memory_estimate import SPARE_PAGES, most_copied, row_pages
from gpuinfer.text.checkpoint.transformers_trace import AttentionCall
from gpuinfer.text.decoder.attention_plan import Integers
from gpuinfer.text.decoder.torch_cache import PageCache, give_back_of, zeros
from gpuinfer.text.decoder.torch_layers import PaddedGroup, StepBatch
from gpuinfer.text.transformer import PAGE


class LayeredCache(PageCache):
    """As `PageCache`, with `keys` and `values` of each layer [pages + 2, PAGE, kv_heads, size] by themselves."""

    def __init__(
        self, calls: Sequence[AttentionCall], pages: int, length: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.pages, self.columns = pages, row_pages(length)
        self.room = self.columns * PAGE
        self.spare, self.blank = pages, pages + 1
        shared = {call.heads // call.kv_heads for call in calls}
        self.sharing = shared.pop() if len(shared) == 1 else 1  # 1: where layers differ keys are repeated
        self.width = max(call.kv_heads * max(call.key_dim, call.value_dim) for call in calls)
        self.most_copied = most_copied(device) // self.width
        self.dtype, self.device = dtype, device
        total = pages + SPARE_PAGES
        self.layer_keys = [zeros((total, PAGE, call.kv_heads, call.key_dim), device, dtype) for call in calls]
        self.layer_values = [zeros((total, PAGE, call.kv_heads, call.value_dim), device, dtype) for call in calls]
        self._filled = np.zeros(pages, np.int64)
        self._copies = (torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype))

    def write(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """See `PageCache.write`."""
        self.layer_keys[layer].flatten(0, 1).index_copy_(0, places, keys)
        self.layer_values[layer].flatten(0, 1).index_copy_(0, places, values)

    def read(self, layer: int, pages: Tensor | slice, segments: int, reach: int) -> tuple[Tensor, Tensor]:
        """See `PageCache.read`."""
        found = []
        for number, held in enumerate((self.layer_keys[layer], self.layer_values[layer])):
            if isinstance(pages, slice):
                there = held[pages]
            elif self.device.type == "cpu":
                there = self._copied_here(number, held, pages.flatten())
            else:
                there = held.index_select(0, pages.flatten())
            found.append(there.view(segments, -1, *held.shape[2:])[:, :reach])
        return found[0], found[1]

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `step.Decoder.copy_pages`."""
        if not len(targets):
            return
        from_pages, into = (queued(np.array(given, np.int64), self.device) for given in (sources, targets))
        for held in (*self.layer_keys, *self.layer_values):
            held.index_copy_(0, into, held.index_select(0, from_pages))
        self._filled[targets] = self._filled[sources]

    def empty(self) -> None:
        """Forget everything."""
        for held in (*self.layer_keys, *self.layer_values):
            held.zero_()
        self._filled[:] = 0

    def give_back(self, pages: Sequence[int]) -> None:
        """See `PageCache.give_back`."""
        give_back_of((*self.layer_keys, *self.layer_values), pages)
        self._filled[list(pages)] = 0

    def nbytes(self) -> int:
        return sum(held.nbytes for held in (*self.layer_keys, *self.layer_values))

    def _copied_here(self, number: int, held: Tensor, pages: Tensor) -> Tensor:
        needed = len(pages) * held[0].numel()
        if needed > len(self._copies[number]):
            grown = self._copies[number].new_empty(needed)
            self._copies = (grown, self._copies[1]) if number == 0 else (self._copies[0], grown)
        copy = self._copies[number][:needed].view(len(pages), *held.shape[1:])
        torch.index_select(held, 0, pages, out=copy)
        return copy

    def _clear(self, pages: NDArray[np.int32], starts: Integers, ends: Integers) -> None:
        counts = ends - starts
        offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        places = queued(np.repeat(pages * np.int64(PAGE) + starts, counts) + offsets, self.device)
        for held in (*self.layer_keys, *self.layer_values):
            held.flatten(0, 1).index_fill_(0, places, 0)


def attend_layer(
    batch: StepBatch,
    queries: Tensor,
    cache: LayeredCache,
    layer: int,
    window: int | None,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
    exact: bool,
) -> Tensor:
    """Mixed values [rows, heads, value_dim] for `queries` [rows, heads, key_dim]: softmax over scores times `scale`,
    with `sinks` [heads] as scores that no value answers to. `exact`: no kernel whose bits depend on a row's neighbours.
    """
    found = [
        _of_group(group, queries, cache, layer, group.masks[window], scale, soft_cap, sinks, exact)
        for group in batch.groups
    ]
    mixed = found[0] if len(found) == 1 else torch.cat(found)
    return mixed if batch.back is None else mixed.index_select(0, batch.back)


def _of_group(
    group: PaddedGroup,
    queries: Tensor,
    cache: LayeredCache,
    layer: int,
    mask: Tensor | None,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
    exact: bool,
) -> Tensor:
    """The same for one group: [segments × width, heads, value_dim]. Queries of heads that share keys are one run."""
    asking = queries
    if group.rows is not None:
        asking = queries[group.rows] if isinstance(group.rows, slice) else queries.index_select(0, group.rows)
    heads, width = asking.shape[1], group.width
    asking = asking.view(-1, width, heads, asking.shape[2]).transpose(1, 2)  # [segments, heads, width, key_dim]
    segments = len(asking)
    keys, values = (one.transpose(1, 2) for one in cache.read(layer, group.pages, segments, group.reach))
    shared = heads // keys.shape[1]
    causal = group.causal and mask is None and width > 1
    plain = soft_cap is None and sinks is None
    if shared > 1 and (causal or (width > 1 and shared != cache.sharing)):
        keys, values = (held.repeat_interleave(shared, dim=1) for held in (keys, values))
        if mask is not None and cache.sharing > 1:
            raise RuntimeError("masks are for as many heads as share keys, and these do not")
    else:
        asking = asking.reshape(segments, keys.shape[1], -1, asking.shape[3])
    if plain and not exact and keys.shape[-1] == values.shape[-1]:
        mixed = scaled_dot_product_attention(asking, keys, values, attn_mask=mask, is_causal=causal, scale=scale)
    else:
        if causal:
            mask = asking.new_full((width, group.reach), -torch.inf).triu(1)
        rows = None if sinks is None else sinks.view(1, keys.shape[1], -1).repeat_interleave(width, dim=2)
        mixed = _scored(asking, keys, values, mask, scale, soft_cap, rows)
    mixed = mixed.reshape(segments, heads, width, -1)
    return mixed.transpose(1, 2).reshape(segments * width, heads, -1)


def _scored(
    asking: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention in products and a softmax of whole tensors, scores in float32. `sinks` [1, kv_heads, queries]."""
    scores = (torch.matmul(asking, keys.transpose(2, 3)) * scale).float()
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        beside = sinks.float()[..., None].expand(len(scores), -1, -1, 1)
        scores = torch.cat((scores, beside), dim=-1)
    shares = scores.softmax(-1).to(values.dtype)
    if sinks is not None:
        shares = shares[..., :-1]
    return torch.matmul(shares, values)
