"""The layers in plain torch, for any device and number format: the token-wise parts, attention of many rows over the
cache in groups of segments that are alike, and mixtures of experts (Shazeer et al. 2017).

Sums of norms, angles and scores are float32 whatever the weights are; what goes from part to part has the weights'
format, as in transformers. Experts: rows sorted by expert, which is less work, or every row through every expert, where
no size depends on the choice: that keeps the bits the same in any company.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from gpuinfer.text.decoder.rounding import GROUP, HALF, HEAD_BITS, rounded_to_4, rounded_to_8
from gpuinfer.text.decoder.torch_cache import PageCache
from gpuinfer.text.transformer import Adapter, Experts, Layer, Linear, LowRank, Mixture, Norm, Product, Shape, Weights

Activate = Callable[[Tensor], Tensor]
"""From what up projections give to what goes into down projections."""
Results = TypeVar("Results", Tensor, tuple[Tensor, ...])
ALIGNED = 16  # bytes: the kernel for all experts at once wants rows whose size is a multiple of it
Mix = Callable[[Experts, Mixture, Tensor, Activate], Tensor]


def chosen_for(experts: Experts, mixture: Mixture, x: Tensor) -> tuple[Tensor, Tensor]:
    """The experts of rows [rows, hidden], int64 [rows, chosen], ascending; and what share of the sum each has."""
    logits = F.linear(x.float(), mixture.router)
    scores = logits.softmax(-1) if experts.scores == "softmax" else logits.sigmoid()
    ranked = scores if mixture.bias is None else scores + mixture.bias
    if experts.groups > 1:  # none but those of the groups whose two best have the highest sum (DeepSeek-AI 2024)
        grouped = ranked.view(*ranked.shape[:-1], experts.groups, -1)
        best = grouped.topk(min(2, grouped.shape[-1])).values.sum(-1).topk(experts.groups_chosen).indices
        kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
        ranked = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    chosen = ranked.topk(experts.chosen).indices.sort(-1).values
    shares = scores.gather(-1, chosen)
    if experts.normalised:
        shares = shares / shares.sum(-1, keepdim=True)
    return chosen, shares * experts.scale


def sorted_mix(experts: Experts, mixture: Mixture, x: Tensor, activate: Activate) -> Tensor:
    """What the experts of rows [rows, hidden] give, float32 sums of what each does. No size depends on the choice, so
    that it can be captured.
    """
    chosen, shares = chosen_for(experts, mixture, x)
    by_expert, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(by_expert, torch.arange(experts.count, device=x.device), right=True, out_int32=True)
    inner = activate(grouped_product(x[order // experts.chosen], mixture.up, ends))
    found = grouped_product(inner, mixture.down, ends)
    given = torch.empty_like(found).index_copy_(0, order, found).view(*chosen.shape, -1)
    return (given.float() * shares[..., None]).sum(1)


def grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows [rows, in], each by its expert's of `weights` [experts, out, `aligned` in]; those of an expert end before
    `ends`.
    """
    return F.grouped_mm(as_wide_as(weights, x), weights.transpose(1, 2), offs=ends)


