"""When a finished game counts: once its shard is on the disk, or at once where nothing is written."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Protocol

import numpy as np

from gpuinfer.api import Infer
from gpuinfer.positions import records

SHARD_S, SHARD_BYTES = 10.0, 32 << 20  # whichever comes first: games finished longer ago are on disk


class Keeper(Protocol):
    """Takes in finished games, as `Arena.collect` gives them, and says which of them count."""

    async def add(self, part: dict[str, np.ndarray]) -> None: ...

    async def write_if_due(self) -> None: ...

    async def flush(self) -> None:
        """All games that were added count when this returns."""
        ...

    def take(self) -> list[int]:
        """The numbers of the games that count now and have not been taken before."""
        ...


class Unwritten:
    """Keeps the numbers alone."""

    def __init__(self) -> None:
        self._kept: list[int] = []

    async def add(self, part: dict[str, np.ndarray]) -> None:
        self._kept += part["finished"].tolist()

    async def write_if_due(self) -> None: ...

    async def flush(self) -> None: ...

    def take(self) -> list[int]:
        kept, self._kept = self._kept, []
        return kept


class ShardWriter(Unwritten):
    """Collects finished games and writes them as shards, in a thread so that search and model go on."""

    def __init__(self, path: Path, infer: Infer) -> None:
        super().__init__()
        self._folder = records.Folder(path)
        self._lane = infer.lane("records")
        self._parts: list[dict[str, np.ndarray]] = []
        self._bytes = 0
        self._oldest = 0.0
        self._turn = asyncio.Lock()
        self._writing: asyncio.Task[None] | None = None

    async def add(self, part: dict[str, np.ndarray]) -> None:
        """Raises WorkError when an earlier shard could not be written."""
        if not self._parts:
            self._oldest = time.monotonic()
        self._parts.append(part)
        self._bytes += sum(array.nbytes for array in part.values())
        await self.write_if_due()

    async def write_if_due(self) -> None:
        """Begin a shard when enough has come together, or the oldest game has waited long enough."""
        if self._parts and (self._bytes > SHARD_BYTES or time.monotonic() > self._oldest + SHARD_S):
            await self._start()

    async def flush(self) -> None:
        """Everything is on disk when this returns. Raises WorkError when it cannot be."""
        async with self._turn:
            await self._written()
            self._begin()
            await self._written()

    async def _start(self) -> None:
        async with self._turn:  # one shard at a time: memory stays bounded when the disk is slow
            await self._written()
            self._begin()

    async def _written(self) -> None:
        """Wait for the shard that is being written. Whoever waits may be cancelled; the shard is not."""
        if self._writing is not None:
            await asyncio.shield(self._writing)
            self._writing = None

    def _begin(self) -> None:
        if self._parts:
            parts, self._parts, self._bytes = self._parts, [], 0
            self._writing = asyncio.create_task(self._store(parts))

    async def _store(self, parts: list[dict[str, np.ndarray]]) -> None:
        self._kept += await asyncio.to_thread(self._write, parts)

    def _write(self, parts: list[dict[str, np.ndarray]]) -> list[int]:
        self._lane.enter("record")
        try:
            whole = records.merge(parts)
            self._folder.write(whole)
        finally:
            self._lane.enter("idle")
        return [int(game) for game in whole["finished"]]
