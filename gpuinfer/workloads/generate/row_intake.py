"""Reads the input once, in order: names rows, leaves out those that are done, and yields those to be answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from gpuinfer.serving.openai.prompt_rows import PromptRowReader
from gpuinfer.serving.openai.row_names import NamedRow, Namer
from gpuinfer.serving.openai.row_splitter import Piece
from gpuinfer.workloads.generate.answer_lines import LineWriter, digest_key
from gpuinfer.workloads.generate.answer_output import AnswerOutput
from gpuinfer.workloads.generate.input_rows import InputSource
from gpuinfer.workloads.generate.opened_output import OpenedOutput
from gpuinfer.workloads.generate.row_asker import RowCounts, RowOutcome

BLOCK = 512  # rows that are parsed before anything else may run


class RowIntake:
    """Rows from `source`, as far as `output` does not hold their answers. Rows that are errors by themselves go to
    `answers` at once. `most` ends the input after so many rows; `enter` learns what the time is spent on.
    """

    def __init__(
        self,
        source: InputSource,
        reader: PromptRowReader,
        namer: Namer,
        writer: LineWriter,
        output: OpenedOutput,
        answers: AnswerOutput,
        counts: RowCounts,
        *,
        most: int | None = None,
        enter: Callable[[str], None] = lambda station: None,
    ) -> None:
        self._source, self._reader, self._namer, self._writer = source, reader, namer, writer
        self._output, self._answers, self._counts = output, answers, counts
        self._most, self._enter = most, enter
        self._places = 0  # passed on

    async def blocks(self) -> AsyncIterator[list[NamedRow]]:
        """The rows to be answered, in blocks that may be empty, each row with its place among the lines of the output.
        Raises as `InputSource.blocks`, and `WorkError` when errors cannot be written.
        """
        self._enter("read")
        async for pieces in self._source.blocks():
            for start in range(0, len(pieces), BLOCK):
                left = BLOCK if self._most is None else min(BLOCK, self._most - self._counts.read)
                self._enter("understand")
                rows = self._named(pieces[start : start + left])
                self._enter("idle")
                yield rows
                await asyncio.sleep(0)
                await self._answers.room_for(self._places)
            if self._most is not None and self._counts.read >= self._most:
                break
            self._enter("read")
        self._enter("idle")
        self._counts.ended = True

    def _named(self, pieces: list[Piece]) -> list[NamedRow]:
        rows = self._namer.name([self._reader.read(piece) for piece in pieces])
        self._output.check_names(rows)
        self._counts.read += len(rows)
        file = self._source.file_of(rows[0].number) if rows else None
        done = self._output.done
        before = done.has([digest_key(row.digest) for row in rows]) if len(done) else [False] * len(rows)
        wanted = []
        for row, was_done in zip(rows, before, strict=True):
            line, row.file = self._output.take(row.digest), file
            self._counts.before += was_done or line is not None
            if was_done:
                continue
            row.place, self._places = self._places, self._places + 1
            if line is not None:
                self._answers.put_kept(row, line)
            elif row.error is not None:
                self._answers.put(row, self._writer.error(row, row.error), RowOutcome.of_error(row.error, row))
            else:
                wanted.append(row)
        return wanted
