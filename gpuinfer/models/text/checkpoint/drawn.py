"""A store whose tensors are drawn, the same ones everywhere."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from gpuinfer.models.text.checkpoint.layout import Part
from gpuinfer.models.text.checkpoint.store import Stored


class DrawnStore:
    """Norms are ones, biases zeros, matrices normal: `deviation` apart, embeddings `embedding_deviation`."""

    def __init__(self, where: str, parts: Iterable[Part], deviation: float, embedding_deviation: float) -> None:
        self.where = where
        self.tensors = {part.name: Stored(part.shape, torch.float32) for part in parts}
        self._deviation, self._embedding_deviation = deviation, embedding_deviation

    def read(self, name: str, into: Tensor) -> None:
        if into.dim() == 1:
            into.fill_(0.0 if name.endswith("bias") else 1.0)
            return
        generator = torch.Generator().manual_seed(
            zlib.crc32(name.encode())
        )  # a tensor's own, whatever is read before it
        deviation = self._embedding_deviation if "embed" in name else self._deviation
        into.copy_(torch.empty(into.shape).normal_(0.0, deviation, generator=generator))

    def sample(self, name: str) -> bytes:
        return f"{self._deviation} {self._embedding_deviation} {torch.__version__}".encode()
