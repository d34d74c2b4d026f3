"""Models that are cut into stages, for tests: imported by name, as a user's are."""

import threading

import torch
from torch import nn


def line(features: int = 6) -> nn.Module:
    """A plain Sequential, one of whose members is one too."""
    twice = nn.Linear(8, 8)
    inner = nn.Sequential(twice, nn.ReLU(inplace=True), twice)
    return nn.Sequential(nn.Linear(features, 8), nn.ReLU(inplace=True), inner, nn.Linear(8, 3))


class Skipping(nn.Module):
    """Embedding, layers, heads; the features and the embedding are needed again at the end."""

    def __init__(self, features: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(features, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.LayerNorm(8)
        self.other = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.heads = nn.Linear(8, 3)

    def forward(self, features, scale=None):
        first = x = torch.relu(self.embed(features))
        for block in self.blocks:
            x = self.norm(x + block(x))
        if scale is not None:
            x = x * scale
        return {"policy": self.heads(x + first), "sum": features.sum(1, keepdim=True)}


class OneRow(Skipping):
    """Nothing has to be named."""

    def __init__(self, features: int = 6) -> None:
        super().__init__(features)
        del self.other


class Backwards(Skipping):
    def forward(self, features):
        x = self.embed(features)
        for block in reversed(self.blocks):
            x = block(x)
        return x


class Deciding(Skipping):
    def forward(self, features):
        x = self.embed(features)
        for block in self.blocks:
            if x.sum() > 0:
                x = block(x)
        return x


class Named(Skipping):
    def segments(self):
        return [self.embed, *self.blocks]

    def forward(self, features):
        x = self.embed(features)
        for block in self.blocks:
            x = block(x)
        return x


class Wrong(Named):
    def segments(self):
        return [self.embed, *self.blocks, nn.Tanh()]


class NoList(Named):
    def segments(self):
        return 3


class Opaque(nn.Module):
    def __init__(self, features: int = 6) -> None:
        super().__init__()
        self.only = nn.Linear(features, 3)

    def forward(self, features):
        return self.only(features)


class Adds(nn.Module):
    def forward(self, x):
        self.look(x)
        return x + 1

    def look(self, x):
        pass


class Raises(Adds):
    """At a row of 7s."""

    def look(self, x):
        if bool((x[:, 0] == 7).any()):
            raise ValueError("seven")


class Hangs(Adds):
    """At a row of 9s, until it is let go."""

    there, let_go = threading.Event(), threading.Event()

    def look(self, x):
        if bool((x[:, 0] == 9).any()):
            self.there.set()
            self.let_go.wait(60)


class Full(Adds):
    """Has memory for two rows, and for those with which a model is tried."""

    def look(self, x):
        if len(x) > 3:
            raise RuntimeError("can't allocate memory")


def raising() -> nn.Module:
    return nn.Sequential(Adds(), Raises(), Adds())


def hanging() -> nn.Module:
    return nn.Sequential(Adds(), Hangs(), Adds())


def full() -> nn.Module:
    return nn.Sequential(Adds(), Full())


def alone() -> nn.Module:
    return nn.Sequential(Adds())
