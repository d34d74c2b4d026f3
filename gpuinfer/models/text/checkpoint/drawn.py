"""A store whose tensors are drawn, the same ones everywhere."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from gpuinfer.models.text.checkpoint.layout import Part
from gpuinfer.models.text.checkpoint.store import Stored

DEVIATION = 0.05
EMBEDDING_DEVIATION = 0.5  # large beside what the layers add: the last token matters most, and answers do not freeze
HEAD_DEVIATION = 0.1  # logits some 1.5 apart
SILENCE = -128.0


class DrawnStore:
    """Norms are ones, biases zeros, matrices normal.

    The first hidden value is one in every embedding and no layer writes to it, so that by it the head keeps all tokens
    but the `speakable` ones silent, whatever the prompt was.
    """

    def __init__(self, where: str, parts: Iterable[Part], speakable: Sequence[int]) -> None:
        self.where, self._speakable = where, list(speakable)
        self.tensors = {part.name: Stored(part.shape, torch.float32) for part in parts}

    def read(self, name: str, into: Tensor) -> None:
        if into.dim() == 1:
            into.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            into.copy_(self._matrix(name, tuple(into.shape)))

    def digests(self, names: Collection[str]) -> dict[str, bytes]:
        """Of what they are drawn from."""
        return dict.fromkeys(names, f"drawn by torch {torch.__version__}, {self._speakable}".encode())

    def _matrix(self, name: str, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(
            zlib.crc32(name.encode())
        )  # a tensor's own, whatever is read before it
        drawn = torch.empty(shape).normal_(0.0, _deviation(name), generator=generator)
        if "embed_tokens" in name:
            drawn[:, 0] = 1.0
        elif "lm_head" in name:
            drawn[:, 0] = SILENCE
            drawn[self._speakable, 0] = 0.0
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            drawn[0] = 0.0
        return drawn


def _deviation(name: str) -> float:
    if "embed_tokens" in name:
        return EMBEDDING_DEVIATION
    return HEAD_DEVIATION if "lm_head" in name else DEVIATION
