"""Small models whose answers tell which row they belong to, and models that misbehave when a row says so.

A row's first features are its name: who asked, which request, which row. All sums are of small whole numbers, exact in
float32 however a matrix product adds them up.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

FEATURES = 8
BAD = 999.0  # in the last feature of a row that a faulty model acts on
PRIME = 65_521  # sums modulo this stay exact


def tags(rows: NDArray) -> NDArray[np.float32]:
    """What `Tagged` answers to each row: its name, and a hash of all its features."""
    weights = np.arange(1, rows.shape[1] + 1, dtype=np.float64) ** 2
    hashes = (rows.astype(np.float64) @ weights) % PRIME
    return np.column_stack([rows[:, :3].astype(np.float64), hashes]).astype(np.float32)


class Tagged(nn.Module):
    """Answers [rows, 4]: the row's name and a hash of the row."""

    def __init__(self, shape: str = "tensor", seconds: float = 0.0) -> None:
        super().__init__()
        self.shape, self.seconds = shape, seconds

    def forward(self, rows: Tensor) -> Tensor | tuple[Tensor, ...] | dict[str, Tensor]:
        time.sleep(self.seconds)
        weights = torch.arange(1, rows.shape[1] + 1, dtype=torch.float64) ** 2
        hashes = (rows.double() @ weights) % PRIME
        answer = torch.cat([rows[:, :3].double(), hashes[:, None]], dim=1).float()
        if self.shape == "tuple":
            return answer[:, :3], answer[:, 3]
        if self.shape == "dict":
            return {"name": answer[:, :3], "hash": answer[:, 3:]}
        return answer


def tagged(shape: str = "tensor", seconds: float = 0.0) -> nn.Module:
    return Tagged(shape, seconds)


class Held(Tagged):
    """Like `Tagged`, but answers nothing while there is a file `path`, beside which it puts `path.reached` then."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = Path(path)

    def forward(self, rows: Tensor) -> Tensor | tuple[Tensor, ...] | dict[str, Tensor]:
        while self.path.exists():
            self.path.with_suffix(".reached").touch()
            time.sleep(0.005)
        return super().forward(rows)


def held(path: str) -> nn.Module:
    return Held(path)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("nobody may say it")

    __repr__ = __str__


class Faulty(Tagged):
    """Like `Tagged`, but for rows that ask for a fault: `how` it fails is theirs to say, in the feature before last."""

    RAISES, ANSWERS_NAN, OTHER_SHAPE, OTHER_NAMES, EXITS, HANGS, CHATTERS, UNSPEAKABLE, DIES, INTERRUPTS = range(10)

    def forward(self, rows: Tensor) -> Tensor | tuple[Tensor, ...] | dict[str, Tensor]:
        answer = super().forward(rows)
        bad = rows[:, -1] == BAD
        if not bad.any():
            return answer
        how = int(rows[bad][0, -2])
        if how == self.RAISES:
            raise ValueError("this row cannot be answered")
        if how == self.CHATTERS:
            raise ValueError("x" * 10_000_000)
        if how == self.UNSPEAKABLE:
            raise Unspeakable
        if how == self.INTERRUPTS:
            raise KeyboardInterrupt
        if how == self.DIES:
            os._exit(3)
        if how == self.EXITS:
            sys.exit("the model has had enough")
        if how == self.HANGS:
            time.sleep(3600)
        if how == self.OTHER_SHAPE:
            return torch.cat([answer, answer], dim=1)
        if how == self.OTHER_NAMES:
            return {"hash": answer["hash"], "name": answer["name"]}
        (answer["hash"] if isinstance(answer, dict) else answer)[bad] = torch.nan
        return answer


def faulty(shape: str = "tensor") -> nn.Module:
    return Faulty(shape)


def network(features: int = FEATURES) -> nn.Module:
    """An ordinary small network, for sums that do depend on the order."""
    return nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))


class Pair(nn.Module):
    """Policy and value, as in self-play, from one trunk."""

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__()
        self.trunk, self.policy, self.value = nn.Linear(features, 64), nn.Linear(64, 7), nn.Linear(64, 2)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(rows).relu()
        return self.policy(hidden), self.value(hidden)


pair = Pair


class Together(nn.Module):
    """Answers each row with the number of rows that went through at once."""

    def forward(self, rows: Tensor) -> Tensor:
        return torch.full((len(rows), 1), float(len(rows)))
