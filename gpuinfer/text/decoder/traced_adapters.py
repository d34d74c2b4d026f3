"""Adapters of low rank behind the linear layers of a model that transformers' own code computes.

A hook on a layer adds to those of its rows that have an adapter, whatever has computed the layer itself. On a CPU with
kernels of our own the low ranks are their products, in float32: of each row by itself, whose bits depend on no other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear

from gpuinfer.models.cuda_graphs import event_behind, keep_for_steps
from gpuinfer.models.pinned_memory import queued
from gpuinfer.text.transformer import Adapter, LowRank


@dataclass(frozen=True)
class TracedLowRank:
    """x · downᵀ · upᵀ of rows x [rows, inner]."""

    down: Callable[[Tensor], Tensor]  # from rows [rows, inner] to [rows, rank]
    up: Callable[[Tensor], Tensor]  # from there to [rows, columns]
    weights: tuple[Tensor, ...]  # on the device; none where they are our products' own

    def __call__(self, rows: Tensor) -> Tensor:
        return self.up(self.down(rows))


TracedAdapter = Mapping[str, TracedLowRank]
"""By the name of the module that it is added to."""


class TracedAdapters:
    """The adapters that steps of `model` may name.

    `kernels`: our own products compute low ranks, else torch's in `dtype`. `whole`: all rows of a step go through each
    adapter of it, and those that have it keep what it gives, so that no size depends on how many they are.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, dtype: torch.dtype, *, kernels: bool, whole: bool
    ) -> None:
        self._modules = dict(model.named_modules())
        self._device, self._dtype, self._kernels, self._whole = device, dtype, kernels, whole
        self._loaded: dict[int, TracedAdapter] = {}
        self._hooks: dict[str, Any] = {}  # handles, of each module that an adapter was added to
        self._rows: list[tuple[TracedAdapter, Tensor | slice]] = []  # of the step under way: who has which

    @torch.no_grad()
    def pack(self, adapter: Adapter) -> TracedAdapter:
        """As `load` takes it. From any thread."""
        found = {low.product: self._packed(low) for layer in adapter.layers for low in layer}
        if self._device.type == "cuda":
            event_behind(self._device).synchronize()  # steps run on another thread's stream
        return found

    def load(self, number: int, packed: TracedAdapter) -> None:
        """See `step.Decoder.load`."""
        self._loaded[number] = packed
        for name in packed.keys() - self._hooks.keys():
            self._hooks[name] = self._modules[name].register_forward_hook(partial(self._add, name))

    def unload(self, number: int) -> None:
        """See `step.Decoder.unload`. A module is left alone where no other adapter is added to it."""
        gone = self._loaded.pop(number)
        for name in gone:
            if not any(name in other for other in self._loaded.values()):
                self._hooks.pop(name).remove()
        keep_for_steps(weight for low in gone.values() for weight in low.weights)

    def begin(self, numbers: NDArray[np.int32]) -> None:
        """The next rows that go through the model have these adapters; 0: none."""
        found = np.unique(numbers[numbers > 0]).tolist()
        self._rows = [(self._loaded[number], self._chosen(numbers == number)) for number in found]

    def end(self) -> None:
        """These rows are through."""
        self._rows = []

    def _chosen(self, own: NDArray[np.bool_]) -> Tensor | slice:
        """Which rows these are: as they are where all go through, else by their numbers, or as one run of them."""
        if self._whole:
            return queued(own, self._device)
        places = np.flatnonzero(own)
        first, end = int(places[0]), int(places[-1]) + 1
        return slice(first, end) if end - first == len(places) else queued(places, self._device)

    def _packed(self, low: LowRank) -> TracedLowRank:
        if not self._kernels:
            down, up = (one.to(self._device, self._dtype) for one in (low.down, low.up))
            return TracedLowRank(partial(linear, weight=down), partial(linear, weight=up), (down, up))
        from gpuinfer.text.decoder.traced_products import PackedProduct

        down_product, up_product = (PackedProduct(one.float(), None, "float32") for one in (low.down, low.up))
        return TracedLowRank(down_product, up_product, ())

    def _add(self, name: str, module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        """Add to `out`, what the module has made of `given`, in place."""
        for adapter, chosen in self._rows:
            if name not in adapter:
                continue
            x, y, low = given[0].reshape(-1, given[0].shape[-1]), out.view(-1, out.shape[-1]), adapter[name]
            if isinstance(chosen, slice):
                y[chosen] += low(x[chosen])
            elif self._whole:
                y.copy_(torch.where(chosen[:, None], y + low(x), y))
            else:
                added = low(x.index_select(0, chosen))
                if added.dtype == y.dtype:
                    y.index_add_(0, chosen, added)
                else:  # float32 beside bfloat16: rounded once
                    y.index_copy_(0, chosen, (y.index_select(0, chosen) + added).to(y.dtype))
