"""Models of rows of any shape, which other processes import by name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BAD_ROW = 999  # a value at which `FaultyRow` raises


class ImageScores(nn.Module):
    """float32 [3, 32, 32] to [5]."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 5)

    def forward(self, image: Tensor) -> Tensor:
        scores: Tensor = self.head(self.convolution(image).relu().mean((2, 3)))
        return scores


class TokenSums(nn.Module):
    """int64 [T] to the sum and the number of its tokens, both int64."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return tokens.sum(1), torch.full((len(tokens),), tokens.shape[1])


class MaskedMeans(nn.Module):
    """{"ids": int64 [T], "mask": bool [T]} to {"mean": float32, "kept": int64, "any": bool}."""

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        kept = mask.sum(1)
        mean = (ids * mask).sum(1) / kept.clamp(min=1)
        return {"mean": mean, "kept": kept, "any": mask.any(1)}


class ThreeInputs(nn.Module):
    """Three arrays to their sums, one a row of each."""

    def forward(self, one: Tensor, two: Tensor, three: Tensor) -> tuple[Tensor, ...]:
        return one.flatten(1).sum(1), two.double().sum(1), three.float()


class FaultyRow(nn.Module):
    def forward(self, row: Tensor) -> Tensor:
        if bool((row == BAD_ROW).any()):
            raise ValueError("this row is bad")
        return row * 2


class Reversed(nn.Module):
    """float32 [T, 2] to the same backwards: an answer as long as its row."""

    def forward(self, row: Tensor) -> Tensor:
        return row.flip(1)


def doubled(row: Tensor) -> Tensor:
    return row + row
