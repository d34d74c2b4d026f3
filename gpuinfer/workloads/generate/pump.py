"""Sends rows to the model and answers to the output, with a bounded number of both in memory.

A prompt with more samples than a batch can take is split into several requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from gpuinfer.api import Infer, Limits
from gpuinfer.engine.stream import retry_when_full
from gpuinfer.errors import (
    BackendDied,
    BackendError,
    BadPrompt,
    BadResult,
    GpuinferError,
    RequestError,
    WorkError,
    unwrap,
)
from gpuinfer.generation import Generation, Part, Prompt
from gpuinfer.host import error_text
from gpuinfer.serving.openai.prompt_rows import PromptRowReader
from gpuinfer.serving.openai.row_splitter import Piece, RowSplitter
from gpuinfer.workloads.generate.answer_lines import LineWriter, digest_key
from gpuinfer.workloads.generate.input_rows import InputSource, NamedRow, Namer
from gpuinfer.workloads.generate.output import OpenedOutput
from gpuinfer.workloads.generate.output_writer import OrderedOutput, OutputWriter, UnorderedOutput

TRIES = 2000  # at a queue that is full


class PromptRequester:
    """Sends prompts with at most `rows` rows under way in total; a request has at most `widest` rows."""

    def __init__(self, infer: Infer, rows: int, widest: int) -> None:
        self._infer, self._room, self._widest = infer, RowBudget(rows), widest

    async def ask(self, prompt: Prompt, reads: Callable[[Part], None] | None = None) -> Generation:
        """Raises what `infer` raises; a full queue is tried again, as others may ask the same backend.

        `reads` is told the parts of the answer as they come.
        """
        if prompt.samples <= self._widest:
            return await self._one(prompt, reads)
        first, end = prompt.first_sample, prompt.first_sample + prompt.samples
        try:
            async with asyncio.TaskGroup() as group:
                tasks = []
                for start in range(first, end, self._widest):  # draws the same answers as the whole
                    count = min(self._widest, end - start)
                    piece = msgspec.structs.replace(prompt, first_sample=start, samples=count)
                    tasks.append(group.create_task(self._one(piece, _shifted(reads, start - first))))
        except BaseExceptionGroup as errors:
            raise unwrap(errors) from None
        pieces = [task.result() for task in tasks]
        return msgspec.structs.replace(
            pieces[0],
            completions=tuple(one for piece in pieces for one in piece.completions),
            first_token_s=min(piece.first_token_s for piece in pieces),
            seconds=max(piece.seconds for piece in pieces),
        )

    async def _one(self, prompt: Prompt, reads: Callable[[Part], None] | None) -> Generation:
        rows = prompt.samples
        taken = await self._room.take(rows)
        try:
            if reads is None:
                found = await retry_when_full(lambda: self._infer(prompt, rows=rows), TRIES)
            else:
                found = await retry_when_full(lambda: self._read(prompt, reads), TRIES)
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


BLOCK = 512  # rows that are parsed before anything else may run
MOST_UNDER_WAY = 16_384


class RowCounts:
    """Counts of rows by outcome."""

    def __init__(self) -> None:
        self.read = self.before = self.answered = self.failed = 0
        self.bad = 0  # of those that failed, rows that cannot be answered as they are
        self.input_tokens = self.output_tokens = self.cached_tokens = 0
        self.ended = False  # the input has no more rows
        self.first_failure: GpuinferError | None = None

    @property
    def done(self) -> int:
        return self.before + self.answered + self.failed

    def answer(self, generation: Generation) -> None:
        self.answered += 1
        self.input_tokens += generation.prompt_tokens
        self.cached_tokens += generation.cached_tokens
        self.output_tokens += sum([len(one.tokens) for one in generation.completions])

    @property
    def none_right(self) -> bool:
        """Whether all rows of the input are bad ones, and there is one."""
        return self.ended and self.bad == self.done > 0

    def fail(self, error: GpuinferError) -> None:
        self.failed += 1
        self.bad += isinstance(error, BadPrompt)
        self.first_failure = self.first_failure or error


def rows_in_flight(limits: Limits) -> int:
    """How many rows to have under way: enough that a free slot always finds one that waits."""
    once = limits.slots or limits.max_rows * limits.in_flight
    return min(3 * once, max(once + limits.max_rows, MOST_UNDER_WAY))


def most_samples(limits: Limits) -> int:
    """How many samples one request may ask for."""
    return limits.max_rows if limits.slots is None else min(limits.max_rows, limits.slots)


class Pump:
    """Everything between an opened input and an opened output. `most` ends the input after so many rows."""

    def __init__(
        self,
        infer: Infer,
        source: InputSource,
        output: OpenedOutput,
        reader: PromptRowReader,
        namer: Namer,
        writer: LineWriter,
        *,
        ordered: bool = False,
        most: int | None = None,
    ) -> None:
        self.counts = RowCounts()
        self.splitter = RowSplitter()
        self._source, self._output = source, output
        self._reader, self._namer, self._writer = reader, namer, writer
        limits = infer.limits
        self.under_way = rows_in_flight(limits)
        self._asker = PromptRequester(infer, self.under_way, most_samples(limits))
        self._enter = infer.lane("input").enter
        self._outlet = OutputWriter(output.descriptor, output.name, infer.lane("output"), output.aside, output.path)
        window = 4 * self.under_way
        self._order: OrderedOutput | UnorderedOutput = (
            OrderedOutput(self._outlet, window, output.left) if ordered else UnorderedOutput(self._outlet)
        )
        self._most = most
        self._places = 0  # given away
        self._jobs: deque[NamedRow] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()  # tasks without a row
        self._hungry = asyncio.Event()
        self._time = asyncio.get_running_loop().time

    async def run(self) -> None:
        """Until every row is answered and on the disk. Cancelled, it keeps what is answered.

        Raises `WorkError` when the work cannot go on; as an exception group.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read())
                for _ in range(self.under_way):
                    group.create_task(self._ask_on())
            for line in self._output.rest():
                self._outlet.put(line)
                await self._outlet.room()
        finally:
            self._source.stop()
            if self._output.aside is None:  # no run can go on: better out of order than lost
                with contextlib.suppress(WorkError):
                    self._order.let_go()
            await self._outlet.close()

    @property
    def waiting(self) -> int:
        """How many answers wait for an earlier one."""
        return self._order.waiting

    # Reading

    async def _read(self) -> None:
        self._enter("read")
        async for chunk in self._source.chunks():
            self._enter("understand")
            if not await self._take_all(self.splitter.feed(chunk)):
                break
            self._enter("read")
        else:
            self._enter("understand")
            await self._take_all(self.splitter.end())
        self._enter("idle")
        self.counts.ended = True
        self._wake(len(self._idle))

    async def _take_all(self, pieces: list[Piece]) -> bool:
        """Whether more rows are wanted."""
        for start in range(0, len(pieces), BLOCK):
            left = BLOCK if self._most is None else self._most - self.counts.read
            if left <= 0:
                return False
            await self._take(pieces[start : start + min(BLOCK, left)])
        return self._most is None or self.counts.read < self._most

    async def _take(self, pieces: list[Piece]) -> None:
        """Parse some rows and queue those that are not done. Returns when the queue is short enough."""
        self._enter("understand")
        jobs = self._namer.name([self._reader.read(piece) for piece in pieces])
        self.counts.read += len(jobs)
        done = self._output.done
        before = done.has([digest_key(job.digest) for job in jobs]) if len(done) else [False] * len(jobs)
        for job, was_done in zip(jobs, before, strict=True):
            line = self._output.take(job.digest)
            self.counts.before += was_done or line is not None
            if was_done:
                continue
            job.place, self._places = self._places, self._places + 1
            if line is not None:
                self._order.add(job.place, line, kept=True)
            elif job.error is not None:
                self._fail(job, job.error)
            else:
                self._jobs.append(job)
        self._wake(len(self._jobs))
        self._enter("idle")
        await asyncio.sleep(0)
        await self._outlet.room()
        await self._order.near(self._places)
        while len(self._jobs) > self.under_way:
            self._hungry.clear()
            await self._hungry.wait()

    def _wake(self, most: int) -> None:
        for _ in range(min(most, len(self._idle))):
            waiting = self._idle.popleft()
            if not waiting.done():
                waiting.set_result(None)

    # Asking

    async def _ask_on(self) -> None:
        while (job := await self._next()) is not None:
            await self._order.near(job.place)
            began = self._time()
            try:
                generation = await self._asker.ask(job.prompt)
                try:
                    line = self._writer.answer(job, generation, self._time() - began)
                except Exception as error:  # only its own row fails
                    why = f"the answer cannot be written ({error_text.full_message(error)})"
                    raise BadResult(f"{why}. Leave out what is unusual in the row.") from error
            except BackendDied:
                raise
            except (RequestError, BackendError) as error:
                self._fail(job, error)
            else:
                self.counts.answer(generation)
                self._order.add(job.place, line)
            if self._outlet.full:
                await self._outlet.room()

    def _fail(self, job: NamedRow, error: GpuinferError) -> None:
        self.counts.fail(error)
        self._order.add(job.place, self._writer.error(job, error))

    async def _next(self) -> NamedRow | None:
        """The next row to ask; None when there are no more."""
        while not self._jobs:
            if self.counts.ended:
                return None
            waiting = asyncio.get_running_loop().create_future()
            self._idle.append(waiting)
            await waiting
        job = self._jobs.popleft()
        if len(self._jobs) <= self.under_way:
            self._hungry.set()
        return job
