"""Generate over many machines: the coordinator reads the input and writes the output, nodes answer rows.

The coordinator alone parses and names rows in order, since a name depends on the rows before. A node gets a row as it
stands in the input with its names, and gives back the line that the output has of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from gpuinfer.division import Division, DivisionProgress, Interval, RangeFeed, WorkRange
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.serving.openai.prompt_rows import PromptRowReader
from gpuinfer.serving.openai.row_names import NamedRow, Namer, named_row
from gpuinfer.workloads.generate.answer_lines import LineWriter
from gpuinfer.workloads.generate.answer_output import AnswerOutput
from gpuinfer.workloads.generate.input_rows import InputSource
from gpuinfer.workloads.generate.opened_output import OpenedOutput
from gpuinfer.workloads.generate.row_asker import AnswerSink, RowAsker, RowCounts, RowOutcome, WaitingRows
from gpuinfer.workloads.generate.row_intake import RowIntake

AHEAD = 8192  # rows that are read before they are wanted
RANGE_ROWS = 2048  # of a range at most: its lines come back together
HELD_BYTES = 256 << 20  # of lines that wait for an earlier one, before no more rows are leased
READ_S = 0.1  # how long `read` waits for a silent input
FINISH_S = 5.0  # for rows that are under way when a node is to stop


class RowItem(Struct, array_like=True, gc=False):
    """What a node needs of a row next to its unit's number. `raw`: as it stands in the input; `id`: empty where the row
    has a number as its id.
    """

    raw: bytes
    digest: str
    number: int
    line: int
    id: str = ""
    file: str | None = None


class RangeAnswers(Struct, array_like=True):
    """The records of a range: a line for each row."""

    lines: list[bytes]
    outcome: RowOutcome


class RowRecord(NamedTuple):
    """A unit's record."""

    line: bytes
    outcome: RowOutcome


_encode = msgspec.msgpack.Encoder().encode
_decode_item = msgspec.msgpack.Decoder(RowItem).decode
_decode_range = msgspec.msgpack.Decoder(RangeAnswers).decode


def pack_row_records(records: Sequence[RowRecord]) -> bytes:
    """The bytes of a range."""
    outcome = RowOutcome()
    for record in records:
        outcome.add(record.outcome)
    return _encode(RangeAnswers([record.line for record in records], outcome))


def _item_of(row: NamedRow) -> bytes:
    assert isinstance(row.raw, bytes)  # what cannot be used is an error on the coordinator already
    return _encode(RowItem(row.raw, row.digest, row.number, row.line, row.id if type(row.id) is str else "", row.file))


def row_of_item(reader: PromptRowReader, unit: int, item: bytes) -> NamedRow:
    """The row as the coordinator has named it."""
    found = _decode_item(item)
    parsed = reader.read((found.line, found.raw))
    row = named_row(parsed, found.number, parsed.id if isinstance(parsed.id, int) else found.id, found.digest)
    row.place, row.file = unit, found.file
    return row


class OpenedRun(NamedTuple):
    """Input and output of a run, and all that decides what an answer is."""

    source: InputSource
    output: OpenedOutput
    settings: dict[str, Any]


Ended = Callable[[RowCounts, OpenedOutput, int | None], None]
"""Says what has become of a run: its counts, its output, and how many lines wait for an earlier one, None when it is
complete.
"""


