"""Sends the rows of an input to the models and their answers to the output, with a bounded number of both in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from gpuinfer.api import Infer
from gpuinfer.serving.openai.prompt_rows import PromptRowReader
from gpuinfer.serving.openai.row_names import Namer
from gpuinfer.workloads.generate.answer_lines import LineWriter
from gpuinfer.workloads.generate.answer_output import AnswerOutput
from gpuinfer.workloads.generate.input_rows import InputSource
from gpuinfer.workloads.generate.opened_output import OpenedOutput
from gpuinfer.workloads.generate.row_asker import RowAsker, RowCounts, WaitingRows
from gpuinfer.workloads.generate.row_intake import RowIntake

WINDOW = 4  # times as many rows as are under way may be sent before an earlier one is answered, with ordered output


class Pump:
    """Everything between an opened input and an opened output, in one process. `infers`: see `RowAsker`. `most` ends
    the input after so many rows.
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
        self.source = source
        self._asker, self._rows = RowAsker(infers, writer), WaitingRows()
        self.under_way = self._asker.under_way
        infer = next(iter(infers.values()))
        enter = infer.lane("input").enter
        self._answers = AnswerOutput(
            output, self.counts, lane=infer.lane("output"), ordered=ordered, window=WINDOW * self.under_way
        )
        self._intake = RowIntake(
            source, reader, namer, writer, output, self._answers, self.counts, most=most, enter=enter
        )

    async def run(self) -> None:
        """Until every row is answered and on the disk. Cancelled, it keeps what is answered.

        Raises `WorkError` when the work cannot go on; as an exception group.
        """
        complete = False
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read())
                group.create_task(self._asker.run(self._rows, self._answers))
            complete = True
        finally:
            self.source.stop()
            await self._answers.close(complete)

    @property
    def waiting(self) -> int:
        """How many answers wait for an earlier one."""
        return self._answers.waiting

    async def _read(self) -> None:
        async for rows in self._intake.blocks():
            self._rows.put(rows)
            await self._rows.short(self.under_way)
        self._rows.end()
