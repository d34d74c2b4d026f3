"""Answers on a terminal as they grow: the prompts of the command line, shown one below the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gpuinfer.api import Infer
from gpuinfer.errors import BackendDied, BackendError, RequestError
from gpuinfer.generation import Part
from gpuinfer.host.terminal import TerminalWriter, dim, printable
from gpuinfer.serving.openai.row_names import NamedRow
from gpuinfer.serving.prompt_requests import PromptRequester, most_samples, rows_in_flight
from gpuinfer.workloads.generate.row_asker import RowCounts, RowOutcome

MOST_SHOWN = 200  # characters of a prompt


class TerminalPage:
    """Texts one below the other. One grows at a time: what those after it say waits until they have their turn."""

    def __init__(self, headings: Sequence[str], put: Callable[[str], None]) -> None:
        self._headings, self._put = headings, put
        self._waiting = ["" for _ in headings]
        self._remarks: list[str | None] = [None for _ in headings]  # of those that are over
        self._turn = -1
        self._next()

    def add(self, number: int, text: str) -> None:
        """The text goes on."""
        if number == self._turn:
            self._put(printable(text))
        else:
            self._waiting[number] += text

    def end(self, number: int, remark: str = "") -> None:
        """The text is over, and there may be something to say about it. Said twice, the first counts."""
        if self._remarks[number] is not None:
            return
        self._remarks[number] = remark
        while self._turn < len(self._headings) and (shown := self._remarks[self._turn]) is not None:
            self._put(dim(f" [{printable(shown)}]" if shown else "") + "\n")
            self._next()

    def stop(self) -> None:
        """No more will come."""
        if self._turn < len(self._headings):
            self._put(dim(" [stopped]") + "\n")
            self._turn = len(self._headings)

    def _next(self) -> None:
        self._turn += 1
        if self._turn < len(self._headings):
            between = "\n" if self._turn else ""
            self._put(between + dim(printable(self._headings[self._turn])) + printable(self._waiting[self._turn]))
            self._waiting[self._turn] = ""


class AnswerScreen:
    """Asks for all answers at once and shows them on a page. `between` stands between a prompt and its answer."""

    def __init__(self, infer: Infer, rows: Sequence[NamedRow], between: str = "") -> None:
        self.counts = RowCounts()
        self.counts.read, self.counts.ended = len(rows), True
        self._rows = rows
        self._asker = PromptRequester(infer, rows_in_flight(infer.limits), most_samples(infer.limits))
        self._terminal = TerminalWriter()
        headings: list[str] = []  # the end of the prompt, which the answer goes on with
        self._first: list[int] = []  # where each row's answers begin
        for row in rows:
            self._first.append(len(headings))
            text, samples = row.prompt.text or "", row.prompt.samples
            shown = text if len(text) <= MOST_SHOWN else f"…{text[-MOST_SHOWN:]}"
            shown += between if text and not text[-1].isspace() else ""
            several = [f"{number} of {samples}: {shown}" for number in range(1, samples + 1)]
            headings += [shown] if samples == 1 else several
        self._shown = [(0, 0)] * len(headings)  # characters and tokens
        self._page = TerminalPage(headings, self._terminal.put)

    async def run(self) -> None:
        """Until all are shown. Raises `WorkError`, as an exception group, when the work cannot go on."""
        try:
            async with asyncio.TaskGroup() as group:
                for number, row in enumerate(self._rows):
                    group.create_task(self._ask(row, self._first[number]))
        finally:
            self._page.stop()
            await self._terminal.drain()

    async def _ask(self, row: NamedRow, first: int) -> None:
        try:
            if row.error is not None:
                raise row.error
            generation = await self._asker.ask(row.prompt, lambda part: self._take(row, first, part))
        except BackendDied:
            raise
        except (RequestError, BackendError) as error:
            self.counts.add(RowOutcome.of_error(error))
            for number in range(first, first + row.prompt.samples):
                self._page.end(number, f"no answer: {error}")
            return
        self.counts.add(RowOutcome.of_answer(generation))
        for number, one in enumerate(generation.completions, first):  # what no part has shown: there may be none
            self._page.add(number, one.text[self._shown[number][0] :])
            self._page.end(number, finish_remark(row, one.finish_reason, len(one.tokens)))

    def _take(self, row: NamedRow, first: int, part: Part) -> None:
        number = first + part.sample
        characters, tokens = self._shown[number]
        self._shown[number] = characters + len(part.text), tokens + len(part.tokens)
        self._page.add(number, part.text)
        if part.finish_reason is not None:
            self._page.end(number, finish_remark(row, part.finish_reason, tokens + len(part.tokens)))


def finish_remark(row: NamedRow, finish_reason: str, tokens: int) -> str:
    """Why an answer of so many tokens ends where a reader may wonder."""
    if finish_reason != "length":
        return ""
    most = row.prompt.sampling.max_tokens
    return f"cut off after {most:,} tokens; more with --max-new-tokens" if tokens >= most else "the context is full"
