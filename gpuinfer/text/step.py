"""One forward step over tokens of many rows, and what a decoder promises about it.

The keys and values of a row lie in pages of the cache, which the step names (Kwon et al. 2023, "PagedAttention"). A
step takes segments: a run of new tokens of one row, prompt or answer alike, so that a long prompt goes through in
chunks beside rows that are one token further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gpuinfer.text.shape import Shape
from gpuinfer.text.weights import Adapter, Weights

if TYPE_CHECKING:
    from torch import Tensor


PAGE = 32  # positions in a page of the cache, in every decoder


@dataclass(frozen=True, slots=True)
class Vectors:
    """Embeddings that stand in the place of some tokens' own."""

    places: NDArray[np.int32]  # [n] indices into `Step.tokens`, ascending
    values: NDArray[np.float32] | Tensor  # [n, hidden], contiguous; a tensor lies on the decoder's device


@dataclass(frozen=True, slots=True)
class Step:
    """What to compute next. Segment i brings `lengths[i]` tokens of one row, at positions `starts[i]` onwards; the
    positions before are in the cache. No row comes twice. Arrays are int32 and contiguous.

    Position p of segment i lies in page `pages[i, p // PAGE]`, at `p % PAGE`. Entries behind the last position that a
    segment brings or sees are not looked at. Segments may have their first pages in common: if two of them have the
    same page in the same column, all columns before are the same too. No page that a step writes into has two segments.
    """

    tokens: NDArray[np.int32]  # [all tokens], segment after segment; see `drawn`
    pages: NDArray[np.int32]  # [segments, columns] numbers of pages, 0 to before `Decoder.pages`
    starts: NDArray[np.int32]  # [segments]
    lengths: NDArray[np.int32]  # [segments], each 1 or more
    wanted: NDArray[np.int32]  # [outputs] indices into `tokens`, ascending: whose logits are asked for
    adapters: NDArray[np.int32] | None = (
        None  # [segments] the number of each one's adapter, 0: none; None: none has any
    )
    sees: NDArray[np.int32] | None = None
    """[all tokens] how many positions of its row each token attends to, from 0 on: those of this step and those in the
    cache. They may lie after its own, also beyond the segment: such are in the cache. What lies behind all that a step
    sees of a row is forgotten. None: each up to itself."""
    vectors: Vectors | None = None
    drawn: Tensor | None = None
    """int64 [n] on the decoder's device, n at most `Decoder.slots`: tokens that the host has not seen yet. Where
    `tokens` says -1 - i, the i-th of them goes through; token 0 in the place of a negative one. Only for decoders that
    read them."""


class Decoder(Protocol):
    """A transformer with its cache: a pool of pages. Which row has which page is the caller's business. All calls but
    those of `pack` come from one thread.
    """

    shape: Shape
    slots: int  # rows that one step may have, at most
    pages: int  # in the cache, of PAGE positions each
    length: int  # positions of a row, at most
    device: Any  # torch.device
    computes_in: str  # the number format that rows have when they meet the weights, by name
    reads_drawn: bool  # whether a step may have `Step.drawn`: it queues its work, and does not wait for it

    def forward(self, step: Step) -> Tensor:
        """Logits [len(step.wanted), vocabulary], float32, on the decoder's device; the cache is filled.

        They may lie in the decoder's own memory: they are only read, and the next step overwrites them. Raises
        `torch.OutOfMemoryError` (CUDA) when the device has no room, with nothing changed that the same step tried again
        would not change alike.
        """
        ...

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Give each target page what the source page at the same place of the list holds. No target is a source."""
        ...

    def embedding(self) -> Tensor:
        """[vocabulary, hidden] of the weights it computes with, on the device, as they are stored; only to be read."""
        ...

    def weight_tensors(self) -> Sequence[Tensor]:
        """The memory of the weights it computes with, in whatever order they lie; only to be read."""
        ...

    def pack(self, weights: Weights) -> object:
        """Other weights of the same shape as `swap` takes them: whatever takes long. From any thread."""
        ...

    def swap(self, packed: object) -> None:
        """Compute with these weights from the next step on. The cache keeps what the old ones have computed."""
        ...

    def pack_adapter(self, adapter: Adapter) -> object:
        """An adapter as `load` takes it. From any thread."""
        ...

    def load(self, number: int, packed: object) -> None:
        """Steps may name this adapter from now on, by a number from 1 that no other has."""
        ...

    def unload(self, number: int) -> None:
        """No step names it any more."""
        ...

    def cache_bytes(self) -> int:
        """What the cache takes, all pages."""
        ...

    def use(self, threads: int) -> None:
        """Compute with at most so many threads from the next step on; a device that has none of ours heeds it not."""
        ...

    def rest(self) -> None:
        """Another model has the cores until the next step: no thread is to wait for that actively."""
        ...

    def close(self) -> None:
        """Let go of threads and memory."""
        ...