def aligned(weights: Tensor) -> Tensor:
    """Weights of experts [experts, out, in] with zeros behind each row, up to a multiple of ALIGNED bytes."""
    odd = -weights.shape[-1] % (ALIGNED // weights.itemsize)
    return F.pad(weights, (0, odd)) if odd else weights


def as_wide_as(weights: Tensor, x: Tensor) -> Tensor:
    """Rows with as many values as those of `aligned` weights."""
    odd = weights.shape[-1] - x.shape[-1]
    return F.pad(x, (0, odd)) if odd else x


def whole_mix(experts: Experts, mixture: Mixture, x: Tensor, activate: Activate) -> Tensor:
    """The same, with every row through every expert."""
    chosen, shares = chosen_for(experts, mixture, x)
    inner = activate(torch.matmul(as_wide_as(mixture.up, x), mixture.up.transpose(1, 2)))
    given = torch.matmul(
        as_wide_as(mixture.down, inner), mixture.down.transpose(1, 2)
    ).float()  # [experts, rows, hidden]
    rows = torch.arange(len(x), device=x.device)[:, None]
    return (given[chosen, rows] * shares[..., None]).sum(1)


@dataclass(frozen=True)
class QuantisedLinear(Linear):
    """`weight` int8 [out, groups, 64], or uint8 with two terms a byte [out, groups × 2, 16]: whole numbers that are
    multiplied by `scales`, and of 4 bits added to `least`, [out, groups] of their groups, `columns` terms in all.
    """

    scales: Tensor = field(kw_only=True)
    least: Tensor | None = field(kw_only=True)
    columns: int = field(kw_only=True)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """[out, in]"""
        if self.least is None:
            found = self.weight.to(dtype) * self.scales.to(dtype)[..., None]
        else:
            whole = torch.cat([self.weight & 15, self.weight >> 4], -1).to(dtype)
            found = whole * self.scales.to(dtype)[..., None] + self.least.to(dtype)[..., None]
        return found.flatten(1)[:, : self.columns]


def quantised_linear(weight: Tensor, bias: Tensor | None, bits: int) -> QuantisedLinear:
    """A weight [out, in], rounded as the compiled decoder rounds it."""
    columns, size = weight.shape[1], GROUP if bits == 8 else HALF
    grouped = F.pad(weight.float(), (0, -columns % size)).view(len(weight), -1, size)
    if bits == 8:
        whole, scales = rounded_to_8(grouped)
        return QuantisedLinear(whole, bias, scales=scales, least=None, columns=columns)
    whole, scales, least = rounded_to_4(grouped)
    low, upper = whole[..., : size // 2], whole[..., size // 2 :]
    return QuantisedLinear(low | upper << 4, bias, scales=scales, least=least, columns=columns)


def on_device(weights: Weights, device: torch.device, dtype: torch.dtype, bits: int | None = None) -> Weights:
    """The same weights over there, one after another, matrices rounded to so many `bits` and the head to HEAD_BITS; a
    head tied to the embedding stays one tensor with it, unless it is rounded.
    """

    def norm(given: Norm) -> Norm:
        shift = None if given.shift is None else given.shift.to(device, torch.float32)
        return Norm(given.scale.to(device, torch.float32), shift)

    def linear(given: Linear, bits: int | None = bits) -> Linear:
        bias = None if given.bias is None else given.bias.to(device, dtype)
        if bits is not None and len(given.weight):
            return quantised_linear(given.weight.to(device), bias, bits)
        return Linear(given.weight.to(device, dtype), bias)

    def mixture(given: Mixture) -> Mixture:
        bias = None if given.bias is None else given.bias.to(device, torch.float32)
        router = given.router.to(device, torch.float32)
        return Mixture(router, bias, aligned(given.up.to(device, dtype)), aligned(given.down.to(device, dtype)))

    def layer(given: Layer) -> Layer:
        return Layer(
            attention_norm=norm(given.attention_norm),
            qkv=linear(given.qkv),
            out=linear(given.out),
            mlp_norm=norm(given.mlp_norm),
            up=linear(given.up),
            down=linear(given.down),
            query_norm=None if given.query_norm is None else norm(given.query_norm),
            key_norm=None if given.key_norm is None else norm(given.key_norm),
            mixture=None if given.mixture is None else mixture(given.mixture),
        )

    embedding = weights.embedding.to(device, dtype)
    tied = weights.head.weight.data_ptr() == weights.embedding.data_ptr()
    return Weights(
        embedding=embedding,
        layers=tuple(map(layer, weights.layers)),
        norm=norm(weights.norm),
        head=Linear(embedding) if tied and bits is None else linear(weights.head, HEAD_BITS if bits else None),
        positions=None if weights.positions is None else weights.positions.to(device, dtype),
    )


def tensors_of(weights: Weights) -> Iterator[Tensor]:
    """All of its tensors, in an order that depends on the shape alone."""
    yield weights.embedding
    if not isinstance(weights.head, QuantisedLinear):
        yield weights.head.weight
    yield from (tensor for tensor in (weights.positions, weights.head.bias) if tensor is not None)
    norms, linears = [weights.norm], list[Linear]()
    if isinstance(weights.head, QuantisedLinear):
        linears.append(weights.head)
    for layer in weights.layers:
        norms += [layer.attention_norm, layer.mlp_norm]
        norms += [norm for norm in (layer.query_norm, layer.key_norm) if norm is not None]
        linears += [layer.qkv, layer.out, layer.up, layer.down]
    for mixture in (layer.mixture for layer in weights.layers):
        if mixture is not None:
            yield from (mixture.router, mixture.up, mixture.down)
            yield from () if mixture.bias is None else (mixture.bias,)
    for norm in norms:
        yield from (tensor for tensor in (norm.scale, norm.shift) if tensor is not None)
    for linear in linears:
        yield from (tensor for tensor in (linear.weight, linear.bias) if tensor is not None)
        if isinstance(linear, QuantisedLinear):
            yield from (tensor for tensor in (linear.scales, linear.least) if tensor is not None)


def normed(x: Tensor, norm: Norm, kind: str, eps: float) -> Tensor:
    """RMSNorm or LayerNorm of the last dimension."""
    size = (x.shape[-1],)
    if kind == "layer":
        return F.layer_norm(x.float(), size, norm.scale, norm.shift, eps).to(x.dtype)
    return F.rms_norm(x.float(), size, norm.scale, eps).to(x.dtype)


def projected(x: Tensor, weights: Linear) -> Tensor:
    if isinstance(weights, QuantisedLinear):
        return F.linear(x, weights.dequantised(x.dtype), weights.bias)
    return F.linear(x, weights.weight, weights.bias)


@dataclass(frozen=True)
class AdaptedRows:
    """Rows of a batch and the adapter that they have. `chosen`: their numbers, int64; or bool [rows], where all rows go
    through the adapter and only these are changed, so that no size of its products depends on how many they are.
    """

    adapter: Adapter
    chosen: Tensor


Added = Sequence[tuple[Tensor, Sequence[LowRank]]]
"""The same of one layer."""


def with_adapters(x: Tensor, weights: Linear, product: Product, added: Added) -> Tensor:
    """`projected`, and what adapters add to their rows."""
    out = projected(x, weights)
    for chosen, lows in added:
        for low in lows:
            if low.product != product:
                continue
            place = out[:, low.first : low.first + len(low.up)]
            if chosen.dtype == torch.bool:
                place.copy_(torch.where(chosen[:, None], place + F.linear(F.linear(x, low.down), low.up), place))
            else:
                place.index_add_(0, chosen, F.linear(F.linear(x.index_select(0, chosen), low.down), low.up))
    return out


def turned(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary embedding: `heads` [rows, heads, head_dim] by the angles whose `cosines` and `sines` are [rows, half]."""
    half = cosines.shape[-1]
    first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
    cosines, sines = cosines[:, None], sines[:, None]
    both = torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1).to(heads.dtype)
    return both if 2 * half == heads.shape[-1] else torch.cat((both, heads[..., 2 * half :]), -1)


def angles(shape: Shape, positions: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines, float32 [positions, half]; None for a model without rotary embedding."""
    if shape.rope is None:
        return None
    frequencies = torch.tensor(shape.rope.inverse_frequencies, dtype=torch.float32)
    angle = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    factor = shape.rope.attention_factor
    return (angle.cos() * factor).to(device), (angle.sin() * factor).to(device)


def queries_keys_values(
    shape: Shape, layer: Layer, x: Tensor, cosines: Tensor | None, sines: Tensor | None, added: Added = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """What comes before attention: queries [rows, heads, head_dim], keys and values [rows, kv_heads, head_dim]."""
    qkv = with_adapters(normed(x, layer.attention_norm, shape.norm, shape.norm_eps), layer.qkv, "qkv", added)
    heads = qkv.view(-1, shape.heads + 2 * shape.kv_heads, shape.head_dim)
    queries, keys, values = torch.split(heads, [shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    if layer.query_norm is not None and layer.key_norm is not None:
        queries = normed(queries, layer.query_norm, "rms", shape.norm_eps)
        keys = normed(keys, layer.key_norm, "rms", shape.norm_eps)
    if cosines is not None and sines is not None:
        queries, keys = turned(queries, cosines, sines), turned(keys, cosines, sines)
    return queries, keys, values


def after_attention(shape: Shape, mix: Mix, layer: Layer, x: Tensor, mixed: Tensor, added: Added = ()) -> Tensor:
    """What comes after attention, whose `mixed` values are [rows, heads × head_dim]. `mix` is how experts are mixed."""
    x = x + with_adapters(mixed, layer.out, "out", added)
    given = normed(x, layer.mlp_norm, shape.norm, shape.norm_eps)
    if layer.up.weight.shape[0]:
        inner = between(shape, with_adapters(given, layer.up, "up", added))
        x = x + with_adapters(inner, layer.down, "down", added)
    if shape.experts is not None and layer.mixture is not None:
        x = x + mix(shape.experts, layer.mixture, given, partial(between, shape)).to(x.dtype)
    return x


def between(shape: Shape, inner: Tensor) -> Tensor:
    """From what an up projection gives to what goes into the down projection."""
    if not shape.gated:
        return activated(inner, shape.activation)
    gate, value = inner.chunk(2, dim=-1)
    return activated(gate, shape.activation) * value


def with_chosen_rows(
    work: Callable[..., Results], lows: Sequence[Sequence[LowRank]], given: int
) -> Callable[..., Results]:
    """`work` of so many tensors, with adapters whose parts in the layer are `lows`: behind these tensors come the rows
    that have each adapter.
    """
    return lambda *rows: work(*rows[:given], list(zip(rows[given:], lows, strict=True)))


def activated(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(x)
    if activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


Window = int | None
Attention = Callable[..., Tensor]
"""As `torch.nn.functional.scaled_dot_product_attention`, of which it takes `attn_mask` and `is_causal`."""


@dataclass(frozen=True)
class PaddedGroup:
    """Segments that go through attention together, each padded to `width` tokens; they read `reach` positions.

    `masks` has one mask for each kind of window in the model: added to the scores, as `mask` gives it for the queries
    of all heads that share keys; of one token each, [segments, 1, 1, reach], it serves all of these. None,
    which has faster kernels, stands for plain causal order from position 0 on if the group is `causal`, else for all
    that is read.
    """

    width: int
    reach: int
    pages: Tensor | slice  # that hold these positions: [segments, columns], or as many for each, side by side
    rows: Tensor | slice | None  # [segments × width] indices into the step's rows; None: all of them, in order
    masks: dict[Window, Tensor | None]
    causal: bool = False


@dataclass(frozen=True)
class SharedPrefixes:
    """What rows of one token each, which are tiles of one row, read together before each goes on by itself: a
    `prefix_plan.PrefixPlan` on the device, int64. Windows look at none of it.
    """

    items: Tensor  # [fields, items]; those of no rows fill up
    members: Tensor  # [tiles]
    begins: Tensor  # [tiles]
    slots: Tensor  # [tiles]
    room: int  # slots of a tile, at most


@dataclass(frozen=True)
class Tiles:
    """Rows as a kernel for pages takes them, in tiles of one segment each: it reads what `StepBatch.sees` says, and
    nothing is padded.
    """

    table: Tensor  # [segments, columns] numbers of pages
    rows: (
        tuple[Tensor, Tensor, Tensor] | None
    )  # [tiles]: first row, how many, segment; None: tile i is row i, segment i
    most: int  # rows of a tile
    reach: int  # positions that a row sees, at most
    shared: SharedPrefixes | None = None


@dataclass(frozen=True)
class StepBatch:
    """The rows of one step as the device has them. Tensors of integers are int64. Attention is over `groups`, or over
    `tiles` in kernels of our own.
    """

    tokens: Tensor  # [rows]
    positions: Tensor  # [rows]
    places: Tensor  # [rows] in the cache: page × PAGE + position in it
    groups: tuple[PaddedGroup, ...] = ()
    tiles: tuple[Tiles, ...] = ()
    sees: Tensor | None = None  # [rows] of `tiles`: how many positions of its segment each attends to
    adapted: tuple[AdaptedRows, ...] = ()
    back: Tensor | None = None  # [rows] where a row is in what the groups give, one after another; None: in order
    vectors: tuple[Tensor, Tensor] | None = None  # rows that have an embedding of their own, and those [n, hidden]
    tile: int | None = None  # products are always of so many rows, which divides their number; None: of all


def mask(positions: Tensor, sees: Tensor, reach: int, window: Window, dtype: torch.dtype, sharing: int = 1) -> Tensor:
    """Added to the scores of queries at `positions` [segments, width] that see as many positions as `sees` [segments,
    width] says: 0 or -inf, [segments, 1, width, reach]; of `sharing` heads' queries one head's after another's, so many
    times that width.
    """
    keys = torch.arange(reach, device=positions.device)
    hidden = keys >= sees[..., None]
    if window is not None:
        hidden |= keys <= positions[..., None] - window
    zeros = torch.zeros((), device=positions.device, dtype=dtype)
    return torch.where(hidden, -torch.inf, zeros).repeat(1, sharing, 1)[:, None]


def in_tiles(tile: int | None, work: Callable[..., Results], *rows: Tensor | None) -> Results:
    """What `work` makes of tensors [rows, …], done for `tile` rows at a time; with None for all at once."""
    if tile is None:
        return work(*rows)
    found = [work(*parts) for parts in zip(*(_cut(given, tile) for given in rows), strict=False)]
    if isinstance(found[0], tuple):
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))
    return torch.cat(found)


def _cut(given: Tensor | None, tile: int) -> Iterable[Tensor | None]:
    return itertools.repeat(None) if given is None else torch.split(given, tile)


class PlainLayers:
    """All layers in torch operations, on any device. `compile` merges what lies between the products."""

    def __init__(
        self,
        shape: Shape,
        mix: Mix,
        cosines: Tensor | None,
        sines: Tensor | None,
        attention: Attention = F.scaled_dot_product_attention,
        compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
    ) -> None:
        """`compiled` is what makes the parts of a layer quicker, such as `torch.compile`."""
        self.shape, self._mix, self._cosines, self._sines = shape, mix, cosines, sines
        self.attention = attention
        self._asked: Callable[..., tuple[Tensor, Tensor, Tensor]] = compiled(partial(queries_keys_values, shape))
        self._further: Callable[..., Tensor] = compiled(partial(after_attention, shape, mix))

    def hidden(self, weights: Weights, x: Tensor, batch: StepBatch, cache: PageCache) -> Tensor:
        """What the last layer gives, [rows, hidden], of what goes into the first, with the batch's keys and values in
        the cache.
        """
        cosines, sines = self._turns(batch.positions)
        chosen, windows = [one.chosen for one in batch.adapted], self.shape.layer_windows
        for number, layer in enumerate(weights.layers):
            before: Callable[..., tuple[Tensor, ...]] = partial(self._asked, layer)
            after: Callable[..., Tensor] = partial(self._further, layer)
            if batch.adapted:  # not compiled: what they add has as many forms as there are adapters
                lows = [one.adapter.layers[number] for one in batch.adapted]
                before = with_chosen_rows(partial(queries_keys_values, self.shape, layer), lows, 3)
                after = with_chosen_rows(partial(after_attention, self.shape, self._mix, layer), lows, 2)
            queries, keys, values = in_tiles(batch.tile, before, x, cosines, sines, *chosen)
            cache.write(number, batch.places, keys, values)
            mixed = attend(batch, queries, cache, number, windows[number], self.attention)
            x = in_tiles(batch.tile, after, x, mixed, *chosen)
        return x

    def try_once(self, weights: Weights, rows: int) -> None:
        """Pass some rows through all layers, but for their attention."""
        positions = torch.zeros(rows, dtype=torch.int64, device=weights.embedding.device)
        cosines, sines = self._turns(positions)
        x = weights.embedding[positions]
        for layer in weights.layers:
            queries, _, _ = self._asked(layer, x, cosines, sines)
            x = self._further(layer, x, queries.flatten(1))

    def _turns(self, positions: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if self._cosines is None or self._sines is None:
            return None, None
        return self._cosines[positions], self._sines[positions]


def attend(
    batch: StepBatch,
    queries: Tensor,
    cache: PageCache,
    layer: int,
    window: Window,
    attention: Attention = F.scaled_dot_product_attention,
) -> Tensor:
    """Mixed values [rows, heads × head_dim] for `queries` [rows, heads, head_dim]."""
    found = [of_group(group, queries, cache, layer, window, attention) for group in batch.groups]
    mixed = found[0] if len(found) == 1 else torch.cat(found)
    return mixed if batch.back is None else mixed.index_select(0, batch.back)


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """Attention in products and a softmax of whole tensors: where a head has keys of its own, the CPU's faster kernel
    rounds a lone query by where it stands among the others, if there are two threads.

    `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)` chooses it too: but that chooses for the whole process, and one
    stage that leaves it would give another one the faster kernel in the middle of a step.
    """
    mixed: Tensor = torch.ops.aten._scaled_dot_product_attention_math(query, key, value, attn_mask, 0.0, is_causal)[0]
    return mixed


def of_group(
    group: PaddedGroup, queries: Tensor, cache: PageCache, layer: int, window: Window, attention: Attention
) -> Tensor:
    """The same for one group: [segments × width, heads × head_dim]. The queries of heads that share keys are one long
    run, so that keys are read once for all of them, unless their order is plainly causal.
    """
    asking = queries
    if group.rows is not None:
        asking = queries[group.rows] if isinstance(group.rows, slice) else queries.index_select(0, group.rows)
    asking = asking.view(-1, group.width, *asking.shape[1:])
    segments, width, heads, dim = asking.shape
    keys, values = cache.read(layer, group.pages, segments, group.reach)
    shared, added = heads // keys.shape[2], group.masks[window]
    if width == 1:
        asking = asking.reshape(segments, keys.shape[2], -1, dim)
        mixed = attention(asking, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=added)
        return mixed.flatten(1, 2).reshape(-1, heads * dim)
    asking, causal = asking.transpose(1, 2), group.causal and added is None
    if not causal:
        asking = asking.reshape(segments, keys.shape[2], -1, dim)
    elif shared > 1:
        keys, values = (held.repeat_interleave(shared, dim=2) for held in (keys, values))
    mixed = attention(asking, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=added, is_causal=causal)
    # Not `view`: the kernels of a device lay their results out each in its own way.
    return mixed.reshape(segments, heads, width, dim).transpose(1, 2).reshape(-1, heads * dim)
