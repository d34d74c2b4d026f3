"""Models for the bench: one that sleeps as long as it is told, one that computes. The server imports them by name."""

from __future__ import annotations

import time
from itertools import pairwise

import torch
from planted import service_s

from gpuinfer.api import enter_station


class Sleeper(torch.nn.Module):
    """Takes `fixed_s` and `row_s` for each row, up to `knee` rows; beyond them it is no faster a row."""

    def __init__(self, inputs: int, fixed_s: float, row_s: float, knee: int, transfer_s: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))  # a model has some
        self.inputs, self.fixed_s, self.row_s, self.knee, self.transfer_s = inputs, fixed_s, row_s, knee, transfer_s

    def seconds(self, rows: int) -> float:
        return service_s(rows, self.fixed_s, self.row_s, self.knee)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.transfer_s:
            enter_station("transfer")
            time.sleep(self.transfer_s * len(rows) / self.knee)
            enter_station("forward")
        time.sleep(self.seconds(len(rows)))
        return rows[:, :1] * 0


class Burner(torch.nn.Module):
    """Computes for real: layers wide enough that torch divides them among its threads."""

    def __init__(self, inputs: int, width: int = 384, layers: int = 6) -> None:
        super().__init__()
        sizes = [inputs] + [width] * layers
        self.layers = torch.nn.ModuleList(torch.nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = layer(rows).relu()
        return rows[:, :1]
