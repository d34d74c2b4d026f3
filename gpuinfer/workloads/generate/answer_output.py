"""Where all lines of a run go: to an opened output, as they come or in the order of their rows."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence

from gpuinfer.api import Lane
from gpuinfer.errors import WorkError
from gpuinfer.serving.openai.row_names import NamedRow
from gpuinfer.workloads.generate.opened_output import OpenedOutput
from gpuinfer.workloads.generate.output_writer import OrderedOutput, UnorderedOutput
from gpuinfer.workloads.generate.row_asker import AnswerSink, RowCounts, RowOutcome


class AnswerOutput(AnswerSink):
    """Writes lines to `output`, and counts their rows. `ordered`: in the order of their places; `window` bounds how far
    ahead of the first that is missing a row may be sent to the model. Belongs to the event loop on which it is made.
    """

    def __init__(
        self,
        output: OpenedOutput,
        counts: RowCounts,
        *,
        lane: Lane | None = None,
        ordered: bool = False,
        window: float = math.inf,
    ) -> None:
        self._output, self._counts = output, counts
        self._writer = output.writer(lane)
        self._order: OrderedOutput | UnorderedOutput = (
            OrderedOutput(self._writer, window, output.left) if ordered else UnorderedOutput(self._writer)
        )

    async def near(self, row: NamedRow) -> None:
        await self._order.near(row.place)

    def put(self, row: NamedRow, line: bytes, outcome: RowOutcome) -> None:
        self._counts.add(outcome)
        self._order.add(row.place, line)

    def put_range(self, places: Iterable[int], lines: Sequence[bytes], outcome: RowOutcome) -> None:
        """Lines of several rows that were answered, in their order. `outcome`: what became of them together."""
        self._counts.add(outcome)
        self._order.add_all(places, lines)

    def put_kept(self, row: NamedRow, line: bytes) -> None:
        """The line that an earlier run has written of this row, and that is on the disk elsewhere."""
        self._order.add(row.place, line, kept=True)

    @property
    def full(self) -> bool:
        return self._writer.full

    async def room(self) -> None:
        await self._writer.room()

    async def room_for(self, place: int) -> None:
        """Wait until the rows before this place may be sent to the model, and their errors be put."""
        await self._writer.room()
        await self._order.near(place)

    @property
    def waiting(self) -> int:
        """How many lines wait for an earlier one."""
        return self._order.waiting

    @property
    def held_bytes(self) -> int:
        """Of the lines that wait."""
        return self._order.held_bytes

    async def flush(self) -> None:
        """What was put is on the disk when this returns, in its place or aside. Raises `WorkError`."""
        await self._writer.flush()

    async def close(self, complete: bool) -> None:
        """What was put is on the disk when this returns. `complete`: all rows have been put, and what an earlier run
        wrote of others comes last. Raises `WorkError`.
        """
        try:
            if complete:
                for line in self._output.rest():
                    self._writer.put(line)
                    await self._writer.room()
        finally:
            if self._output.aside is None:  # no run can go on: better out of order than lost
                with contextlib.suppress(WorkError):
                    self._order.let_go()
            await self._writer.close()
