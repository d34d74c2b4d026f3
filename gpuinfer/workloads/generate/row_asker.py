"""Asks models for the answers of rows, as many at once as keep the models busy, and counts what became of them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence

from msgspec import Struct

from gpuinfer.api import Infer
from gpuinfer.errors import BackendDied, BackendError, BadPrompt, BadResult, GpuinferError, RequestError
from gpuinfer.generation import Generation
from gpuinfer.host import error_text
from gpuinfer.serving.openai.row_names import NamedRow
from gpuinfer.serving.prompt_requests import PromptRequester, most_samples, rows_in_flight
from gpuinfer.workloads.generate.answer_lines import LineWriter


def place_of(row: NamedRow) -> str:
    """Where it stands in the input, for people."""
    places = [row.file] if row.file else []
    if row.file or row.line != row.number:
        places.append(f"line {row.line}")
    return f"row {row.number}" + (f" ({', '.join(places)})" if places else "")


class RowOutcome(Struct, array_like=True):
    """What became of a row, or of several together."""

    answered: int = 0
    failed: int = 0
    bad: int = 0  # of those that failed, rows that cannot be answered as they are
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    failure: str = ""  # the first

    @classmethod
    def of_answer(cls, generation: Generation) -> RowOutcome:
        return cls(
            answered=1,
            input_tokens=generation.prompt_tokens,
            output_tokens=sum([len(one.tokens) for one in generation.completions]),
            cached_tokens=generation.cached_tokens,
        )

    @classmethod
    def of_error(cls, error: GpuinferError, row: NamedRow | None = None) -> RowOutcome:
        """`row`: of an input, whose place the message begins with."""
        place = "" if row is None else f"{place_of(row)}: "
        return cls(failed=1, bad=int(isinstance(error, BadPrompt)), failure=place + error_text.safe_str(error))

    def add(self, other: RowOutcome) -> None:
        self.answered += other.answered
        self.failed += other.failed
        self.bad += other.bad
        self.input_tokens += other.input_tokens
        self.output_tokens += other.output_tokens
        self.cached_tokens += other.cached_tokens
        self.failure = self.failure or other.failure


class RowCounts(RowOutcome):
    """The rows of a run by outcome."""

    read: int = 0
    before: int = 0  # that an earlier run has done
    ended: bool = False  # the input has no more rows

    @property
    def done(self) -> int:
        return self.before + self.answered + self.failed

    @property
    def none_right(self) -> bool:
        """Whether all rows of the input are bad ones, and there is one."""
        return self.ended and self.bad == self.done > 0


class AnswerSink(ABC):
    """Where lines of rows go."""

    @abstractmethod
    async def near(self, row: NamedRow) -> None:
        """Wait until the row may be sent to the model, where it should not be too far ahead of others."""

    @abstractmethod
    def put(self, row: NamedRow, line: bytes, outcome: RowOutcome) -> None:
        """The line of a row that was answered."""

    @property
    @abstractmethod
    def full(self) -> bool:
        """Whether no more should be put before `room`."""

    @abstractmethod
    async def room(self) -> None: ...


class WaitingRows:
    """Rows that wait for a request, in their order. Belongs to the event loop."""

    def __init__(self) -> None:
        self._rows: deque[NamedRow] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()  # of those who wait for a row
        self._shorter = asyncio.Event()
        self._short = 0  # the length that is waited for
        self._ended = False

    def put(self, rows: Sequence[NamedRow]) -> None:
        self._rows.extend(rows)
        self._wake(len(rows))

    def end(self) -> None:
        """No more rows will come."""
        self._ended = True
        self._wake(len(self._idle))

    @property
    def idle(self) -> int:
        """How many tasks wait for a row."""
        return len(self._idle)

    def drop(self) -> None:
        """End, and leave out the rows that wait."""
        self._rows.clear()
        self.end()

    async def next(self) -> NamedRow | None:
        """The next row; None when there are no more."""
        while not self._rows:
            if self._ended:
                return None
            waiting = asyncio.get_running_loop().create_future()
            self._idle.append(waiting)
            await waiting
        row = self._rows.popleft()
        if len(self._rows) <= self._short:
            self._shorter.set()
        return row

    async def short(self, most: int) -> None:
        """Wait until no more than `most` rows wait. One task at a time."""
        self._short = most
        while len(self._rows) > most:
            self._shorter.clear()
            await self._shorter.wait()

    def _wake(self, most: int) -> None:
        for _ in range(min(most, len(self._idle))):
            waiting = self._idle.popleft()
            if not waiting.done():
                waiting.set_result(None)


class RowAsker:
    """Asks for the answers of rows. `infers`: the ways to several models by the names that rows give, or the way to one
    by "". `under_way`: how many rows it has with the models at most.
    """

    def __init__(self, infers: Mapping[str, Infer], writer: LineWriter) -> None:
        self._writer = writer
        self._askers = {
            name: PromptRequester(one, rows_in_flight(one.limits), most_samples(one.limits))
            for name, one in infers.items()
        }
        self.under_way = sum(rows_in_flight(one.limits) for one in infers.values())
        self._time = asyncio.get_running_loop().time

    async def run(self, rows: WaitingRows, sink: AnswerSink) -> None:
        """Until the queue has ended and all its rows are answered. Raises, as an exception group, when the work cannot
        go on.
        """
        async with asyncio.TaskGroup() as group:
            for _ in range(self.under_way):
                group.create_task(self._ask_on(rows, sink))

    async def _ask_on(self, rows: WaitingRows, sink: AnswerSink) -> None:
        while (row := await rows.next()) is not None:
            await sink.near(row)
            sink.put(row, *await self._answer(row))
            if sink.full:
                await sink.room()

    async def _answer(self, row: NamedRow) -> tuple[bytes, RowOutcome]:
        began = self._time()
        try:
            if row.error is not None:
                raise row.error
            # The one model, whatever a request in OpenAI's form names, or the one that the row names.
            asker = self._askers[""] if "" in self._askers else self._askers[row.model or ""]
            generation = await asker.ask(row.prompt)
            try:
                line = self._writer.answer(row, generation, self._time() - began)
            except Exception as error:  # only its own row fails
                why = f"the answer cannot be written ({error_text.full_message(error)})"
                raise BadResult(f"{why}. Leave out what is unusual in the row.") from error
        except BackendDied:
            raise
        except (RequestError, BackendError) as error:
            return self._writer.error(row, error), RowOutcome.of_error(error, row)
        return line, RowOutcome.of_answer(generation)
