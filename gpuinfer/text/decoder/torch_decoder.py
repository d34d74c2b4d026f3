"""A decoder in plain torch, for any device and number format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gpuinfer.models.cuda_graphs import event_behind, keep_for_steps, release_cached_memory, wait_for_device
from gpuinfer.models.model_options import CompileMode, torch_compile_mode
from gpuinfer.models.pinned_memory import queued
from gpuinfer.text.decoder import torch_layers, triton_layers
from gpuinfer.text.decoder.attention_plan import Integers, PrefixPlanner, adapters_of, sees_of, segments_of
from gpuinfer.text.decoder.torch_batch import Uploads, batch_of, tiled_batch_of, tiles, token_columns
from gpuinfer.text.decoder.torch_cache import PageCache, table_of
from gpuinfer.text.decoder.torch_layers import (
    AdaptedRows,
    Mix,
    PaddedGroup,
    PlainLayers,
    StepBatch,
    Tiles,
    plain_attention,
    sorted_mix,
    whole_mix,
)
from gpuinfer.text.decoder.torch_static import GraphForm, StaticBatches, compile_on_call, left_uncompiled, try_compiled
from gpuinfer.text.decoder.triton_layers import TritonLayers
from gpuinfer.text.transformer import PAGE, Adapter, LowRank, Shape, Step, Weights

Packed = TypeVar("Packed", Weights, Adapter)

CPU_TILE, CUDA_TILE = 16, 32  # rows that `deterministic` always computes at once, padded


class TorchDecoder:
    """`step.Decoder` for any device and float32, bfloat16 or float16.

    With `graphs` a step of one token a row, of a diffusion model's short runs, or with kernels of our own of few tokens
    of prompts, is padded to one of few shapes, each of which becomes a CUDA graph on a CUDA device. With
    `deterministic` every token goes through in tiles of one fixed shape that its own position chooses, so that its
    logits are the same bits whatever shares the step and however its prompt is cut: a matrix product may add up in
    another order for another number of rows, but not for another row of the same; nor does it show in which pages a row
    lies. `compile` merges what lies between the matrix products; raises `UsageError` when torch cannot.

    What lies between the products is done by kernels of our own (`triton_layers`) on a CUDA device with Triton, unless
    it is to be compiled: `kernels` says so for tests. Kernels that do not answer as torch does are not used. With
    `graphs` they read the keys and values of a prefix that rows share once, where `share` is true and the run is not
    `deterministic`.

    A step in which rows have adapters is launched kernel by kernel, graphs or not, and what an adapter adds is computed
    for its rows together; with `deterministic`, for all rows of each tile.

    Gradients are off, but not by `torch.inference_mode`: the sampler may write over the logits.
    """

    def __init__(
        self,
        shape: Shape,
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype,
        *,
        slots: int,
        pages: int,
        length: int,
        deterministic: bool = False,
        bits: int | None = None,
        compile: CompileMode = False,
        graphs: bool = True,
        kernels: bool | None = None,
        share: bool = True,
    ) -> None:
        self.shape, self.length, self.device, self.dtype, self._bits = shape, length, device, dtype, bits
        self.computes_in = str(dtype).removeprefix("torch.")
        self.deterministic, self._graphs, self._share = deterministic, graphs, share
        self.reads_drawn = device.type == "cuda" and not deterministic
        if device.type == "cuda":  # cuDNN plans for each exact shape, 0.4 s each, and ragged prompts bring new ones
            torch.backends.cuda.enable_cudnn_sdp(False)
        self._adapters: dict[int, Adapter] = {}
        self._uploads = Uploads(device)
        with torch.no_grad():
            self._weights = torch_layers.on_device(weights, device, dtype, bits)
            self._layers = self._chosen_layers(compile, kernels)
        self.resize(slots, pages)

    def _chosen_layers(self, wanted: CompileMode, kernels: bool | None) -> PlainLayers | TritonLayers:
        shape, device = self.shape, self.device
        mix: Mix = whole_mix if self.deterministic else sorted_mix
        mode = torch_compile_mode(wanted, device.type, graphs=self._graphs, deterministic=self.deterministic)
        mix = left_uncompiled(mix) if mode else mix
        cosines, sines = torch_layers.angles(shape, self.length, device) or (None, None)
        attention = plain_attention if self.deterministic and device.type == "cpu" else scaled_dot_product_attention
        compiled = partial(compile_on_call, mode=mode) if mode else lambda function: function
        plain = PlainLayers(shape, mix, cosines, sines, attention, compiled)
        if mode:
            try_compiled(partial(plain.try_once, self._weights, rows=2))
        if kernels is None:
            kernels = device.type == "cuda" and not mode and triton_layers.has_triton()
        if not kernels:
            return plain

        def own_layers() -> TritonLayers:
            own = TritonLayers(shape, mix, cosines, sines, self.length)
            triton_layers.compare(own, plain, self._weights, device, self.dtype)
            return own

        return (
            triton_layers.tried_out(own_layers, "the kernels for this device", "compute, which takes longer") or plain
        )

    def resize(self, slots: int, pages: int) -> None:
        """Another number of rows in a step, and of pages, all of them empty. Raises `torch.OutOfMemoryError` when they
        do not fit.
        """
        self._drop()
        self.slots, self.pages = slots, pages
        self._drawn = torch.zeros(slots, dtype=torch.int64, device=self.device) if self.reads_drawn else None
        tile = CUDA_TILE if self.device.type == "cuda" else CPU_TILE
        with torch.no_grad():
            self._cache = PageCache(self.shape, pages, self.length, self.device, self.dtype)
            self._static = StaticBatches(
                self._cache,
                self._uploads,
                set(self.shape.layer_windows),
                self.shape,
                tile if self.deterministic else slots,
                self._hidden,
                self._logits,
                self._graphs,
                self.deterministic,
                self._tile_rows,
                self._prefixes(),
            )

    @torch.no_grad()
    def forward(self, step: Step) -> Tensor:
        """See `step.Decoder.forward`."""
        self._begin(step, in_parts=self.deterministic and step.sees is None and step.vectors is None)  # see `_in_tiles`
        if self.deterministic:
            return self._in_tiles(step)
        if step.drawn is not None and self._drawn is not None:
            torch.clamp(step.drawn, min=0, out=self._drawn[: len(step.drawn)])
        if self._graphs and step.vectors is None and (step.adapters is None or not step.adapters.any()):
            if len(step.tokens) == len(step.lengths):
                return self._picked(self._static.decode(step), step.wanted)
            if (form := self._static.form_of_runs(step)) is not None:
                found, where = self._static.runs(step, form)
                return self._logits(self._picked(found, where[step.wanted]))
            if (of_prompts := self._static.form_of_prompts(step)) is not None:
                found, wanted = self._static.prompts(step, of_prompts)
                return self._logits(found.index_select(0, wanted))
        found = self._hidden(self._batch(step))
        return self._logits(self._picked(found, step.wanted))

    @torch.no_grad()
    def hidden(self, step: Step) -> Tensor:
        """What the last layer gives of each token, [tokens, hidden] in the number format and on the device of this
        decoder, for another one that has the layers after it. Launched kernel by kernel.
        """
        self._begin(step, in_parts=False)
        if not self.deterministic:
            return self._hidden(self._batch(step))
        found, at = self._tiles_together(step, self._cut(step))
        return found.index_select(0, torch.from_numpy(at).to(self.device))

    @torch.no_grad()
    def states(self, step: Step) -> NDArray[np.float32]:
        """What the last norm gives of each token, [tokens, hidden]."""
        found = torch_layers.normed(self.hidden(step), self._weights.norm, self.shape.norm, self.shape.norm_eps)
        return np.asarray(found.float().cpu().numpy(), np.float32)

    @torch.no_grad()
    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `step.Decoder.copy_pages`."""
        self._cache.copy_pages(sources, targets)

    @property
    def pages_go_back(self) -> bool:
        """See `step.Decoder`."""
        return bool(self.device.type == "cpu")

    def give_back(self, pages: Sequence[int]) -> None:
        """See `step.Decoder.give_back`. A device's allocator has no pages."""
        if self.pages_go_back:
            self._cache.give_back(pages)

    def drop_graphs(self) -> None:
        """See `step.Decoder.drop_graphs`."""
        if self.device.type == "cuda":
            wait_for_device(self.device)  # a graph at work must not be freed
        self._static.drop_graphs()

    def embedding(self) -> Tensor:
        """See `step.Decoder.embedding`."""
        return self._weights.embedding

    def weight_tensors(self) -> Sequence[Tensor]:
        """See `step.Decoder.weight_tensors`."""
        return list(torch_layers.tensors_of(self._weights))

    @torch.no_grad()
    def pack(self, weights: Weights) -> Weights:
        """See `step.Decoder.pack`."""
        return self._made_here(torch_layers.on_device(weights, self.device, self.dtype, self._bits))

    @torch.no_grad()
    def swap(self, packed: object) -> None:
        """See `step.Decoder.swap`. Into the same memory: captured graphs read the weights from there."""
        assert isinstance(packed, Weights)
        for own, other in zip(torch_layers.tensors_of(self._weights), torch_layers.tensors_of(packed), strict=True):
            own.copy_(other)
        keep_for_steps(torch_layers.tensors_of(packed))

    @torch.no_grad()
    def pack_adapter(self, adapter: Adapter) -> Adapter:
        """See `step.Decoder.pack_adapter`."""

        def here(low: LowRank) -> LowRank:
            return replace(low, down=low.down.to(self.device, self.dtype), up=low.up.to(self.device, self.dtype))

        return self._made_here(Adapter(tuple(tuple(map(here, layer)) for layer in adapter.layers)))

    def load(self, number: int, packed: object) -> None:
        """See `step.Decoder.load`."""
        assert isinstance(packed, Adapter)
        self._adapters[number] = packed

    def unload(self, number: int) -> None:
        """See `step.Decoder.unload`."""
        adapter = self._adapters.pop(number)
        keep_for_steps(tensor for layer in adapter.layers for low in layer for tensor in (low.down, low.up))

    @torch.no_grad()
    def empty(self) -> None:
        """Forget what all pages hold; all of the cache is resident from then on."""
        self._cache.empty()

    def _made_here(self, packed: Packed) -> Packed:
        """Wait until the device has made `packed`: steps run on another thread's stream."""
        if self.device.type == "cuda":
            event_behind(self.device).synchronize()
        return packed

    @property
    def most_prompt_tokens(self) -> int:
        """Tokens of a step with prompts that becomes a graph, at most; 0: none does."""
        forms = self._static.prompt_tokens
        return forms[-1] - 1 if forms else 0

    def cache_bytes(self) -> int:
        return self._cache.nbytes()

    def held_bytes(self) -> int:
        """Bytes of cache and permanent buffers, beside the weights."""
        return self.cache_bytes() + self._static.nbytes()

    def use(self, threads: int) -> None:
        """See `step.Decoder.use`. With `deterministic` always as many: a product may add up in another order."""
        if self.device.type == "cpu" and not self.deterministic:
            torch.set_num_threads(threads)

    def rest(self) -> None:
        """See `step.Decoder.rest`: torch's threads are not ours."""

    def close(self) -> None:
        self._drop()
        self._weights = None  # type: ignore[assignment]

    def _batch(self, step: Step) -> StepBatch:
        """The step, padded to no fixed shape."""
        if self._tile_rows is None:
            batch = batch_of(step, self._cache, set(self.shape.layer_windows), self._uploads)
        else:
            batch = tiled_batch_of(step, self._cache, self._uploads, self._tile_rows)
        if step.adapters is None:
            return replace(batch, vectors=self._vectors(step))
        # Launched kernel by kernel: a captured graph would compute the adapters of the step that it was captured with.
        adapted = self._adapted(adapters_of(step), lambda own: queued(np.flatnonzero(own), self.device))
        return replace(batch, adapted=adapted, vectors=self._vectors(step))

    @property
    def _tile_rows(self) -> int | None:
        return triton_layers.tile_rows(self.shape) if isinstance(self._layers, TritonLayers) else None

    def _prefixes(self) -> PrefixPlanner | None:
        rows = triton_layers.shared_rows(self.shape, self.dtype)
        if not isinstance(self._layers, TritonLayers) or rows == 1 or not self._share:
            return None
        of_a_position = 2 * self.shape.kv_heads * self.shape.head_dim * self.dtype.itemsize
        few = triton_layers.FEW_PROGRAMS // self.shape.kv_heads
        return PrefixPlanner(rows, self._layers.split, triton_layers.LEAST_SAVED // of_a_position, few)

    def _begin(self, step: Step, in_parts: bool) -> None:
        """Kernels of our own read no page further than a row sees: nothing has to be forgotten for them."""
        if self._tile_rows is None:
            self._cache.begin(step, in_parts)

    def _adapted(self, numbers: NDArray[Any], chosen: Callable[[NDArray[np.bool_]], Tensor]) -> tuple[AdaptedRows, ...]:
        """The adapters that rows of these numbers have; `chosen` makes of which these are what `AdaptedRows` holds."""
        found = (number for number in np.unique(numbers).tolist() if number)
        return tuple(AdaptedRows(self._adapters[number], chosen(numbers == number)) for number in found)

    def _vectors(self, step: Step) -> tuple[Tensor, Tensor] | None:
        if step.vectors is None:
            return None
        values, places = step.vectors.values, queued(step.vectors.places.astype(np.int64), self.device)
        values = values if isinstance(values, Tensor) else queued(values, self.device)
        return places, values.to(self.device, self.dtype)

    def _picked(self, found: Tensor, rows: NDArray[Any]) -> Tensor:
        if np.array_equal(rows, np.arange(len(rows))):
            return found[: len(rows)]
        (numbers,) = self._uploads.sent([rows])
        return found.index_select(0, numbers)

    def _in_tiles(self, step: Step) -> Tensor:
        """Any step, tile after tile; layer after layer where tokens see what comes after them, or have
        embeddings of their own.
        """
        answers = torch.empty((len(step.wanted), self.shape.vocabulary), device=self.device)
        rows, cut = self._static.row_buckets[-1], self._cut(step)
        one_by_one = step.sees is None and step.vectors is None
        if one_by_one:
            tokens, segments, adapters = token_columns(step), segments_of(step), adapters_of(step)
        else:
            together, _ = self._tiles_together(step, cut)
        for number, (members, reach) in enumerate(cut):
            asked_for, where = np.isin(members, step.wanted), np.arange(len(members))
            answered = bool(asked_for.any())
            if one_by_one:
                form = GraphForm(rows, reach, answered)
                table = table_of(step, segments[members], reach // PAGE, self._cache.blank)
                padded = np.zeros(rows, np.int64)  # all rows of a tile go through each adapter
                padded[: len(members)] = adapters[members]
                adapted = self._adapted(padded, lambda own: torch.from_numpy(own).to(self.device))
                found = self._static.compute(form, where, tokens[:, members], table, adapted)
            elif answered:
                found = self._logits(together[number * rows : (number + 1) * rows])
            if answered:
                into = np.searchsorted(step.wanted, members[asked_for])
                answers.index_copy_(0, queued(into, self.device), self._picked(found, where[asked_for]))
        return answers

    def _cut(self, step: Step) -> list[tuple[Integers, int]]:
        return list(tiles(sees_of(step), self._static.row_buckets[-1], self._static.reach_buckets))

    def _tiles_together(self, step: Step, cut: Sequence[tuple[Integers, int]]) -> tuple[Tensor, Integers]:
        """What the last layer gives of all tiles, [tiles × rows, hidden], and where the step's tokens are: products
        tile by tile, and between them keys and values of all.
        """
        rows, segments = self._static.row_buckets[-1], segments_of(step)
        at = np.empty(len(step.tokens), np.int64)
        for number, (members, _) in enumerate(cut):
            at[members] = number * rows + np.arange(len(members))
        padded = np.zeros((6, len(cut) * rows), np.int64)
        padded[2], padded[3], padded[5] = self._cache.spare * PAGE, 1, len(step.lengths)
        padded[:4, at], padded[4, at], padded[5, at] = token_columns(step), adapters_of(step), segments
        blank = np.full((1, self._cache.columns), self._cache.blank)
        pages = np.concatenate(
            (table_of(step, np.arange(len(step.lengths)), self._cache.columns, self._cache.blank), blank)
        )
        *given, table = self._uploads.sent([*padded, pages.ravel()])
        tokens, positions, places, sees, adapters, lines = given
        table = table.view(pages.shape)
        groups, of_kernel = list[PaddedGroup](), tuple[Tiles, ...]()
        if self._tile_rows is None:
            for number, (_, reach) in enumerate(cut):
                tile = slice(number * rows, (number + 1) * rows)
                masks = self._static.masks(positions[tile, None], sees[tile, None], reach)
                groups.append(PaddedGroup(1, reach, table[lines[tile], : reach // PAGE], tile, masks))
        else:
            each = torch.arange(len(tokens), device=self.device), torch.ones_like(tokens), lines
            of_kernel = (Tiles(table, each, 1, int(padded[3].max())),)
        adapted = tuple(
            AdaptedRows(self._adapters[number], adapters == number)
            for number in np.unique(padded[4]).tolist()
            if number
        )
        vectors = self._vectors(step)
        if vectors is not None:
            vectors = torch.from_numpy(at).to(self.device)[vectors[0]], vectors[1]
        batch = StepBatch(
            tokens, positions, places, tuple(groups), of_kernel, sees, adapted, vectors=vectors, tile=rows
        )
        return self._hidden(batch), at

    def _hidden(self, batch: StepBatch) -> Tensor:
        """What the last layer gives, [rows, hidden], with the batch's keys and values in the cache."""
        weights = self._weights
        tokens = batch.tokens if self._drawn is None else looked_up(batch.tokens, self._drawn)
        x = weights.embedding[tokens]
        if batch.vectors is not None:
            x.index_copy_(0, *batch.vectors)
        if weights.positions is not None:
            x = x + weights.positions[batch.positions]
        return self._layers.hidden(weights, x, batch, self._cache)

    def _logits(self, found: Tensor) -> Tensor:
        """Float32 [rows, vocabulary] from [rows, hidden]."""
        last = torch_layers.normed(found, self._weights.norm, self.shape.norm, self.shape.norm_eps)
        return torch_layers.projected(last, self._weights.head).float()

    def _drop(self) -> None:
        """Let go of the cache and of everything that holds on to it."""
        if hasattr(self, "_static"):
            del self._static, self._cache
            if self.device.type == "cuda":
                release_cached_memory()


def looked_up(tokens: Tensor, drawn: Tensor) -> Tensor:
    """int64 [rows]: `drawn[i]` in the place of -1 - i."""
    return torch.where(tokens < 0, drawn.index_select(0, tokens.bitwise_not().clamp_(min=0)), tokens)
