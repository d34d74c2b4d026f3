"""A decoder whose layers are transformers' own code: all tokens of a step are one row of it, and its attention is ours,
over the pages of our cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.models.cuda_graphs import event_behind, release_cached_memory
from gpuinfer.text.checkpoint.transformers_trace import (
    DECODER_ATTRIBUTE,
    TracedModel,
    growing_rotary,
    settle_rotary,
)
from gpuinfer.text.decoder.attention_plan import sees_of, segments_of
from gpuinfer.text.decoder.layered_cache import LayeredCache, attend_layer
from gpuinfer.text.decoder.torch_batch import Uploads, batch_of, reach_buckets, tiles, token_columns
from gpuinfer.text.decoder.torch_cache import table_of
from gpuinfer.text.decoder.torch_layers import PaddedGroup, StepBatch, mask
from gpuinfer.text.transformer import PAGE, Adapter, Shape, Step

TILE = 16  # tokens that `deterministic` always computes at once, padded; one where experts share them out


class TransformersDecoder:
    """`step.Decoder` for `model`, transformers' own with our attention in it (`TransformersCheckpoint.model`), whose
    attentions are those of `traced`.

    With `deterministic` tokens go through in tiles of one fixed size, so that a token's logits are the same bits
    whatever shares the step; of a mixture of experts one by one, as how many rows an expert has would change its sums.
    What the model's own code makes of one tile it must make of it again: that is all that is asked of it.
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
        self._layer = 0
        if device.type == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(False)
        self._model = model.to(device)
        fix_rotary_lengths(model, length)
        modules = dict(model.named_modules())
        for name in dict.fromkeys(call.module for call in traced.calls):
            setattr(modules[name], DECODER_ATTRIBUTE, self._attend)
        self.resize(slots, pages)

    def resize(self, slots: int, pages: int) -> None:
        """Another number of rows in a step, and of pages, all of them empty."""
        self._cache: Any = None  # the old one goes before there is a new one
        if self.device.type == "cuda":
            release_cached_memory()
        self.slots, self.pages = slots, pages
        self._cache = LayeredCache(self._calls, pages, self.length, self.device, self.dtype)

    @torch.no_grad()
    def forward(self, step: Step) -> Tensor:
        """See `step.Decoder.forward`."""
        if step.sees is not None or step.vectors is not None:
            raise RuntimeError("transformers' own code goes from left to right, by tokens alone")
        self._cache.begin(step, self.deterministic)
        if self.deterministic:
            return self._in_tiles(step)
        batch = batch_of(step, self._cache, self._windows, self._uploads)
        (wanted,) = self._uploads.sent([step.wanted])
        return self._logits(batch, wanted)

    @torch.no_grad()
    def states(self, step: Step) -> NDArray[np.float32]:
        """What the last norm gives of each token, [tokens, hidden]."""
        self._cache.begin(step, False)
        batch = batch_of(step, self._cache, self._windows, self._uploads)
        found = self._through(self._model.base_model, batch).last_hidden_state[0]
        return np.asarray(found.float().cpu().numpy(), np.float32)

    @torch.no_grad()
    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `step.Decoder.copy_pages`."""
        self._cache.copy_pages(sources, targets)

    def embedding(self) -> Tensor:
        """See `step.Decoder.embedding`."""
        found: Tensor = self._model.get_input_embeddings().weight
        return found

    def weight_tensors(self) -> Sequence[Tensor]:
        """See `step.Decoder.weight_tensors`."""
        return list(self._model.parameters())

    @torch.no_grad()
    def pack(self, weights: Any) -> object:
        """Another model of the same configuration, as `swap` takes it: its tensors by name, on the device."""
        packed = {name: tensor.to(self.device) for name, tensor in weights.state_dict().items()}
        if self.device.type == "cuda":
            event_behind(self.device).synchronize()
        return packed

    @torch.no_grad()
    def swap(self, packed: object) -> None:
        """See `step.Decoder.swap`."""
        assert isinstance(packed, dict)
        own = self._model.state_dict()
        for name, tensor in packed.items():
            own[name].copy_(tensor)

    def pack_adapter(self, adapter: Adapter) -> object:
        """Raises `UsageError`: adapters are for native decoders."""
        raise UsageError(
            f"a {self.shape.family} model runs in transformers' own code, which takes no adapters here. "
            "Merge the adapter into the model."
        )

    def load(self, number: int, packed: object) -> None:
        """See `pack_adapter`."""

    def unload(self, number: int) -> None:
        """See `pack_adapter`."""

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

    def _logits(self, batch: StepBatch, wanted: Tensor) -> Tensor:
        """Through the model: float32 [wanted, vocabulary]."""
        given: dict[str, Any] = {"logits_to_keep": wanted} if self._keeps_logits else {}
        found = self._through(self._model, batch, **given).logits[0]
        if len(found) != len(wanted):
            found = found.index_select(0, wanted)
        logits: Tensor = found.float()
        return logits

    def _through(self, model: Any, batch: StepBatch, **given: Any) -> Any:
        """What `model`, or a part of it, makes of all tokens of the batch, as one row."""
        self._batch, self._layer = batch, 0
        try:
            return model(input_ids=batch.tokens[None], position_ids=batch.positions[None], use_cache=False, **given)
        finally:
            self._batch = None

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
        batch, layer = self._batch, self._layer
        if batch is None:
            raise RuntimeError("attention outside a step")
        self._layer += 1
        call = self._calls[layer]
        self._cache.write(layer, batch.places, key[0].transpose(0, 1), value[0].transpose(0, 1))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        queries = query[0].transpose(0, 1)
        mixed = attend_layer(batch, queries, self._cache, layer, call.window, scale, softcap, s_aux, self.deterministic)
        return mixed[None], None

    def _in_tiles(self, step: Step) -> Tensor:
        """Tile after tile, those that see least first: a token finds all before it in the cache, or in its tile."""
        answers = torch.empty((len(step.wanted), self.shape.vocabulary), device=self.device)
        tokens, segments, rows = token_columns(step), segments_of(step), self._tile
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
            found = self._logits(StepBatch(ids, positions, places, (group,)), every)
            asked_for = np.isin(members, step.wanted)
            if asked_for.any():
                into = torch.from_numpy(np.searchsorted(step.wanted, members[asked_for])).to(self.device)
                answers.index_copy_(0, into, found[torch.from_numpy(np.flatnonzero(asked_for)).to(self.device)])
        return answers


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
