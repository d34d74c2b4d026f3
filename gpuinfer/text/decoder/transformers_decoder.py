"""A decoder whose layers are transformers' own code: all tokens of a step are one row of it, and its attention is ours,
over the pages of our cache.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.models.cuda_graphs import event_behind, release_cached_memory
from gpuinfer.models.pinned_memory import queued
from gpuinfer.text.checkpoint.transformers_trace import (
    DECODER_ATTRIBUTE,
    TracedModel,
    growing_rotary,
    settle_rotary,
)
from gpuinfer.text.decoder.attention_plan import adapters_of, positions_of, sees_of, segments_of
from gpuinfer.text.decoder.layered_cache import LayeredCache, attend_layer
from gpuinfer.text.decoder.torch_batch import Uploads, batch_of, reach_buckets, tiles, token_columns
from gpuinfer.text.decoder.torch_cache import table_of
from gpuinfer.text.decoder.torch_layers import PaddedGroup, StepBatch, mask
from gpuinfer.text.decoder.traced_adapters import TracedAdapter, TracedAdapters
from gpuinfer.text.precision import computes_in
from gpuinfer.text.transformer import PAGE, Adapter, Shape, Step

if TYPE_CHECKING:
    from gpuinfer.text.decoder.cpu_product import Kind
    from gpuinfer.text.decoder.traced_products import PackedModules

logger = logging.getLogger("gpuinfer")
TRYING = -1  # the layer of `_attend` while the model is tried
TRIED_TOKENS = 8
TRIED_WITHIN = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # of the largest logit: rounding, and no more
TILE = 16  # tokens that `deterministic` always computes at once, padded; one where experts share them out


class TransformersDecoder:
    """`step.Decoder` for `model`, transformers' own with our attention in it (`TransformersCheckpoint.model`), whose
    attentions are those of `traced`.

    With `deterministic` tokens go through in tiles of one fixed size, so that a token's logits are the same bits
    whatever shares the step; of a mixture of experts one by one, as how many rows an expert has would change its sums.
    What the model's own code makes of one tile it must make of it again: that is all that is asked of it.

    On a CPU with kernels of ours, matrix products, norms and attention inside the model's code are theirs
    (`traced_products`, `traced_attention`), if the model answers with them as it does without, which is tried.
    """

    def __init__(
        self,
        shape: Shape,
        traced: TracedModel,
        model: Any,
        device: torch.device,
        dtype: torch.dtype,
        *,
        slots: int,
        pages: int,
        length: int,
        threads: int = 1,
        kernels: bool = False,
        deterministic: bool = False,
    ) -> None:
        self.shape, self.length, self.device, self.dtype = shape, length, device, dtype
        self.computes_in = str(dtype).removeprefix("torch.")
        self.deterministic, self.reads_drawn = deterministic, False
        self._calls, self._keeps_logits = traced.calls, traced.keeps_logits
        self._windows = {call.window for call in traced.calls}
        self._tile = 1 if traced.mixed else TILE
        self._uploads = Uploads(device)
        self._batch: StepBatch | None = None
        self._layer: int | None = None  # whose attention comes next; None: no step
        self._kind: Kind | None = None  # of products, where kernels of ours compute attention
        self._packed: PackedModules | None = None
        if device.type == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(False)
        self._model = model.to(device)
        fix_rotary_lengths(model, length)
        modules = dict(model.named_modules())
        for name in dict.fromkeys(call.module for call in traced.calls):
            setattr(modules[name], DECODER_ATTRIBUTE, self._attend)
        self._threads = threads
        if kernels:
            self._put_in_kernels()
        self._adapters = TracedAdapters(model, device, dtype, kernels=kernels, whole=deterministic and not kernels)
        self.resize(slots, pages)

    def resize(self, slots: int, pages: int) -> None:
        """Another number of rows in a step, and of pages, all of them empty."""
        self._cache: Any = None  # the old one goes before there is a new one
        if self.device.type == "cuda":
            release_cached_memory()
        self.slots, self.pages = slots, pages
        if self._kind is None:
            self._cache = LayeredCache(self._calls, pages, self.length, self.device, self.dtype)
            return
        from gpuinfer.text.decoder.traced_attention import PanelCache

        self._cache = PanelCache(self._calls, pages, self.length, self.dtype, self._kind, self._threads)

    @torch.no_grad()
    def forward(self, step: Step) -> Tensor:
        """See `step.Decoder.forward`."""
        if step.sees is not None or step.vectors is not None:
            raise RuntimeError("transformers' own code goes from left to right, by tokens alone")
        if self._kind is not None:
            return self._in_tiles_of_rows(step) if self.deterministic else self._in_place(step)
        self._cache.begin(step, self.deterministic)
        if self.deterministic:
            return self._in_tiles(step)
        self._adapters.begin(adapters_of(step))
        self._batch = batch_of(step, self._cache, self._windows, self._uploads)
        (wanted,) = self._uploads.sent([step.wanted])
        return self._logits(self._batch.tokens, self._batch.positions, wanted)

    @torch.no_grad()
    def states(self, step: Step) -> NDArray[np.float32]:
        """What the last norm gives of each token, [tokens, hidden]."""
        if self._kind is not None:
            self._cache.begin(step)
            inputs = _inputs(step)
        else:
            self._cache.begin(step, False)
            batch = self._batch = batch_of(step, self._cache, self._windows, self._uploads)
            inputs = batch.tokens, batch.positions
        self._adapters.begin(adapters_of(step))
        found = self._through(self._model.base_model, *inputs).last_hidden_state[0]
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
        """There are none."""

    def embedding(self) -> Tensor:
        """See `step.Decoder.embedding`."""
        found: Tensor = self._model.get_input_embeddings().weight
        return found

    def weight_tensors(self) -> Sequence[Tensor]:
        """See `step.Decoder.weight_tensors`."""
        every = [one for one in self._model.parameters() if 0 not in one.stride()]
        return every if self._packed is None else [*every, *self._packed.tensors()]

    @torch.no_grad()
    def pack(self, weights: Any) -> object:
        """Another model of the same configuration, as `swap` takes it: its tensors by name, on the device."""
        given = weights.state_dict().items()
        if self._packed is not None:
            return {name: self._packed.repacked(name, tensor) for name, tensor in given}
        packed = {name: tensor.to(self.device) for name, tensor in given}
        if self.device.type == "cuda":
            event_behind(self.device).synchronize()
        return packed

    @torch.no_grad()
    def swap(self, packed: object) -> None:
        """See `step.Decoder.swap`."""
        assert isinstance(packed, dict)
        own = self._model.state_dict()
        for name, tensor in packed.items():
            if self._packed is None or not self._packed.take(name, tensor):
                own[name].copy_(tensor)

    def pack_adapter(self, adapter: Adapter) -> TracedAdapter:
        """See `step.Decoder.pack_adapter`."""
        return self._adapters.pack(adapter)

    def load(self, number: int, packed: object) -> None:
        """See `step.Decoder.load`."""
        assert isinstance(packed, dict)
        self._adapters.load(number, packed)

    def unload(self, number: int) -> None:
        """See `step.Decoder.unload`."""
        self._adapters.unload(number)

    def empty(self) -> None:
        """Forget what all pages hold; all of the cache is resident from then on."""
        self._cache.empty()

    @property
    def most_prompt_tokens(self) -> int:
        """Tokens of a step with prompts that becomes a graph: none does."""
        return 0

    def cache_bytes(self) -> int:
        return int(self._cache.nbytes())

    def held_bytes(self) -> int:
        """Bytes of the cache."""
        return self.cache_bytes()

    def use(self, threads: int) -> None:
        """See `step.Decoder.use`. With `deterministic` always as many: a product may add up in another order."""
        if self.device.type == "cpu" and not self.deterministic:
            torch.set_num_threads(threads)

    def rest(self) -> None:
        """See `step.Decoder.rest`: torch's threads are not ours."""

    def close(self) -> None:
        for module in self._model.modules():
            module.__dict__.pop(DECODER_ATTRIBUTE, None)
        self._model = self._cache = None

    def _in_place(self, step: Step) -> Tensor:
        """A step whose attention reads the cache in place."""
        self._cache.begin(step)
        self._adapters.begin(adapters_of(step))
        return self._logits(*_inputs(step), torch.from_numpy(step.wanted.astype(np.int64)))

    def _in_tiles_of_rows(self, step: Step) -> Tensor:
        """The same tile after tile, in the order of tokens: each finds all before it in the cache, or in its tile."""
        answers = torch.empty((len(step.wanted), self.shape.vocabulary))
        every = torch.arange(self._tile)
        for first in range(0, len(step.tokens), self._tile):
            part = rows_of_step(step, first, self._tile, self._cache.spare)
            self._cache.begin(part)
            self._adapters.begin(adapters_of(part))
            found = self._logits(*_inputs(part), every)
            asked_for = np.flatnonzero((step.wanted >= first) & (step.wanted < first + self._tile))
            answers[asked_for] = found[step.wanted[asked_for].astype(np.int64) - first]
        return answers

    def _put_in_kernels(self) -> None:
        """Have our own kernels compute products, norms and attention, unless the model answers otherwise then."""
        from gpuinfer.text.decoder.compiled_decoder import product_kind
        from gpuinfer.text.decoder.traced_products import PackedModules

        compute = computes_in(self.dtype, self.device, deterministic=self.deterministic)
        self._kind = product_kind(self.dtype, compute)
        expected = self._tried()
        self._packed = PackedModules(self._model, self.dtype, self._kind)
        found = self._tried()
        if torch.allclose(found, expected, rtol=0, atol=TRIED_WITHIN[self.dtype] * float(expected.abs().max())):
            self.computes_in = compute
            return
        logger.warning(
            "a %s model reads its weights in ways of its own: transformers' products compute it, which are slower",
            self.shape.family,
        )
        self._packed.restore()
        self._packed = None

    @torch.no_grad()
    def _tried(self) -> Tensor:
        """Logits of some tokens that each attend to themselves alone, float32 [tokens, vocabulary]."""
        tokens = torch.arange(TRIED_TOKENS) * 7 % self.shape.vocabulary
        self._layer = TRYING
        try:
            numbers = torch.arange(TRIED_TOKENS)[None]
            found: Tensor = self._model(input_ids=tokens[None], position_ids=numbers, use_cache=False).logits[0].float()
        finally:
            self._layer = None
        return found

    def _logits(self, tokens: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        """Through the model: float32 [wanted, vocabulary]."""
        given: dict[str, Any] = {"logits_to_keep": wanted} if self._keeps_logits else {}
        found = self._through(self._model, tokens, positions, **given).logits[0]
        if len(found) != len(wanted):
            found = found.index_select(0, wanted)
        logits: Tensor = found.float()
        return logits

    def _through(self, model: Any, tokens: Tensor, positions: Tensor, **given: Any) -> Any:
        """What `model`, or a part of it, makes of these tokens, as one row."""
        self._layer = 0
        try:
            return model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **given)
        finally:
            self._layer = self._batch = None
            self._adapters.end()

    def _attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """As transformers calls attention: queries, keys, values [1, heads, tokens, size]; gives [1, tokens, heads,
        value_dim].
        """
        layer = self._layer
        if layer is None:
            raise RuntimeError("attention outside a step")
        if layer == TRYING:
            return of_itself(query[0], key[0], value[0])[None], None
        self._layer = layer + 1
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if self._kind is not None:
            return self._cache.attend(layer, query[0], key[0], value[0], scale, softcap, s_aux)[None], None
        batch, call = self._batch, self._calls[layer]
        assert batch is not None
        self._cache.write(layer, batch.places, key[0].transpose(0, 1), value[0].transpose(0, 1))
        queries = query[0].transpose(0, 1)
        mixed = attend_layer(batch, queries, self._cache, layer, call.window, scale, softcap, s_aux, self.deterministic)
        return mixed[None], None

    def _in_tiles(self, step: Step) -> Tensor:
        """Tile after tile, those that see least first: a token finds all before it in the cache, or in its tile."""
        answers = torch.empty((len(step.wanted), self.shape.vocabulary), device=self.device)
        tokens, segments, adapters, rows = token_columns(step), segments_of(step), adapters_of(step), self._tile
        every = torch.arange(rows, device=self.device)
        for members, reach in tiles(sees_of(step), rows, reach_buckets(self._cache.room)):
            count = len(members)
            padded = np.zeros((4, rows), np.int64)
            padded[2], padded[3] = self._cache.spare * PAGE, 1
            padded[:, :count] = tokens[:, members]
            table = np.full((rows, -(-reach // PAGE)), self._cache.blank)
            table[:count] = table_of(step, segments[members], table.shape[1], self._cache.blank)
            *columns, pages = self._uploads.sent([*padded, table.ravel()])
            ids, positions, places, sees = columns
            masks: dict[int | None, Tensor | None] = {
                window: mask(positions[:, None], sees[:, None], reach, window, self.dtype) for window in self._windows
            }
            group = PaddedGroup(1, reach, pages.view(table.shape), None, masks)
            self._batch = StepBatch(ids, positions, places, (group,))
            self._adapters.begin(np.pad(adapters[members], (0, rows - count)))
            found = self._logits(ids, positions, every)
            asked_for = np.isin(members, step.wanted)
            if asked_for.any():
                into = queued(np.searchsorted(step.wanted, members[asked_for]), self.device)
                answers.index_copy_(0, into, found[queued(np.flatnonzero(asked_for), self.device)])
        return answers


def of_itself(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[tokens, heads, value_dim] of tokens that attend to themselves alone, by how much they ask for."""
    shared = len(query) // len(key)
    key, value = (one.repeat_interleave(shared, dim=0) for one in (key, value))
    return (value * (query * key).mean(-1, keepdim=True).sigmoid()).transpose(0, 1)


def rows_of_step(step: Step, first: int, rows: int, spare: int) -> Step:
    """`rows` tokens of a step from its `first` on, with one of the page `spare` for each that is not there."""
    segments, places = segments_of(step)[first : first + rows], positions_of(step)[first : first + rows]
    owners, firsts, counts = np.unique(segments, return_index=True, return_counts=True)
    lone = rows - len(places)
    table = np.full((len(owners) + lone, step.pages.shape[1]), spare, np.int32)
    table[: len(owners)] = step.pages[owners]
    return Step(
        np.concatenate((step.tokens[first : first + rows], np.zeros(lone, np.int32))),
        table,
        np.concatenate((places[firsts], np.zeros(lone))).astype(np.int32),
        np.concatenate((counts, np.ones(lone))).astype(np.int32),
        np.arange(rows, dtype=np.int32),
        None if step.adapters is None else np.pad(step.adapters[owners], (0, lone)),
    )


def _inputs(step: Step) -> tuple[Tensor, Tensor]:
    """Its tokens and their positions, int64."""
    return torch.from_numpy(step.tokens.astype(np.int64)), torch.from_numpy(positions_of(step))


def fix_rotary_lengths(model: Any, length: int) -> None:
    """Have rotary positions that transformers adapts to the longest row of a batch be those of rows of `length`
    positions: an answer must not depend on what else is in the batch.
    """
    parameter = next(model.parameters())
    last = torch.tensor([[length - 1]], device=parameter.device)
    for module, layer_type in list(growing_rotary(model)):
        named = {} if layer_type is None else {"layer_type": layer_type}
        module(parameter.new_zeros((1, 1, 1)), last, **named)  # it adapts to this position
        settle_rotary(module, layer_type)
