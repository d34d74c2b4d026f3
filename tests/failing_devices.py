"""Models of which a copy fails: their factory is called once for each device, in order, and so knows whose it makes."""

from __future__ import annotations

import torch
from torch import nn

LOST = "CUDA error: unspecified launch failure"  # what a device that is gone says


class Sums(nn.Module):
    """Answers a row with its sum; raises after so many batches beyond the two that every model is tried on."""

    def __init__(self, good_for: float, words: str) -> None:
        super().__init__()
        self.left, self.words = good_for + 2, words
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, rows):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError(self.words)
        if bool((rows == -9).any()):
            raise ValueError("a nine")
        return rows.sum(1, keepdim=True) * self.scale


made = 0


def _make(good_for: list[float], words: str = LOST) -> Sums:
    global made
    made += 1
    return Sums(good_for[(made - 1) % len(good_for)], words)


def well(features: int) -> Sums:
    return _make([float("inf")])


def second_fails(features: int) -> Sums:
    return _make([float("inf"), 0])


def first_fails_later(features: int) -> Sums:
    return _make([3, float("inf")])


def all_fail(features: int) -> Sums:
    return _make([2, 1])


def asserts(features: int) -> Sums:
    """The first batch kills the device that it comes to by its own fault."""
    return _make([0, 0], "CUDA error: device-side assert triggered")
