"""Networks, and a game, that the tests of `gpuinfer export` name as `exported_networks:…`."""

from __future__ import annotations

import torch
from torch import nn

from gpuinfer.workloads.selfplay.game import Game
from gpuinfer.workloads.selfplay.games.connect_four import ConnectFour


class Convolutions(nn.Module):
    """As people write them: normalised, with dropout, and shaped by the number of rows."""

    def __init__(self, features: int, actions: int, seats: int) -> None:
        super().__init__()
        self.convolution, self.norm, self.dropout = nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.policy, self.value = nn.Linear(4 * features, actions), nn.Linear(4 * features, seats)
        self.norm.running_mean += 0.1

    def forward(self, rows):
        found = torch.relu(self.norm(self.convolution(rows.view(len(rows), 1, -1))))
        found = self.dropout(found).flatten(1)
        return self.policy(found), torch.tanh(self.value(found))


class Attention(nn.Module):
    def __init__(self, features: int, actions: int, seats: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.embed, self.layers = nn.Linear(1, 8), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.policy, self.value = nn.Linear(8, actions), nn.Linear(8, seats)

    def forward(self, rows):
        found = self.layers(self.embed(rows.unsqueeze(-1))).mean(1)
        return self.policy(found), self.value(found)


class Named(nn.Module):
    """Answers with a dict, in an order of its own."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, 3), nn.Linear(features, 2)

    def forward(self, rows):
        return {"win": self.first(rows), "draw": self.second(rows)}


class Alone(nn.Linear):
    def __init__(self, features: int) -> None:
        super().__init__(features, 5)


class Noisy(Convolutions):
    def forward(self, rows):
        policy, value = super().forward(rows)
        return policy + torch.rand_like(policy), value


class Branching(Convolutions):
    def forward(self, rows):
        return super().forward(rows * 2 if rows.sum() > 3 else rows)


class Unshown(ConnectFour):
    show = Game.show
