"""Backends whose answers are not the model's. Child processes import them by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuinfer.backends.central import Central
from gpuinfer.backends.inprocess import InProcess


class Mute(InProcess):
    """Answers with nothing."""

    async def infer(self, batch):
        return [None for _ in batch]


class Liar(InProcess):
    """A little off."""

    async def infer(self, batch):
        return [tuple(part + 1e-3 for part in answer) for answer in await super().infer(batch)]


class Swapper(InProcess):
    """Answers of one request in the place of another's, as a server with a wrong slot would."""

    async def infer(self, batch):
        return [tuple(part[::-1].copy() for part in answer) for answer in await super().infer(batch)]


class CrookedBlocks(Central):
    """Reads what lies in its own memory a row too early."""

    def connect(self):
        return CrookedWay(super().connect())


@dataclass(frozen=True)
class CrookedWay:
    straight: Any

    def open(self):
        backend = self.straight.open()
        block, stream, taken = backend.block, backend.stream, []

        def crooked_block(rows):
            taken.append(block(rows))
            return taken[-1]

        async def crooked_stream(batch):
            for request in batch:
                if any(request.payload is one for one in taken):
                    request.payload[:] = np.roll(request.payload, 1, axis=0)
            async for event in stream(batch):
                yield event

        backend.block, backend.stream = crooked_block, crooked_stream
        return backend
