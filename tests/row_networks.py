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


class InTraining(Network):
    """A batch norm that eval() does not reach; `spread` rows of numbers to normalise for each row of the network."""

    spread = 1

    def __init__(self, features: int, actions: int, seats: int) -> None:
        super().__init__(features, actions, seats)
        self.norm = nn.BatchNorm1d(features)

    def train(self, mode=True):
        super().train(mode)
        self.norm.train()
        return self

    def forward(self, rows):
        spread = torch.cat([rows, rows + 1]) if self.spread > 1 else rows
        return super().forward(self.norm(spread)[: len(rows)])


class InTrainingSpread(InTraining):
    """It answers one row too."""

    spread = 2


class OneRow(Network):
    def forward(self, rows):
        if len(rows) > 1:
            raise RuntimeError("one row, please")
        return super().forward(rows)


class NotANumber(Network):
    def forward(self, rows):
        policy, value = super().forward(rows)
        return policy, value * torch.nan


class Dropping(Network):
    def forward(self, rows):
        policy, value = super().forward(rows)
        return nn.functional.dropout(policy, 0.5), value


class Counting(Network):
    calls = 0

    def forward(self, rows):
        self.calls += 1
        policy, value = super().forward(rows)
        return policy, value + self.calls


def factory_of(kind):
    def made(features: int, actions: int = 9, seats: int = 2) -> nn.Module:
        return kind(features, actions, seats)

    return made


in_training, in_training_spread = factory_of(InTraining), factory_of(InTrainingSpread)
one_row, not_a_number = factory_of(OneRow), factory_of(NotANumber)
dropping, counting = factory_of(Dropping), factory_of(Counting)


def of_sizes(features: int, actions: int, seats: int) -> nn.Module:
    return Network(features, actions, seats)
