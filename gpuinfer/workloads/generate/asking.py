"""Asks for the answers to one prompt: at once, or piece by piece when there are more than a batch can take."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from gpuinfer.api import Infer
from gpuinfer.engine.insisting import insist
from gpuinfer.errors import BadResult, unwrap
from gpuinfer.generation import Generation, Part, Prompt

TRIES = 2000  # at a queue that is full


class Asker:
    """Asks with at most `rows` rows under way, all askers together; a request has at most `widest`."""

    def __init__(self, infer: Infer, rows: int, widest: int) -> None:
        self._infer, self._room, self._widest = infer, Room(rows), widest

    async def ask(self, prompt: Prompt, reads: Callable[[Part], None] | None = None) -> Generation:
        """Raises what `infer` raises; a full queue is tried again, as others may ask the same backend.

        `reads` is told the parts of the answer as they come.
        """
        if prompt.samples <= self._widest:
            return await self._one(prompt, reads)
        try:
            async with asyncio.TaskGroup() as group:
                pieces = [
                    group.create_task(self._one(piece, moved(reads, piece.first_sample - prompt.first_sample)))
                    for piece in split(prompt, self._widest)
                ]
        except BaseExceptionGroup as errors:
            raise unwrap(errors) from None
        return joined([piece.result() for piece in pieces])

    async def _one(self, prompt: Prompt, reads: Callable[[Part], None] | None) -> Generation:
        rows = prompt.samples
        taken = await self._room.take(rows)
        try:
            if reads is None:
                found = await insist(lambda: self._infer(prompt, rows=rows), TRIES)
            else:
                found = await insist(lambda: self._read(prompt, reads), TRIES)
        finally:
            self._room.give(taken)
        if type(found) is not Generation or len(found.completions) != rows:
            raise BadResult(f"the backend answered a prompt of {rows} samples with {found!r:.80}. Use another backend.")
        return found

    async def _read(self, prompt: Prompt, reads: Callable[[Part], None]) -> Any:
        async with self._infer.stream(prompt, rows=prompt.samples) as stream:
            async for part in stream:
                reads(part)
            return stream.result


def moved(reads: Callable[[Part], None] | None, first: int) -> Callable[[Part], None] | None:
    """For the piece of a prompt whose samples begin at `first`."""
    if reads is None or not first:
        return reads
    return lambda part: reads(msgspec.structs.replace(part, sample=part.sample + first))


def split(prompt: Prompt, widest: int) -> list[Prompt]:
    """Prompts of at most so many samples, which draw the same answers as the whole."""
    first, end = prompt.first_sample, prompt.first_sample + prompt.samples
    return [
        msgspec.structs.replace(prompt, first_sample=start, samples=min(widest, end - start))
        for start in range(first, end, widest)
    ]


def joined(pieces: Sequence[Generation]) -> Generation:
    """The answers of all pieces as one."""
    return msgspec.structs.replace(
        pieces[0],
        completions=tuple(one for piece in pieces for one in piece.completions),
        first_token_s=min(piece.first_token_s for piece in pieces),
        seconds=max(piece.seconds for piece in pieces),
    )


class Room:
    """Room for so many rows; first come, first let in. What is wider than all of it gets in alone."""

    def __init__(self, rows: int) -> None:
        self._rows = self._free = rows
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, rows: int) -> int:
        """Wait for room; returns what to give back."""
        rows = min(rows, self._rows)
        if self._free >= rows and not self._waiting:
            self._free -= rows
            return rows
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((rows, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(rows)
            raise
        return rows

    def give(self, rows: int) -> None:
        self._free += rows
        while self._waiting and (self._waiting[0][1].cancelled() or self._waiting[0][0] <= self._free):
            wanted, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._free -= wanted
                turn.set_result(None)
