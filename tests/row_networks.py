"""Networks of rows as users write them: module:factory, with weights that are drawn."""

from __future__ import annotations

import torch
from torch import nn


class Network(nn.Module):
    """Policy logits and values of a row of features."""

    def __init__(self, features: int, actions: int, seats: int) -> None:
        super().__init__()
        self.trunk, self.policy, self.value = (
            nn.Linear(features, 32),
            nn.Linear(32, actions),
            nn.Linear(32, seats),
        )

    def forward(self, rows):
        hidden = torch.relu(self.trunk(rows))
        return self.policy(hidden), torch.tanh(self.value(hidden))


class BatchDependent(Network):
    """A value depends on the other rows of its batch: a fault that only batches show."""

    def forward(self, rows):
        policy, value = super().forward(rows)
        return policy, value - value.mean(0, keepdim=True) if len(rows) > 1 else value


class Named(Network):
    """Outputs by name, none of which is a game's policy."""

    def forward(self, rows):
        logits, score = super().forward(rows)
        return {"logits": logits, "score": score[:, :1]}


def sound(features: int, actions: int = 9, seats: int = 2) -> nn.Module:
    return Network(features, actions, seats)


def batch_dependent(features: int, actions: int = 9, seats: int = 2) -> nn.Module:
    return BatchDependent(features, actions, seats)


def named(features: int) -> nn.Module:
    return Named(features, 9, 2)
