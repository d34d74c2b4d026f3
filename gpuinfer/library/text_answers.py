"""Answers of a model of text as a program reads them: whole or as they grow, in a thread or on any event loop."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from msgspec import Struct

from gpuinfer.errors import BackendDied, Closed, GpuinferError
from gpuinfer.generation import Completion, Generation, Logprob, Prompt
from gpuinfer.library.choices import reworded
from gpuinfer.library.llm_session import Opens, PendingCall
from gpuinfer.library.mailbox import ReadTwice
from gpuinfer.library.text_prompts import PromptReader
from gpuinfer.serving.openai.row_names import NamedRow

LEAST_FULL = 2 / 3  # of the rows that are under way: above that, an answer that is there goes before more prompts
CLOSED_EARLY = "this LLM was closed before its answer was complete. Make another one, and ask again."
READ_S = 0.01  # for which prompts are read on while an answer is there

T = TypeVar("T")
A = TypeVar("A")  # TextAnswer, or with errors="return" also GpuinferError
Errors = Literal["raise", "return"]


class TextAnswer(Struct, frozen=True, kw_only=True):
    """The answer to one prompt: `text` is that of its first sample, `texts` are those of all. `print(answer)` prints
    the text.
    """

    index: int  # the prompt's place among those that were given, from 0
    id: str | int  # as the row said, or a name that is made from the prompt
    prompt: Prompt  # as it was asked
    generation: Generation  # everything else that is known
    metadata: dict[str, Any] | None = None  # as the row had it
    line: int = 0  # of its file, on which the row begins, from 1; of Parquet the row, of a list the place

    @property
    def samples(self) -> tuple[Completion, ...]:
        """Each has `text`, `tokens`, `finish_reason`, `stop_reason` and `logprobs`."""
        return self.generation.completions

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def texts(self) -> list[str]:
        return [one.text for one in self.samples]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids, with the end token and without what a stop string cut off."""
        return self.samples[0].tokens

    @property
    def finish_reason(self) -> str:
        """`stop` (an end token, a stop string, a complete form) or `length`."""
        return self.samples[0].finish_reason

    @property
    def logprobs(self) -> tuple[Logprob, ...] | None:
        """One for each token, where they were asked for: `one.chosen.logprob`, `one.likeliest`."""
        return self.samples[0].logprobs

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has."""
        return self.generation.prompt_tokens

    @property
    def version(self) -> str:
        """Of the weights that computed it (`LLM.update`); "" are those of the start."""
        return self.generation.version

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        said = f"text={self.text!r}" if len(self.samples) == 1 else f"texts={self.texts!r}"
        return f"TextAnswer(index={self.index}, {said}, finish_reason={self.finish_reason!r})"


def whole_answer(row: NamedRow, found: Generation, place: int = 0) -> TextAnswer:
    return TextAnswer(index=place, id=row.id, prompt=row.prompt, generation=found, metadata=row.metadata, line=row.line)


def answer_of(place: int, row: NamedRow, found: Generation | Exception) -> TextAnswer | Exception:
    """The answer; or the error, whose `index` is the prompt's place."""
    if isinstance(found, Generation):
        return whole_answer(row, found, place)
    if isinstance(found, GpuinferError) and found.index is None:
        error = copy.copy(found)  # several prompts may have failed by one
        error.args, error.index, error.__cause__ = (f"prompt {place}: {found}",), place, found.__cause__
        return error
    return found


