"""A model of text with masks that costs nothing: numbers that never change, whose bits no test depends on.

Its tokens look at one another over any distance, at their places, and are as sure as `scale` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuinfer.text.transformer import Masking, Shape, Step

VOCABULARY, MASK, HIDDEN, LONGEST = 41, 40, 16, 128


class Toy:
    """`toy(tokens)`: float32 logits [tokens, vocabulary], each row for its own position."""

    def __init__(self, seed: int = 0, scale: float = 2.0) -> None:
        dice = np.random.RandomState(seed)  # legacy: the same numbers with every numpy
        self.embedding = torch.from_numpy(dice.normal(size=(VOCABULARY, HIDDEN)).astype(np.float32))
        self._places = torch.from_numpy(dice.normal(size=(LONGEST, HIDDEN)).astype(np.float32))
        self._head = torch.from_numpy((scale * dice.normal(size=(HIDDEN, VOCABULARY))).astype(np.float32))
        self._reach = torch.from_numpy(dice.normal(size=2 * LONGEST).astype(np.float32))
        self.calls = 0

    def __call__(self, tokens: Sequence[int], vectors: Mapping[int, Tensor] | None = None) -> Tensor:
        """`vectors`: embeddings that stand at some positions in place of their tokens' own."""
        self.calls += 1
        inputs = self.embedding[torch.tensor(list(tokens))]
        for position, vector in (vectors or {}).items():
            inputs[position] = vector
        at = torch.arange(len(inputs))
        weights = self._reach[at[:, None] - at[None, :] + LONGEST] / (1 + (at[:, None] - at[None, :]).abs())
        return torch.tanh(weights @ inputs + 0.5 * self._places[at]) @ self._head


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.RandomState(1000 + seed).randint(0, MASK, length)]


class ToyMasks:
    """`step.Decoder` of such a model, over whole canvases; in blocks of `block` positions, where it is set."""

    slots, length, pages, device, computes_in = 2, LONGEST, 16, torch.device("cpu"), "float32"

    def __init__(self, model: Callable[..., Tensor], block: int | None = None) -> None:
        self.model, self.forwards = model, 0
        sizes = {"hidden": 1, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 1, "intermediate": 1}
        masking = Masking(MASK, block=block)
        self.shape = Shape("toy", VOCABULARY, positions=LONGEST, end_tokens=(), masking=masking, **sizes)

    def forward(self, step: Step) -> Tensor:
        assert step.starts.tolist() == [0]
        self.forwards += 1
        tokens, sees = step.tokens.tolist(), step.sees[step.wanted]
        seen = {end: self.model(tokens[:end]) for end in set(sees.tolist())}
        return torch.stack([seen[end][at] for end, at in zip(sees.tolist(), step.wanted.tolist(), strict=True)])

    def embedding(self) -> Any:
        return self.model.embedding

    def close(self) -> None: ...
