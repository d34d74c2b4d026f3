"""Models of which a copy fails: their factory is called once for each device, in order, and so knows whose it makes."""

from __future__ import annotations

import threading

import torch
from torch import nn

LOST = "CUDA error: unspecified launch failure"  # what a device that is gone says
SECONDS = 60.0  # that a copy waits for another to fail


class Sums(nn.Module):
    """Answers a row with its sum; raises after so many batches beyond the two that every model is tried on. One that
    `waits_for` another to have failed answers none but those two before.
    """

    def __init__(self, good_for: float, words: str, waits_for: threading.Event | None = None) -> None:
        super().__init__()
        self.left, self.words = good_for + 2, words
        self.tried_on, self.waits_for, self.has_failed = 2, waits_for, threading.Event()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, rows):
        self.left -= 1
        self.tried_on -= 1
        if self.left < 0:
            self.has_failed.set()
            raise RuntimeError(self.words)
        if bool((rows == -9).any()):
            raise ValueError("a nine")
        if self.waits_for is not None and self.tried_on < 0 and not self.waits_for.wait(SECONDS):
            raise TimeoutError("the other copy has not failed")
        return rows.sum(1, keepdim=True) * self.scale


made = 0
_first: Sums  # of the last two that `first_fails_later` made


def _make(good_for: list[float], words: str = LOST, waits_for: threading.Event | None = None) -> Sums:
    global made
    made += 1
    return Sums(good_for[(made - 1) % len(good_for)], words, waits_for)


def well(features: int) -> Sums:
    return _make([float("inf")])


def second_fails(features: int) -> Sums:
    return _make([float("inf"), 0])


def first_fails_later(features: int) -> Sums:
    """The second copy waits for that: a device that is slow to begin may else see no fourth batch."""
    global _first
    if made % 2:
        return _make([3, float("inf")], waits_for=_first.has_failed)
    _first = _make([3, float("inf")])
    return _first


def all_fail(features: int) -> Sums:
    return _make([2, 1])


def asserts(features: int) -> Sums:
    """The first batch kills the device that it comes to by its own fault."""
    return _make([0, 0], "CUDA error: device-side assert triggered")
