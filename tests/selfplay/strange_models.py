"""Model factories that do what they should not. The command's processes import them by name."""

from __future__ import annotations

import torch
from torch import nn


class Constant(nn.Module):
    """Answers the same for every row; from the `spoil_after`-th batch on, NaN."""

    def __init__(self, actions: int, seats: int, fill: float = 0.0, spoil_after: int = 1 << 30) -> None:
        super().__init__()
        self.actions, self.seats, self.fill, self.left = actions, seats, fill, spoil_after

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.left -= 1
        fill = self.fill if self.left > 0 else float("nan")
        return torch.full((len(rows), self.actions), fill), torch.zeros(len(rows), self.seats)


def raises():
    raise RuntimeError("no such data")


def no_module():
    return 3


def wrong_shapes(actions, seats):
    return Constant(actions - 1, seats)


def not_a_number(actions, seats):
    return Constant(actions, seats, float("nan"))


def spoils(actions, seats):
    return Constant(actions, seats, spoil_after=20)


class Hopeless(Constant):
    """Values of -inf, which are fine for logits only."""

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, values = super().forward(rows)
        return logits, values - float("inf")


def hopeless(actions, seats):
    return Hopeless(actions, seats)


def plain(actions, seats):
    return Constant(actions, seats)
