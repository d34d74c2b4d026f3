"""Models and losses that the tests of training name as `train_models:…`, and records for them."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from gpuinfer.gradients import TrainingBatch

FEATURES, ACTIONS, SEATS = 24, 7, 2


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.lost = nn.LayerNorm(width), nn.Dropout(0.1)

    def forward(self, rows):
        return self.norm(rows + self.lost(self.shrink(torch.relu(self.grow(rows)))))


class Deep(nn.Module):
    """As many alike layers as are asked for, in a ModuleList."""

    def __init__(self, features: int, actions: int, seats: int, layers: int = 24, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.policy, self.value = nn.Linear(width, actions), nn.Linear(width, seats)

    def forward(self, rows):
        rows = self.embed(rows)
        for layer in self.layers:
            rows = layer(rows)
        return self.policy(rows), self.value(rows)


class Twice(Deep):
    """Two rows of alike layers: which are to be taken in segments?"""

    def __init__(self, features: int, actions: int, seats: int) -> None:
        super().__init__(features, actions, seats, layers=3)
        self.tower = nn.ModuleList(Layer(16) for _ in range(2))


class Skipping(Deep):
    """Looks at its layers by number: segments would change what it computes."""

    def forward(self, rows):
        rows = self.embed(rows)
        for number in range(0, len(self.layers), 2):
            rows = self.layers[number](rows)
        return self.policy(rows), self.value(rows)


class Normed(nn.Module):
    """With running means, which training changes beside the parameters."""

    def __init__(self, features: int, actions: int, seats: int) -> None:
        super().__init__()
        self.norm, self.heads, self.actions = nn.BatchNorm1d(features), nn.Linear(features, actions + seats), actions

    def forward(self, rows):
        answer = self.heads(self.norm(rows))
        return answer[:, : self.actions], answer[:, self.actions :]


def number(answers, targets):
    return 1.0


def three(answers, targets):
    return answers[0].mean(), answers[1].mean(), {}


def unnamed(answers, targets):
    return answers[0].mean(), answers[1]


def many(answers, targets):
    return answers[0].mean(), {"policy": answers[0]}


def per_row(answers, targets):
    return ((answers[1] - targets["value"]) ** 2).mean(1)


def broken(answers, targets):
    raise KeyError("visits")


def nothing(answers, targets):
    return (answers[1] * 0).sum() / 0


def apart(answers, targets):
    return answers[1].detach().mean()


def weighed(answers, targets, value_weight):
    return value_weight * per_row(answers, targets).mean()


def positions(rows: int, seed: int = 0, games: int = 10) -> dict[str, np.ndarray]:
    """What a shard holds, made up: the move to make and the outcome can be read from the features."""
    dice = np.random.default_rng(seed)
    observation = dice.integers(0, 2, (rows, FEATURES), dtype=np.uint8)
    observation[:, 0] = 1
    legal = observation[:, :ACTIONS].astype(bool)
    liking = np.where(legal, np.exp(2.0 * observation[:, ACTIONS : 2 * ACTIONS]), 0.0)
    value = observation[:, -1:].astype(np.float32) * [[1, -1]]
    game = np.sort(dice.integers(0, games, rows))
    move = np.concatenate([np.arange(count) for count in np.bincount(game, minlength=games)])
    return {
        "observation": observation,
        "legal": legal,
        "policy": (liking / liking.sum(1, keepdims=True)).astype(np.float32),
        "value": value.astype(np.float32),
        "player": np.zeros(rows, np.int8),
        "game": game.astype(np.int64),
        "move": move.astype(np.int16),
        "finished": np.arange(games, dtype=np.int64),
        "returns": np.zeros((games, SEATS), np.float32),
    }


def batch_of(rows: int, seed: int = 0, **more) -> TrainingBatch:
    made = positions(rows, seed)
    return TrainingBatch(made["observation"], {name: made[name] for name in ("policy", "value", "legal")}, **more)
