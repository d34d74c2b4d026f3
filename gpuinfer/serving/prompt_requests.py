"""Prompts sent to the model with a bounded number of rows under way. A prompt with more samples than a batch can take
is split into several requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from gpuinfer.api import Infer, Limits
from gpuinfer.engine.stream import retry_when_full
from gpuinfer.errors import BadResult, unwrap
from gpuinfer.generation import Generation, Part, Prompt

MOST_UNDER_WAY = 16_384  # rows, but for backends that take more at once
TRIES = 2000  # at a queue that is full, as others may ask the same backend
LEAST_S = 1e-3  # of a timeout that is over


class PromptRequester:
    """Sends prompts with at most `rows` rows under way in total; a request has at most `widest` rows. `tries`: how
    often a request is sent at most while the queue is full. `request`: further arguments of `infer` for each, such as
    its priority. A `timeout` counts from the call of `ask`, for all requests of a prompt together.
    """

    def __init__(self, infer: Infer, rows: int, widest: int, *, tries: int = TRIES, **request: Any) -> None:
        self._infer, self._room, self._widest, self._tries = infer, RowBudget(rows), widest, tries
        self._timeout, self._request = request.pop("timeout", None), request

    async def ask(self, prompt: Prompt, reads: Callable[[Part], None] | None = None) -> Generation:
        """Raises what `infer` raises.

        `reads` is told the parts of the answer as they come.
        """
        until = None if self._timeout is None else asyncio.get_running_loop().time() + self._timeout
        if prompt.samples <= self._widest:
            return await self._one(prompt, reads, until)
        first, end = prompt.first_sample, prompt.first_sample + prompt.samples
        try:
            async with asyncio.TaskGroup() as group:
                tasks = []
                for start in range(first, end, self._widest):  # draws the same answers as the whole
                    count = min(self._widest, end - start)
                    piece = msgspec.structs.replace(prompt, first_sample=start, samples=count)
                    tasks.append(group.create_task(self._one(piece, _shifted(reads, start - first), until)))
        except BaseExceptionGroup as errors:
            raise unwrap(errors) from None
        pieces = [task.result() for task in tasks]
        return msgspec.structs.replace(
            pieces[0],
            completions=tuple(one for piece in pieces for one in piece.completions),
            first_token_s=min(piece.first_token_s for piece in pieces),
            seconds=max(piece.seconds for piece in pieces),
        )

    async def _one(self, prompt: Prompt, reads: Callable[[Part], None] | None, until: float | None) -> Generation:
        rows = prompt.samples

        async def send() -> Any:
            left: dict[str, Any] = (
                {} if until is None else {"timeout": max(LEAST_S, until - asyncio.get_running_loop().time())}
            )
            if reads is None:
                return await self._infer(prompt, rows=rows, **self._request, **left)
            async with self._infer.stream(prompt, rows=rows, **self._request, **left) as stream:
                async for part in stream:
                    reads(part)
                return stream.result

        taken = await self._room.take(rows)
        try:
            found = await retry_when_full(send, self._tries)
        finally:
            self._room.give(taken)
        if type(found) is not Generation or len(found.completions) != rows:
            raise BadResult(f"the backend answered a prompt of {rows} samples with {found!r:.80}. Use another backend.")
        return found


def _shifted(reads: Callable[[Part], None] | None, first: int) -> Callable[[Part], None] | None:
    """For the piece of a prompt whose samples begin at `first`."""
    if reads is None or not first:
        return reads
    return lambda part: reads(msgspec.structs.replace(part, sample=part.sample + first))


class RowBudget:
    """A semaphore of rows, first come, first served. A request wider than all of them runs alone."""

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


def rows_in_flight(limits: Limits) -> int:
    """How many rows to have under way: enough that a free slot always finds one that waits."""
    once = limits.slots or limits.max_rows * limits.in_flight
    return min(3 * once, max(once + limits.max_rows, MOST_UNDER_WAY))


def most_samples(limits: Limits) -> int:
    """How many samples one request may ask for."""
    return limits.max_rows if limits.slots is None else min(limits.max_rows, limits.slots)