class AnswerReader(ABC):
    """What is read with `for` or `async for`, and closed: by `close`, by `aclose`, or by leaving a `with` block."""

    @abstractmethod
    def close(self) -> None:
        """Read no more. What is under way is cancelled."""

    def __iter__(self) -> Self:
        return self

    def __aiter__(self) -> Self:
        return self

    async def aclose(self) -> None:
        """`close`, in an `async with` or a task."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TextAnswers(AnswerReader, Iterator[A], AsyncIterator[A]):
    """The answers to prompts, read with `for` or with `async for`, by one reader at a time.

    Prompts are read ahead as far as the model needs them, and no further: no more than that is in memory. An iterator
    that is dropped (`break`), closed or has raised cancels what is under way.
    """

    def __init__(
        self,
        llm: Opens,
        rows: PromptReader,
        *,
        ordered: bool,
        errors: Errors,
        timeout: float | None,
        request: dict[str, Any],
        bar: Callable[[int | None], contextlib.AbstractContextManager[Callable[[int], None]]] | None,
    ) -> None:
        self._llm, self._rows, self._ordered, self._errors = llm, rows, ordered, errors
        self._timeout, self._request = timeout, request
        self._call: PendingCall | None = None
        self._unread: dict[int, NamedRow] = {}  # those whose answers have not been returned
        self._ready: dict[int, Generation | Exception] = {}  # the first to come first
        self._read = self._returned = 0
        self._aside: asyncio.Future[NamedRow | None] | None = None  # the next prompt, which a thread reads
        self._under_way = 0  # rows
        self._ended = False  # there are no more prompts
        self._over = False
        self._bar, self._showing = bar, contextlib.ExitStack()
        self._advance: Callable[[int], None] = lambda more: None

    def __next__(self) -> A:
        try:
            while (found := self._next()) is None:
                self._opened_call().answered.wait()
        except ReadTwice:
            raise
        except BaseException:
            self.close()
            raise
        if found is END_OF_ANSWERS:
            raise StopIteration
        return self._returning(found)

    async def __anext__(self) -> A:
        try:
            if not self._over and not self._llm.is_open:
                await asyncio.to_thread(self._llm.opened)
            while (found := self._next(in_loop=True)) is None:
                await self._arrival()
        except ReadTwice:
            raise
        except BaseException:
            self.close()
            raise
        if found is END_OF_ANSWERS:
            raise StopAsyncIteration
        return self._returning(found)

    async def _arrival(self) -> None:
        """Until there is an answer, or another prompt to ask."""
        arrival = asyncio.ensure_future(self._opened_call().answered.arrival())
        try:
            await asyncio.wait({arrival, *([self._aside] if self._aside else ())}, return_when=asyncio.FIRST_COMPLETED)
            if arrival.done():
                arrival.result()
        finally:
            arrival.cancel()

    def _returning(self, found: Any) -> A:
        self._advance(1)
        answer: A = found
        if isinstance(found, TextAnswer):
            return answer
        of_all = isinstance(found, BackendDied | Closed)  # there will be no answer any more
        if self._errors == "return" and isinstance(found, GpuinferError) and not of_all:
            return answer
        self.close()
        raise found

    def _opened_call(self) -> PendingCall:
        if self._call is None:
            self._call = PendingCall(self._llm.opened(), self._timeout, self._request)
            if self._bar is not None:
                self._advance = self._showing.enter_context(self._bar(self._rows.total))
        self._call.opened.refuse_fork()
        return self._call

    def _next(self, in_loop: bool = False) -> TextAnswer | Exception | None:
        """The next answer, `END_OF_ANSWERS`, or None where it has to be waited for. Reads prompts ahead; on an event
        loop (`in_loop`) those that may block in a thread.
        """
        if self._over:
            return END_OF_ANSWERS
        call, began = self._opened_call(), time.monotonic()
        most = call.opened.rows
        while True:
            while (arrived := call.answered.take()) is not None:
                place, rows, found = arrived
                self._ready[place], self._under_way = found, self._under_way - rows
            place = self._returned if self._ordered else next(iter(self._ready), -1)
            there = place in self._ready
            full = self._under_way >= most or len(self._unread) >= 4 * most
            if self._ended or full:
                break
            if there and (self._under_way >= LEAST_FULL * most or time.monotonic() - began > READ_S):
                break
            if not in_loop or not self._rows.may_block:
                self._take_row(call, next(self._rows, None))
            elif self._aside is None:
                self._aside = asyncio.ensure_future(asyncio.to_thread(next, self._rows, None))
                break
            elif self._aside.done():
                aside, self._aside = self._aside, None
                self._take_row(call, aside.result())
            else:
                break
        if there:
            self._returned += 1
            return answer_of(place, self._unread.pop(place), self._ready.pop(place))
        if self._ended and not self._unread:
            self.close()
            return END_OF_ANSWERS
        return None

    def _take_row(self, call: PendingCall, row: NamedRow | None) -> None:
        if row is None:
            self._ended = True
            return
        place, self._read = self._read, self._read + 1
        self._unread[place] = row
        if row.error is not None:
            self._ready[place] = reworded(row.error)
            return
        self._llm.opened()  # which refuses where it is closed
        self._under_way += row.prompt.samples
        call.submit(place, row.prompt)

    def close(self) -> None:
        """Read no more. What is under way is cancelled."""
        if not self._over:
            self._over = True
            if self._call is not None and self._under_way:
                self._call.cancel()
            self._showing.close()
            if self._aside is not None:
                with contextlib.suppress(RuntimeError):  # its loop is closed
                    self._aside.add_done_callback(_drop)
            with contextlib.suppress(ValueError):  # the reader of prompts is what raised
                self._rows.close()

    def __del__(self) -> None:
        if not getattr(self, "_over", True):
            self.close()


def _drop(row: asyncio.Future[NamedRow | None]) -> None:
    """Of a prompt that is not asked any more: its error is not raised."""
    if not row.cancelled():
        row.exception()


class EndOfAnswers(Exception):
    """There are no more answers."""


END_OF_ANSWERS = EndOfAnswers()
