"""A decoder that computes nothing, to measure all that goes on around one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpuinfer.models.text.shape import Shape
from gpuinfer.models.text.step import Step

LETTER = ord("a")


class NullDecoder:
    """`step.Decoder` that answers every token with the same logits: 1 for one letter, 0 for all else."""

    def __init__(self, shape: Shape, *, slots: int, length: int) -> None:
        self.shape, self.slots, self.length = shape, slots, length
        self.device = torch.device("cpu")
        self.token = next(token for token in (LETTER, *range(shape.vocabulary)) if self._suits(token))
        self._logits = torch.zeros((0, shape.vocabulary))

    def forward(self, step: Step) -> Tensor:
        """See `step.Decoder.forward`."""
        rows = len(step.wanted)
        if rows > len(self._logits):  # whoever draws from them leaves them as they are
            self._logits = torch.zeros((rows, self.shape.vocabulary))
            self._logits[:, self.token] = 1
        return self._logits[:rows]

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        pass

    def cache_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass

    def _suits(self, token: int) -> bool:
        return token < self.shape.vocabulary and token not in self.shape.end_tokens
