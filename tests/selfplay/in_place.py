"""A backend that reads blocks where they lie and answers into memory of its own, spoilt by the next request."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from gpuinfer.api import Backend, BackendContext, Limits
from gpuinfer.errors import BackendError
from gpuinfer.testing.reference_search import random_linear
from gpuinfer.workloads.selfplay import player
from gpuinfer.workloads.selfplay.games.blob import Blob


class InPlace(Backend):
    """Evaluates Blob with one random matrix."""

    remote = True
    limits = Limits(4096, 4)

    async def start(self, context: BackendContext) -> None:
        self.game = Blob()
        self.model = random_linear(self.game)
        self.blocks = []

    def block(self, rows):
        block = np.zeros((rows, self.game.features), self.game.feature_dtype)
        out = np.zeros((rows, self.game.actions), np.float32), np.zeros((rows, self.game.seats), np.float32)
        self.blocks.append((block, out))
        return block

    async def infer(self, batch):
        return [self.answer(request.payload) for request in batch]

    def answer(self, payload):
        for block, out in self.blocks:
            if np.shares_memory(block, payload):
                for part, told in zip(out, self.model(payload), strict=True):
                    part[:] = np.finfo(np.float32).max
                    part[: len(payload)] = told
                return tuple(part[: len(payload)] for part in out)
        raise BackendError("this block is not mine. Write into one that I gave.")


class Narrow(InPlace):
    """Gives room for too few features."""

    def block(self, rows):
        return super().block(rows)[:, :-1]


async def play(infer, channel, arguments):
    """A player that notes, once it has played, whether its process has loaded torch."""
    await player.play(infer, channel, arguments)
    (Path(arguments["out"]) / "torch").write_text(str("torch" in sys.modules))
