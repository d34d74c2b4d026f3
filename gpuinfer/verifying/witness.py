"""A decoder that is watched: what it was given and what it said, by the tokens that came before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuinfer.text.step import PAGE, Decoder, Step
from gpuinfer.text.weights import Adapter, Weights

if TYPE_CHECKING:
    from torch import Tensor

History = int
"""A fingerprint of tokens in their order."""


class Sight(NamedTuple):
    """One row of logits as it left the decoder."""

    largest: float
    second: float
    bits: int  # the sum of the row's bit patterns: unequal sums, unequal bits


def history(tokens: Iterable[int], before: History = 0) -> History:
    """The fingerprint of `tokens` after those of `before`."""
    for token in tokens:
        before = hash((before, int(token)))
    return before


class Witness:
    """A `step.Decoder` that passes everything on to another one, which it does not own, and remembers.

    `order` gives the pages other places: page i is the other decoder's `order[i]`. Of the histories in `watched` whole
    rows of logits are kept. `pages`: no more than the first so many.
    """

    def __init__(
        self,
        decoder: Decoder,
        order: NDArray[np.int32] | None = None,
        watched: Collection[History] = (),
        pages: int | None = None,
    ) -> None:
        self._decoder, self._watched = decoder, watched
        self._order = np.arange(decoder.pages, dtype=np.int32) if order is None else order
        self._told: list[list[History]] = [
            [0] * PAGE for _ in range(decoder.pages)
        ]  # of each page, after each position
        self.sights: dict[History, list[Sight]] = defaultdict(list)
        self.rows: dict[History, list[NDArray[np.float32]]] = defaultdict(list)
        self.shape, self.slots, self.length = decoder.shape, decoder.slots, decoder.length
        self.pages = decoder.pages if pages is None else pages
        self.device: Any = decoder.device
        self.computes_in, self.reads_drawn = decoder.computes_in, False

    def forward(self, step: Step) -> Tensor:
        """See `step.Decoder.forward`."""
        logits = self._decoder.forward(
            Step(step.tokens, self._order[step.pages], step.starts, step.lengths, step.wanted, step.adapters)
        )
        self._note(self._heard(step), logits)
        return logits

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            self._told[target][:] = self._told[source]
        self._decoder.copy_pages(self._order[list(sources)].tolist(), self._order[list(targets)].tolist())

    def embedding(self) -> Tensor:
        return self._decoder.embedding()

    def weight_tensors(self) -> Sequence[Tensor]:
        return self._decoder.weight_tensors()

    def pack(self, weights: Weights) -> object:
        return self._decoder.pack(weights)

    def swap(self, packed: object) -> None:
        self._decoder.swap(packed)

    def pack_adapter(self, adapter: Adapter) -> object:
        return self._decoder.pack_adapter(adapter)

    def load(self, number: int, packed: object) -> None:
        self._decoder.load(number, packed)

    def unload(self, number: int) -> None:
        self._decoder.unload(number)

    def cache_bytes(self) -> int:
        return self._decoder.cache_bytes()

    def use(self, threads: int) -> None:
        self._decoder.use(threads)

    def rest(self) -> None:
        self._decoder.rest()

    def close(self) -> None:
        """The decoder is somebody else's."""

    def _heard(self, step: Step) -> list[History]:
        """The history of each token whose logits are asked for."""
        found: list[History] = []
        first = 0
        for pages, start, length in zip(step.pages.tolist(), step.starts.tolist(), step.lengths.tolist(), strict=True):
            before = self._told[pages[(start - 1) // PAGE]][(start - 1) % PAGE] if start else 0
            for at, token in enumerate(step.tokens[first : first + length].tolist(), start):
                before = self._told[pages[at // PAGE]][at % PAGE] = history((token,), before)
                found.append(before)
            first += length
        return [found[index] for index in step.wanted.tolist()]

    def _note(self, heard: list[History], logits: Tensor) -> None:
        if not heard:
            return
        import torch

        largest = logits.topk(2, dim=1).values.tolist()
        bits = logits.contiguous().view(torch.int32).sum(dim=1, dtype=torch.int64).tolist()
        for number, (one, (first, second), sum_of_bits) in enumerate(zip(heard, largest, bits, strict=True)):
            self.sights[one].append(Sight(first, second, sum_of_bits))
            if one in self._watched:
                self.rows[one].append(logits[number].float().cpu().numpy().copy())
