"""What a step costs at least: its floating point operations, and the bytes that it must read and write.

The two sides of the roofline model (Williams, Waterman and Patterson 2009): no step ends before its operations are done
at the most that products reach here, nor before its bytes have come from memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuinfer.text.shape import Shape
from gpuinfer.text.step import PAGE, Step


class Extent(NamedTuple):
    """How large a step is."""

    rows: int  # segments
    tokens: int
    outputs: int  # tokens whose logits are wanted
    attended: int  # positions that a token sees, summed over tokens
    read: int  # positions whose keys and values are read, those of this step included: each once, whoever shares it


class Cost(NamedTuple):
    """`flops`: a multiplication and an addition are two. `attention` are those of `flops` that attention has."""

    flops: float
    bytes: float
    attention: float


def counted_again(pages: NDArray[np.int32], starts: NDArray[np.int32]) -> int:
    """How many positions before `starts` a sum over the rows counts too often, since rows share full `pages`."""
    full = starts // PAGE
    columns = int(full.max(initial=0))
    if len(full) < 2 or not columns:
        return 0
    held = pages[:, :columns][np.arange(columns) < full[:, None]]
    return PAGE * (len(held) - int(np.count_nonzero(np.bincount(held))))


def extent_of(step: Step, again: int | None = None) -> Extent:
    """The extent of this step. `again` is what `counted_again` says, where that is known already."""
    lengths, starts = step.lengths.astype(np.int64), step.starts.astype(np.int64)
    if step.sees is None:
        attended = int((lengths * starts + lengths * (lengths + 1) // 2).sum())
        read = int((starts + lengths).sum())
    else:
        attended = int(step.sees.sum(dtype=np.int64))
        first = np.cumsum(lengths) - lengths
        read = int(np.maximum.reduceat(step.sees, first).sum(dtype=np.int64)) if len(lengths) else 0
    read -= counted_again(step.pages, step.starts) if again is None else again
    return Extent(len(lengths), len(step.tokens), len(step.wanted), attended, read)


@dataclass(frozen=True)
class StepCost:
    """Counts for a model of this shape, whose weights and cache have values of `item_bytes` bytes.

    Norms, rotations and activations are left out, and rows whose logits are not wanted pass the last layer's attention
    input alone: what is counted is the least that any implementation does.
    """

    shape: Shape
    item_bytes: int

    def of(self, extent: Extent) -> Cost:
        """The cost of a step of this extent."""
        shape = self.shape
        attention = self._attention_flops(extent)
        flops, values = attention, float(extent.outputs > 0) * shape.hidden * shape.vocabulary
        flops += 2.0 * shape.hidden * shape.vocabulary * extent.outputs
        for layer in range(shape.layers):
            passed = extent.outputs if layer == shape.layers - 1 else extent.tokens
            flops += 2.0 * (self._qkv * extent.tokens + (self._out + self._mlp(layer)) * passed)
            values += self._qkv + self._out + self._read_of_mlp(layer, passed)
        cached = self._cached_values(extent) + extent.tokens * shape.cache_values
        return Cost(flops, self.item_bytes * (values + cached), attention)

    @property
    def _qkv(self) -> int:
        return (self.shape.heads + 2 * self.shape.kv_heads) * self.shape.head_dim * self.shape.hidden

    @property
    def _out(self) -> int:
        return self.shape.heads * self.shape.head_dim * self.shape.hidden

    def _mlp(self, layer: int) -> int:
        """Values of the weights that one token meets."""
        dense = self._matrices * self.shape.inner(layer) * self.shape.hidden
        experts = self.shape.experts
        if experts is None or not self.shape.mixed(layer):
            return dense
        return dense + (experts.chosen * 3 * experts.intermediate + experts.count) * self.shape.hidden

    def _read_of_mlp(self, layer: int, tokens: int) -> int:
        """Values that so many tokens read at the most: all experts, once there are tokens enough to choose them."""
        experts = self.shape.experts
        if experts is None or not self.shape.mixed(layer):
            return self._mlp(layer)
        met = min(experts.count, experts.chosen * tokens)
        dense = self._matrices * self.shape.inner(layer) * self.shape.hidden
        return dense + (met * 3 * experts.intermediate + experts.count) * self.shape.hidden

    @property
    def _matrices(self) -> int:
        return 3 if self.shape.gated else 2

    def _attention_flops(self, extent: Extent) -> float:
        """Queries by keys and weights by values: four operations for each value of a head and position seen."""
        each = 4.0 * self.shape.heads * self.shape.head_dim
        return sum(each * self._within(layer, extent.attended, extent.tokens) for layer in range(self.shape.layers))

    def _cached_values(self, extent: Extent) -> float:
        each = 2.0 * self.shape.kv_heads * self.shape.head_dim
        return sum(each * self._within(layer, extent.read, extent.tokens) for layer in range(self.shape.layers))

    def _within(self, layer: int, positions: int, tokens: int) -> int:
        """Of these positions those that the layer's window leaves, of so many tokens, at the most."""
        window = self.shape.windows[layer] if self.shape.windows else None
        return positions if window is None else min(positions, tokens * window)