class GenerateDivision(Division):
    """The coordinator's side. `open_run` claims input and output, for `Backend.arithmetic`; `most` ends the input
    after so many rows.
    """

    unit = "rows"
    least = 8

    def __init__(
        self,
        open_run: Callable[[str], OpenedRun],
        reader: PromptRowReader,
        writer: LineWriter,
        ended: Ended,
        *,
        ordered: bool = False,
        most: int | None = None,
    ) -> None:
        self.counts = RowCounts()
        self._open_run, self._reader, self._writer, self._ended = open_run, reader, writer, ended
        self._ordered, self._most = ordered, most
        self._opened: OpenedRun
        self._answers: AnswerOutput
        self._reading: asyncio.Task[None] | None = None
        self._ready: deque[NamedRow] = deque()  # read, and not leased
        self._arrived, self._wanted = asyncio.Event(), asyncio.Event()
        self._units = 0  # leased
        self._places: dict[int, int] = {}  # of units that are leased and not kept, in the output; only with order

    @property
    def total(self) -> int | None:
        return self._units + len(self._ready) if self.counts.ended else None

    @property
    def progress(self) -> DivisionProgress:
        """Rows of an earlier run, and rows that cannot be read: neither is a unit."""
        counts, units = self.counts, self._units + len(self._ready)
        done = counts.read - counts.before - units
        return DivisionProgress(counts.before, done, counts.failed, counts.failure)

    @property
    def settings(self) -> Mapping[str, Any]:
        return self._opened.settings

    def open(self) -> Sequence[Interval]:
        """None: units are numbered among the rows that this run answers."""
        self._opened = self._open_run(self.arithmetic)
        return ()

    def begin(self) -> None:
        if self._reading is not None:
            return
        source, output, settings = self._opened
        self._answers = AnswerOutput(output, self.counts, ordered=self._ordered)
        intake = RowIntake(
            source,
            self._reader,
            Namer(settings),
            self._writer,
            output,
            self._answers,
            self.counts,
            most=self._most,
        )
        self._reading = asyncio.create_task(self._read_ahead(intake))

    async def _read_ahead(self, intake: RowIntake) -> None:
        try:
            async for rows in intake.blocks():
                self._ready.extend(rows)
                self._arrived.set()
                while len(self._ready) >= AHEAD:
                    self._wanted.clear()
                    await self._wanted.wait()
        finally:
            self._arrived.set()

    async def read(self, most: int) -> WorkRange | None:
        self.begin()
        start = self._units
        if self._places and self._answers.held_bytes > HELD_BYTES:  # a line that was given out will let some go
            return WorkRange(start, start)
        if not self._ready and self._reading is not None and not self._reading.done():
            self._arrived.clear()
            await asyncio.wait({self._reading, arrived := asyncio.ensure_future(self._arrived.wait())}, timeout=READ_S)
            arrived.cancel()
        if not self._ready:
            if self._reading is None or not self._reading.done():
                return WorkRange(start, start)
            try:
                self._reading.result()
            except UsageError as error:  # of the input's form: the run fails, not the node that requests rows
                raise WorkError(str(error)) from error
            return None
        rows = [self._ready.popleft() for _ in range(min(most, RANGE_ROWS, len(self._ready)))]
        self._wanted.set()
        self._units += len(rows)
        if self._ordered:
            self._places.update(zip(range(start, self._units), [row.place for row in rows], strict=True))
        return WorkRange(start, self._units, tuple([_item_of(row) for row in rows]))

    async def keep(self, work: WorkRange, records: bytes | Path) -> None:
        self.begin()
        if isinstance(records, Path):
            path, records = records, await asyncio.to_thread(records.read_bytes)
            path.unlink()
        try:
            found = _decode_range(records)
        except msgspec.DecodeError as error:
            raise WorkError(f"a node sent answers that cannot be read ({error}). Let all run one version.") from error
        numbers = range(work.start, work.stop)
        if len(found.lines) != len(numbers):
            raise WorkError(
                f"a node sent {len(found.lines)} lines for {len(numbers)} rows. Let all machines run one version."
            )
        places = [self._places.pop(number) for number in numbers] if self._ordered else numbers
        self._answers.put_range(places, found.lines, found.outcome)
        await self._answers.room()

    async def flush(self) -> None:
        self.begin()
        await self._answers.flush()

    async def close(self, complete: bool) -> None:
        """Raises `WorkError` when not one row was answered."""
        self.begin()
        source, output, _ = self._opened
        try:
            source.stop()
            if self._reading is not None:
                self._reading.cancel()
                await asyncio.wait({self._reading})
            complete = complete and self.counts.ended
            await self._answers.close(complete)
            if complete:
                await asyncio.to_thread(output.finish, useless=self.counts.none_right)
        finally:
            output.close()
            source.close()
        self._ended(self.counts, output, None if complete else self._answers.waiting)


class RangeAnswerer(AnswerSink):
    """A node's side: answers the rows of a feed."""

    def __init__(self, asker: RowAsker, feed: RangeFeed, reader: PromptRowReader) -> None:
        self.counts = RowCounts()
        self._asker, self._feed, self._reader = asker, feed, reader
        self._rows = WaitingRows()
        self.under_way = asker.under_way
        self._ahead = max(1, asker.under_way // 4)  # rows that wait until one that is under way is answered

    async def run(self, stopping: asyncio.Event) -> None:
        """Until the feed has no more; once `stopping` is set, for as long as `FINISH_S` with what is under way.

        Raises, as an exception group, when the work cannot go on.
        """
        async with asyncio.TaskGroup() as group:
            fetching = group.create_task(self._fetch())
            answering = group.create_task(self._asker.run(self._rows, self))
            stop = group.create_task(stopping.wait())
            await asyncio.wait({answering, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                fetching.cancel()
                self._rows.drop()
                await asyncio.wait({answering}, timeout=FINISH_S)
            for task in (fetching, answering, stop):
                task.cancel()

    async def _fetch(self) -> None:
        while (work := await self._feed.take(self._ahead + self._rows.idle)) is not None:
            numbers = range(work.start, work.stop)
            self._rows.put([row_of_item(self._reader, *unit) for unit in zip(numbers, work.items, strict=True)])
            await self._rows.short(self._ahead // 2)
            await self._feed.room()
        self._rows.end()

    async def near(self, row: NamedRow) -> None:
        return

    def put(self, row: NamedRow, line: bytes, outcome: RowOutcome) -> None:
        self.counts.add(outcome)
        self._feed.done(row.place, RowRecord(line, outcome))

    full = False

    async def room(self) -> None:
        return
