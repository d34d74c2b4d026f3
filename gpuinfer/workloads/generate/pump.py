"""Sends rows to the model and answers to the output, with a bounded number of both in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping

from gpuinfer.api import Infer
from gpuinfer.errors import (
    BackendDied,
    BackendError,
    BadPrompt,
    BadResult,
    GpuinferError,
    RequestError,
    WorkError,
)
from gpuinfer.generation import Generation
from gpuinfer.host import error_text
from gpuinfer.serving.openai.prompt_rows import PromptRowReader
from gpuinfer.serving.openai.row_names import NamedRow, Namer
from gpuinfer.serving.openai.row_splitter import Piece
from gpuinfer.serving.prompt_requests import PromptRequester, most_samples, rows_in_flight
from gpuinfer.workloads.generate.answer_lines import LineWriter, digest_key
from gpuinfer.workloads.generate.input_rows import InputSource
from gpuinfer.workloads.generate.opened_output import OpenedOutput
from gpuinfer.workloads.generate.output_writer import OrderedOutput, UnorderedOutput

BLOCK = 512  # rows that are parsed before anything else may run


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


class Pump:
    """Everything between an opened input and an opened output. `infers`: the ways to several models by the names that
    rows give, or the way to one by "". `most` ends the input after so many rows.
    """

    def __init__(
        self,
        infers: Mapping[str, Infer],
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
        self.source, self._output = source, output
        self._reader, self._namer, self._writer = reader, namer, writer
        self._askers = {
            name: PromptRequester(one, rows_in_flight(one.limits), most_samples(one.limits))
            for name, one in infers.items()
        }
        self.under_way = sum(rows_in_flight(one.limits) for one in infers.values())
        infer = next(iter(infers.values()))
        self._enter = infer.lane("input").enter
        self._outlet = output.writer(infer.lane("output"))
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
            self.source.stop()
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
        async for pieces in self.source.blocks():
            if not await self._take_all(pieces):
                break
            self._enter("read")
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
        self._output.check_names(jobs)
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
                generation = await self._asker(job).ask(job.prompt)
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

    def _asker(self, job: NamedRow) -> PromptRequester:
        """Of the one model, whatever a request in OpenAI's form names, or of the one that the row names."""
        return self._askers[""] if "" in self._askers else self._askers[job.model or ""]

    def _fail(self, job: NamedRow, error: GpuinferError) -> None:
        self.counts.fail(error)
        self._order.add(job.place, self._writer.error(job, error, self.source.file_of(job.number)))

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
