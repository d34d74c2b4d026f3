"""A model of text with masks that costs nothing: numbers that never change, whose bits no test depends on.

Its tokens look at one another over any distance, at their places, and are as sure as `scale` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

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
