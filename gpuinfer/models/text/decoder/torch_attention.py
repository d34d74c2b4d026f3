"""Attention of many rows over the cache, in groups of segments that are alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from gpuinfer.models.text.decoder.torch_cache import SlotCache

Window = int | None


@dataclass(frozen=True)
class Group:
    """Segments that go through attention together, each padded to `width` tokens; they read `reach` positions.

    `masks` has one mask for each kind of window in the model: added to the scores, [segments, 1, width, reach]. None
    stands for plain causal order from position 0 on, which has faster kernels; not with a width of 1.
    """

    width: int
    reach: int
    slots: Tensor | slice  # whose cache: the numbers [segments], or a run of slots, which is read where it lies
    rows: Tensor | None  # [segments × width] indices into the step's rows; None: all of them, in order
    masks: dict[Window, Tensor | None]


@dataclass(frozen=True)
class Batch:
    """The rows of one step as the device has them. Tensors of integers are int64."""

    tokens: Tensor  # [rows]
    positions: Tensor  # [rows]
    places: Tensor  # [rows] in the cache: slot × room + position
    groups: tuple[Group, ...]
    back: Tensor | None = None  # [rows] where a row is in what the groups give, one after another; None: in order


def mask(positions: Tensor, reach: int, window: Window, dtype: torch.dtype) -> Tensor:
    """Added to the scores of queries at `positions` [segments, width]: 0 or -inf, [segments, 1, width, reach]."""
    keys = torch.arange(reach, device=positions.device)
    ahead = keys > positions[..., None]
    if window is not None:
        ahead |= keys <= positions[..., None] - window
    zeros = torch.zeros((), device=positions.device, dtype=dtype)
    return torch.where(ahead, -torch.inf, zeros)[:, None]


def attend(batch: Batch, queries: Tensor, cache: SlotCache, layer: int, window: Window) -> Tensor:
    """Mixed values [rows, heads × head_dim] for `queries` [rows, heads, head_dim]."""
    found = [of_group(group, queries, cache, layer, window) for group in batch.groups]
    mixed = found[0] if len(found) == 1 else torch.cat(found)
    return mixed if batch.back is None else mixed.index_select(0, batch.back)


def of_group(group: Group, queries: Tensor, cache: SlotCache, layer: int, window: Window) -> Tensor:
    """The same for one group: [segments × width, heads × head_dim]."""
    keys = read(cache.keys[layer], group)
    values = read(cache.values[layer], group)
    asking = queries if group.rows is None else queries.index_select(0, group.rows)
    asking = asking.view(-1, group.width, *asking.shape[1:])
    mixed = (one_each if group.width == 1 else many_each)(asking, keys, values, group.masks[window])
    return mixed.reshape(-1, mixed.shape[-2] * mixed.shape[-1])


def read(held: Tensor, group: Group) -> Tensor:
    """A group's keys or values, [segments, reach, kv_heads, head_dim]."""
    near = held[:, : group.reach]
    return near[group.slots] if isinstance(group.slots, slice) else near.index_select(0, group.slots)


def one_each(asking: Tensor, keys: Tensor, values: Tensor, added: Tensor | None) -> Tensor:
    """Attention of one query a row, [segments, 1, heads, head_dim]. The heads that share keys stand in for the queries
    of a longer run, so that the keys are read once for all of them.
    """
    shared = asking.reshape(len(asking), keys.shape[2], -1, asking.shape[-1])
    mixed = F.scaled_dot_product_attention(shared, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=added)
    return mixed.flatten(1, 2)[:, None]


def many_each(asking: Tensor, keys: Tensor, values: Tensor, added: Tensor | None) -> Tensor:
    """Attention of runs, [segments, width, heads, head_dim]."""
    heads = asking.shape[2]
    mixed = F.scaled_dot_product_attention(
        asking.transpose(1, 2),
        for_each_head(keys, heads),
        for_each_head(values, heads),
        attn_mask=added,
        is_causal=added is None,
    )
    return mixed.transpose(1, 2)


def for_each_head(held: Tensor, heads: int) -> Tensor:
    """[segments, heads, reach, head_dim], each kv head as often as query heads share it."""
    shared = heads // held.shape[2]
    return (held if shared == 1 else held.repeat_interleave(shared, dim=2)).transpose(1, 2)
