"""The layers of a decoder on a CUDA device in kernels of our own, but for the products: nine to eleven launches each.

Plain torch launches four times as many, and pads attention to the longest row of a group.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.models.out_of_memory import first_line, is_out_of_memory, says_lost
from gpuinfer.text.decoder.attention_plan import PrefixPlanner
from gpuinfer.text.decoder.torch_batch import Uploads, batch_of, tiled_batch_of
from gpuinfer.text.decoder.torch_cache import PageCache
from gpuinfer.text.decoder.torch_layers import (
    Mix,
    PlainLayers,
    SharedPrefixes,
    StepBatch,
    Tiles,
    in_tiles,
    with_adapters,
)
from gpuinfer.text.transformer import PAGE, Layer, Linear, Norm, Product, Shape, Step, Weights

logger = logging.getLogger("gpuinfer")

LEAST_SPLIT, MOST_PORTIONS = 512, 32  # positions of a portion at least; portions of a row at most
FEW_PROGRAMS = 512  # with fewer tiles than that a device has room for several programs a tile
RUN_QUERIES = 64  # rows × heads that share keys, in one program of a prompt
SHARED_QUERIES, SHARED_BYTES = 128, 32 << 10  # the same of rows that share a prefix; of these queries, at most
LEAST_SAVED = 16 << 20  # bytes that a layer need not read, for a prefix to be shared: what takes longer than a launch
LEEWAY_HALF, LEEWAY_SINGLE = 0.05, 1e-3  # of the largest value: what rounding explains and no fault of a kernel's does


def has_triton() -> bool:
    """Whether Triton can be imported, without importing it."""
    found = importlib.util.find_spec("triton")
    return found is not None and found.origin is not None  # a folder of that name is something else


Own = TypeVar("Own")


def tried_out(make: Callable[[], Own], kernels: str, instead: str) -> Own | None:
    """The result of `make`: kernels of our own, which it compares with torch's. None, with a warning, where they cannot
    be compiled or answer differently. Raises errors of memory, and of a lost device.
    """
    try:
        return make()
    except Exception as error:
        if is_out_of_memory(error) or says_lost(error):
            raise
        logger.warning(
            "%s do not work here (%s: %s), so that torch's %s.",
            kernels,
            type(error).__name__,
            first_line(error),
            instead,
        )
    return None


class TritonLayers:
    """The same as `torch_layers.PlainLayers`, over `StepBatch.tiles`."""

    def __init__(self, shape: Shape, mix: Mix, cosines: Tensor | None, sines: Tensor | None, length: int) -> None:
        from gpuinfer.text.decoder import triton_kernels

        self.shape, self.length, self._mix, self._kernels = shape, length, mix, triton_kernels
        self._cosines, self._sines = cosines, sines
        self._width = power_of_two(shape.head_dim)
        self._half = 0 if cosines is None else cosines.shape[1]
        self.split = max(LEAST_SPLIT, power_of_two(-(-length // MOST_PORTIONS)))
        self._windows = tuple(window or 0 for window in shape.layer_windows)

    def hidden(self, weights: Weights, x: Tensor, batch: StepBatch, cache: PageCache) -> Tensor:
        """What the last layer gives, [rows, hidden], of what goes into the first, with the batch's keys and values in
        the cache.
        """
        if not weights.layers:
            return x
        # Triton launches on the current device, wherever its arguments are.
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            return self._hidden(weights, x, batch, cache)

    def _hidden(self, weights: Weights, x: Tensor, batch: StepBatch, cache: PageCache) -> Tensor:
        given = self.norm(x, weights.layers[0].attention_norm)
        for number, layer in enumerate(weights.layers):
            product = partial(self._product, batch, number)
            queries = self.place(layer, product(given, layer.qkv, "qkv"), batch, cache, number)
            mixed = self.attend(queries, batch, cache, number)
            x, given = self.sum_norm(x, product(mixed, layer.out, "out"), layer.mlp_norm)
            x, added = self._further(layer, x, given, batch, product)
            if number + 1 < len(weights.layers):
                x, given = self.sum_norm(x, added, weights.layers[number + 1].attention_norm)
        return x + added

    def _further(
        self, layer: Layer, x: Tensor, given: Tensor, batch: StepBatch, product: Callable[..., Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Two tensors whose sum is the layer's output."""
        mixed = self.shape.experts is not None and layer.mixture is not None
        if layer.up.weight.shape[0]:
            inner = self.activate(product(given, layer.up, "up"))
            added = product(inner, layer.down, "down")
            if not mixed:
                return x, added
            x = x + added
        found = in_tiles(batch.tile, lambda rows: self._mixed(layer, rows), given)
        return x, found.to(x.dtype)

    def _mixed(self, layer: Layer, given: Tensor) -> Tensor:
        assert self.shape.experts is not None
        assert layer.mixture is not None
        return self._mix(self.shape.experts, layer.mixture, given, self.activate)

    def _product(self, batch: StepBatch, number: int, x: Tensor, weights: Linear, product: Product) -> Tensor:
        """A product of a layer, and what adapters add to it."""
        lows = [one.adapter.layers[number] for one in batch.adapted]

        def work(rows: Tensor, *chosen: Tensor) -> Tensor:
            return with_adapters(rows, weights, product, list(zip(chosen, lows, strict=True)))

        return in_tiles(batch.tile, work, x, *(one.chosen for one in batch.adapted))

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """RMSNorm or LayerNorm of rows [rows, hidden]."""
        return self._normed(x, None, norm)[1]

    def sum_norm(self, x: Tensor, added: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """`x + added`, and its norm."""
        return self._normed(x, added, norm)

    def _normed(self, x: Tensor, added: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        rows, size = x.shape
        given = torch.empty_like(x)
        summed = x if added is None else torch.empty_like(x)
        block = power_of_two(size)
        self._launch(
            self._kernels.norm,
            (rows,),
            x, x if added is None else added, summed, given, norm.scale,
            norm.scale if norm.shift is None else norm.shift, self.shape.norm_eps,
            HIDDEN=size, BLOCK=block, ADDED=added is not None, LAYER=self.shape.norm == "layer",
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
        return summed, given

    def place(self, layer: Layer, qkv: Tensor, batch: StepBatch, cache: PageCache, number: int) -> Tensor:
        """Queries [rows, heads, head_dim] from what a layer's first product gives; its keys and values go into the
        cache.
        """
        shape, rows = self.shape, len(qkv)
        queries = qkv.new_empty((rows, shape.heads, shape.head_dim))
        normed = layer.query_norm is not None and layer.key_norm is not None
        nothing = batch.positions
        self._launch(
            self._kernels.place,
            (rows, shape.heads + 2 * shape.kv_heads),
            qkv, queries, cache.keys[number], cache.values[number], batch.places, batch.positions,
            nothing if self._cosines is None else self._cosines, nothing if self._sines is None else self._sines,
            layer.query_norm.scale if layer.query_norm is not None else nothing,
            layer.key_norm.scale if layer.key_norm is not None else nothing,
            shape.norm_eps,
            HEADS=shape.heads, KV_HEADS=shape.kv_heads, DIM=shape.head_dim, WIDTH=self._width, HALF=self._half,
            NORMED=normed, num_warps=1,
        )  # fmt: skip
        return queries

    def attend(self, queries: Tensor, batch: StepBatch, cache: PageCache, number: int) -> Tensor:
        """Mixed values [rows, heads × head_dim] for `queries` [rows, heads, head_dim]."""
        mixed = torch.empty_like(queries)
        for tiles in batch.tiles:
            self._attend(tiles, queries, batch, cache, number, mixed)
        return mixed.flatten(1)

    def _attend(
        self, tiles: Tiles, queries: Tensor, batch: StepBatch, cache: PageCache, number: int, mixed: Tensor
    ) -> None:
        shape, window = self.shape, self._windows[number]
        count = len(tiles.table) if tiles.rows is None else len(tiles.rows[0])
        firsts, counts, segments = (batch.positions,) * 3 if tiles.rows is None else tiles.rows
        portions = -(-tiles.reach // self.split)
        apart = tiles.most == 1 and portions > 1 and count * shape.kv_heads < FEW_PROGRAMS
        sharing, half = shape.heads // shape.kv_heads, queries.dtype != torch.float32
        numbers = power_of_two(max(16, tiles.most * sharing))
        sizes: dict[str, Any] = {
            "HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "DIM": shape.head_dim, "WIDTH": self._width,
            "KEYS": 2 * PAGE if half and self._width <= 128 else PAGE, "PAGE": PAGE,
            "ALONE": tiles.rows is None, "PRECISION": "tf32" if half else "ieee",
        }  # fmt: skip
        scale, columns = math.log2(math.e) / math.sqrt(shape.head_dim), tiles.table.shape[1]
        held = cache.keys[number], cache.values[number]
        following = tiles.shared is not None and not window
        shared, begins, slots = (mixed,) * 3, batch.positions, batch.positions
        if following:
            assert tiles.shared is not None
            shared = self._partial(queries, tiles.shared.room, count)
            begins, slots = tiles.shared.begins, tiles.shared.slots
            together = power_of_two(shared_rows(shape, queries.dtype) * sharing)
            self._launch(
                self._kernels.attend_shared,
                (tiles.shared.items.shape[1], shape.kv_heads),
                queries, *held, *shared, tiles.table, firsts, segments, tiles.shared.items, tiles.shared.members,
                scale, columns, count,
                **sizes, QUERIES=together, num_warps=8 if together * self._width >= 8192 else 4,
            )  # fmt: skip
        found = self._partial(queries, portions, count) if apart else (mixed,) * 3
        self._launch(
            self._kernels.attend,
            (count, shape.kv_heads, portions if apart else 1),
            queries, *held, *found, *shared, begins, slots,
            tiles.table, firsts, counts, segments, batch.positions, batch.sees, scale, window, columns,
            **sizes, QUERIES=numbers, SPLIT=self.split, PORTIONS=apart, FOLLOWING=following,
            num_warps=8 if numbers * self._width >= 8192 else 4,
        )  # fmt: skip
        if apart:
            self._launch(
                self._kernels.join,
                (count, shape.heads),
                *found, *shared, begins, slots, mixed, firsts, batch.positions, batch.sees, window,
                HEADS=shape.heads, DIM=shape.head_dim, WIDTH=self._width, SPLIT=self.split,
                ALONE=tiles.rows is None, FOLLOWING=following, num_warps=1,
            )  # fmt: skip

    def _partial(self, queries: Tensor, slots: int, tiles: int) -> tuple[Tensor, Tensor, Tensor]:
        """Room for results over some positions: mixes [slots, tiles, heads, head_dim], largest scores and sums of
        weights [slots, tiles, heads].
        """
        form = (slots, tiles, *queries.shape[1:])
        mixes, most, sums = (queries.new_empty(size, dtype=torch.float32) for size in (form, form[:-1], form[:-1]))
        return mixes, most, sums

    def activate(self, inner: Tensor) -> Tensor:
        """From what an up projection gives, [..., size], to what goes into the down projection."""
        inner = inner.contiguous()  # products of groups of rows leave room behind each row
        rows = math.prod(inner.shape[:-1])
        size = inner.shape[-1] // 2 if self.shape.gated else inner.shape[-1]
        found = inner.new_empty((*inner.shape[:-1], size))
        block = min(1024, power_of_two(size))
        self._launch(
            self._kernels.activate,
            (rows, -(-size // block)),
            inner, found,
            SIZE=size, BLOCK=block, GATED=self.shape.gated, KIND=self.shape.activation, num_warps=4,
        )  # fmt: skip
        return found

    def _launch(self, kernel: Any, grid: tuple[int, ...], *given: Any, **sizes: Any) -> None:
        """Products and sums are not contracted, so that the same sums are the same bits in each kernel."""
        if grid[0]:
            kernel[grid](*given, **sizes, enable_fp_fusion=False)


def compare(own: TritonLayers, plain: PlainLayers, weights: Weights, device: torch.device, dtype: torch.dtype) -> None:
    """Have both compute the first layer for a run and for a token behind it. Raises `RuntimeError` when they do not
    answer alike, and what the compiler raises.
    """
    shape = replace(own.shape, layers=1)
    first = replace(weights, layers=weights.layers[:1])
    caches = [PageCache(shape, 2, 2 * PAGE, device, dtype) for _ in range(2)]
    uploads = Uploads(device)
    count = min(PAGE + 3, own.length)
    tokens = np.arange(count, dtype=np.int32) % len(weights.embedding)  # a later stage has one for all
    pages, nothing = np.array([[1, 0]], np.int32), np.zeros(0, np.int32)
    for start, end in ((0, count - 1), (count - 1, count)) if count > 1 else ((0, 1),):
        starts, lengths = np.array([start], np.int32), np.array([end - start], np.int32)
        step = Step(tokens[start:end], pages, starts, lengths, nothing)
        ours = tiled_batch_of(step, caches[0], uploads, tile_rows(shape))
        theirs = batch_of(step, caches[1], {own.shape.layer_windows[0]}, uploads)
        given = weights.embedding[ours.tokens]
        require_alike(own.hidden(first, given, ours, caches[0]), plain.hidden(first, given, theirs, caches[1]))
    if None in own.shape.layer_windows and own.length > PAGE and shared_rows(own.shape, dtype) > 1:
        compare_shared(own, device, dtype)


def compare_shared(own: TritonLayers, device: torch.device, dtype: torch.dtype) -> None:
    """Have rows attend to a page that they share and to one of their own, by themselves and together. Raises as
    `compare` does.
    """
    number = own.shape.layer_windows.index(None)
    cache = PageCache(replace(own.shape, layers=number + 1), 4, 2 * PAGE, device, dtype)
    drawn = torch.Generator(device).manual_seed(0)
    for held in (cache.keys, cache.values):
        held[number].normal_(generator=drawn)
    queries = torch.empty((3, own.shape.heads, own.shape.head_dim), device=device, dtype=dtype).normal_(generator=drawn)
    pages, sees = np.array([[2, 0], [2, 1], [3, 0]], np.int32), np.array([PAGE + 1, 2 * PAGE, 5])
    plan = PrefixPlanner(shared_rows(own.shape, dtype), own.split, worth=1).plan(pages, (sees - 1) // PAGE, 1, 1)
    arrays: tuple[NDArray[Any], ...] = pages, sees - 1, sees, plan.items, plan.members, plan.begins, plan.slots
    flat = Uploads(device).sent([array.ravel() for array in arrays])
    table, positions, seen, items, members, begins, slots = (
        one.view(given.shape) for one, given in zip(flat, arrays, strict=True)
    )
    shared = SharedPrefixes(items, members, begins, slots, room=1)
    for reach in (2 * PAGE, 2 * own.split):  # by one program a row, and in portions
        tiles = Tiles(table, None, 1, reach)
        alone, together = (
            StepBatch(positions, positions, positions, tiles=(replace(tiles, shared=one),), sees=seen)
            for one in (None, shared)
        )
        with torch.cuda.device_of(queries):  # type: ignore[no-untyped-call]
            require_alike(*(own.attend(queries, batch, cache, number) for batch in (together, alone)))


def require_alike(found: Tensor, wanted: Tensor) -> None:
    """Raises `RuntimeError` where they differ by more than rounding explains."""
    leeway = LEEWAY_HALF if wanted.dtype != torch.float32 else LEEWAY_SINGLE
    found, wanted = found.float(), wanted.float()
    difference, size = (found - wanted).abs().max().item(), wanted.abs().max().item()
    if not difference <= leeway * max(size, 1e-3):
        raise RuntimeError(f"answers up to {size:.3g} differ by {difference:.3g}")


def power_of_two(size: int) -> int:
    """The next one, 16 at least: what a block of Triton's may be."""
    return max(16, 1 << (size - 1).bit_length())


def shared_rows(shape: Shape, dtype: torch.dtype) -> int:
    """Rows that one program takes over a prefix that they share. 1: it would read for each what each could itself."""
    queries = min(SHARED_QUERIES, SHARED_BYTES // (power_of_two(shape.head_dim) * dtype.itemsize))
    return max(1, queries // (shape.heads // shape.kv_heads))


def tile_rows(shape: Shape) -> int:
    """Rows of a segment that one program takes, of a prompt: a power of two."""
    return 1 << (max(1, RUN_QUERIES // (shape.heads // shape.kv_heads)).bit_length() - 1)
