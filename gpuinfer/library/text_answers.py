"""Answers of a model of text as a program reads them: whole or as they grow, in a thread or on any event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import functools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

from msgspec import Struct

from gpuinfer.api import Limits
from gpuinfer.errors import BackendDied, Closed, Expired, GpuinferError
from gpuinfer.generation import Completion, Generation, Logprob, Part, Prompt
from gpuinfer.library.choices import reworded
from gpuinfer.library.text_prompts import PromptReader
from gpuinfer.runtime.background_session import BackgroundSession
from gpuinfer.serving.openai.row_names import NamedRow
from gpuinfer.serving.prompt_requests import PromptRequester, most_samples, rows_in_flight

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


class Mailbox(Generic[T]):
    """What one thread puts, another takes: a thread that blocks, or a coroutine on a loop of its own."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._lock = threading.Lock()
        self._wake: Callable[[], object] | None = None  # of the reader that waits

    def put(self, item: T) -> None:
        self._items.append(item)
        with self._lock:
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def take(self) -> T | None:
        """What came first; None where nothing is there."""
        return self._items.popleft() if self._items else None

    def wait(self) -> None:
        """Until something is there."""
        arrived = threading.Event()
        if self._expects(arrived.set):
            try:
                arrived.wait()
            finally:
                self._wake = None

    async def arrival(self) -> None:
        """The same on a loop."""
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the reader's loop is closed
                loop.call_soon_threadsafe(_finish, arrived)

        if self._expects(wake):
            try:
                await arrived
            finally:
                self._wake = None

    def _expects(self, wake: Callable[[], object]) -> bool:
        with self._lock:
            if self._items:
                return False
            if self._wake is not None:
                raise RuntimeError("these answers are being read already. Let one thread or task read them.")
            self._wake = wake
            return True


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class OpenedLLM:
    """The session of an `LLM` once it is open: what is under way there, and what was answered. Its coroutines run on
    the session's loop.
    """

    def __init__(self, session: BackgroundSession, limits: Limits) -> None:
        self.session, self.limits = session, limits
        self.rows = rows_in_flight(limits)  # under way at most, for one call
        self.tasks: set[asyncio.Task[Any]] = set()
        self._lock, self._shut = threading.Lock(), False
        self.done = self.failed = self.input_tokens = self.output_tokens = self.cached_tokens = 0
        self.first_failure = ""

    def requester(self, **request: Any) -> PromptRequester:
        return PromptRequester(self.session.session, self.rows, most_samples(self.limits), **request)

    def begin(
        self,
        ask: Callable[[], Coroutine[Any, Any, Generation | GpuinferError]],
        tasks: set[asyncio.Task[Any]],
        done: Callable[[Generation | Exception], None],
    ) -> None:
        """Run this coroutine there, as one of these tasks; `done` is told what comes of it, whatever happens."""

        def settled(task: asyncio.Task[Generation | GpuinferError]) -> None:
            self.tasks.discard(task)
            tasks.discard(task)
            error = Closed(CLOSED_EARLY) if task.cancelled() else task.exception()
            done(task.result() if error is None else error if isinstance(error, Exception) else Closed(str(error)))

        def create() -> None:
            task = self.session.loop.create_task(ask())
            self.tasks.add(task)
            tasks.add(task)
            task.add_done_callback(settled)

        with self._lock:
            if not self._shut:
                self.session.post(create)
                return
        done(Closed(CLOSED_EARLY))

    def shut(self) -> None:
        """Begin nothing more."""
        with self._lock:
            self._shut = True

    async def ask(
        self, requester: PromptRequester, prompt: Prompt, timeout: float | None, reads: Callable[[Part], None] | None
    ) -> Generation | GpuinferError:
        """The answer, or the error. `timeout`: seconds from now to the whole answer."""
        try:
            async with asyncio.timeout(timeout):
                found = await requester.ask(prompt, reads)
        except TimeoutError:
            error: GpuinferError = Expired(f"no answer within {timeout:g} s. Allow more time, or ask for less.")
        except asyncio.CancelledError:
            raise
        except GpuinferError as failed:
            error = reworded(failed)
        else:
            self.done += 1
            self.input_tokens += found.prompt_tokens
            self.cached_tokens += found.cached_tokens
            self.output_tokens += sum([len(one.tokens) for one in found.completions])
            return found
        self.done += 1
        self.failed += 1
        self.first_failure = self.first_failure or str(error)
        return error

    async def settle(self, drain: bool) -> None:
        """Wait for what is under way, or cancel it."""
        while self.tasks:
            if not drain:
                cancel_all(self.tasks)
            await asyncio.wait(self.tasks)


def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel what is not finished of these. On their loop."""
    for task in tasks:
        task.cancel()


class Opens(Protocol):
    """An `LLM`, which may not be open yet."""

    @property
    def is_open(self) -> bool: ...
    def opened(self) -> OpenedLLM: ...


class AnswerWork:
    """The prompts of one call that are under way. It does not know the iterator that reads its answers: one that is
    dropped cancels it.
    """

    def __init__(self, opened: OpenedLLM, timeout: float | None, **request: Any) -> None:
        self.opened, self._timeout = opened, timeout
        self._requester = opened.requester(**request)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.answered: Mailbox[tuple[int, int, Generation | Exception]] = Mailbox()  # place, rows, answer
        self.parts: Mailbox[Part | None] = Mailbox()  # None: the answer is there

    def submit(self, place: int, prompt: Prompt, reads: bool = False) -> None:
        def done(found: Generation | Exception) -> None:
            self.answered.put((place, prompt.samples, found))
            self.parts.put(None)

        reader = self.parts.put if reads else None
        ask = functools.partial(self.opened.ask, self._requester, prompt, self._timeout, reader)
        self.opened.begin(ask, self._tasks, done)

    def cancel(self) -> None:
        """What is not finished is not wanted. Any thread."""
        self.opened.session.post(functools.partial(cancel_all, self._tasks))


def whole_answer(row: NamedRow, found: Generation, place: int = 0) -> TextAnswer:
    return TextAnswer(index=place, id=row.id, prompt=row.prompt, generation=found, metadata=row.metadata)


def answer_of(place: int, row: NamedRow, found: Generation | Exception) -> TextAnswer | Exception:
    """The answer; or the error, whose `index` is the prompt's place."""
    if isinstance(found, Generation):
        return whole_answer(row, found, place)
    if isinstance(found, GpuinferError) and found.index is None:
        error = copy.copy(found)  # several prompts may have failed by one
        error.args, error.index, error.__cause__ = (f"prompt {place}: {found}",), place, found.__cause__
        return error
    return found


class TextAnswers(Iterator[A], AsyncIterator[A]):
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
        self._work: AnswerWork | None = None
        self._asked: dict[int, NamedRow] = {}  # those whose answers have not been given out
        self._ready: dict[int, Generation | Exception] = {}  # the first to come first
        self._read = self._given = 0
        self._under_way = 0  # rows
        self._ended = False  # there are no more prompts
        self._over = False
        self._bar, self._showing = bar, contextlib.ExitStack()
        self._advance: Callable[[int], None] = lambda more: None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> A:
        try:
            while (found := self._next()) is None:
                self._opened_work().answered.wait()
        except BaseException:
            self.close()
            raise
        if found is _END:
            raise StopIteration
        return self._told(found)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> A:
        try:
            if not self._over and not self._llm.is_open:
                await asyncio.to_thread(self._llm.opened)
            while (found := self._next()) is None:
                await self._opened_work().answered.arrival()
        except BaseException:
            self.close()
            raise
        if found is _END:
            raise StopAsyncIteration
        return self._told(found)

    def _told(self, found: Any) -> A:
        self._advance(1)
        given: A = found
        if isinstance(found, TextAnswer):
            return given
        of_all = isinstance(found, BackendDied | Closed)  # there will be no answer any more
        if self._errors == "return" and isinstance(found, GpuinferError) and not of_all:
            return given
        self.close()
        raise found

    def _opened_work(self) -> AnswerWork:
        if self._work is None:
            self._work = AnswerWork(self._llm.opened(), self._timeout, **self._request)
            if self._bar is not None:
                self._advance = self._showing.enter_context(self._bar(self._rows.total))
        return self._work

    def _next(self) -> TextAnswer | Exception | None:
        """The next answer, `_END`, or None where it has to be waited for. Reads prompts ahead."""
        if self._over:
            return _END
        work, began = self._opened_work(), time.monotonic()
        most = work.opened.rows
        while True:
            while (arrived := work.answered.take()) is not None:
                place, rows, found = arrived
                self._ready[place], self._under_way = found, self._under_way - rows
            place = self._given if self._ordered else next(iter(self._ready), -1)
            there = place in self._ready
            full = self._under_way >= most or len(self._asked) >= 4 * most
            if self._ended or full:
                break
            if there and (self._under_way >= LEAST_FULL * most or time.monotonic() - began > READ_S):
                break
            self._read_one(work)
        if there:
            self._given += 1
            return answer_of(place, self._asked.pop(place), self._ready.pop(place))
        if self._ended and not self._asked:
            self.close()
            return _END
        return None

    def _read_one(self, work: AnswerWork) -> None:
        row = next(self._rows, None)
        if row is None:
            self._ended = True
            return
        place, self._read = self._read, self._read + 1
        self._asked[place] = row
        if row.error is not None:
            self._ready[place] = reworded(row.error)
            return
        self._llm.opened()  # which refuses where it is closed
        self._under_way += row.prompt.samples
        work.submit(place, row.prompt)

    def close(self) -> None:
        """Read no more. What is under way is cancelled."""
        if not self._over:
            self._over = True
            if self._work is not None and self._under_way:
                self._work.cancel()
            self._showing.close()
            with contextlib.suppress(ValueError):  # the reader of prompts is what raised
                self._rows.close()

    async def aclose(self) -> None:
        """`close`, in an `async with` or a task."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_over", True):
            self.close()


class _End(Exception):
    """There are no more answers."""


_END = _End()


class PendingText(concurrent.futures.Future[TextAnswer]):
    """The answer to one prompt, under way: `await` it on any event loop, or wait with `result()`. `cancel` frees what
    it holds.
    """

    def __init__(self, opened: OpenedLLM, row: NamedRow, timeout: float | None, request: dict[str, Any]) -> None:
        super().__init__()
        self._opened, self._row = opened, row
        self._tasks: set[asyncio.Task[Any]] = set()
        if row.error is not None:
            self.set_exception(reworded(row.error))
        else:
            ask = functools.partial(opened.ask, opened.requester(**request), row.prompt, timeout, None)
            opened.begin(ask, self._tasks, self._settle)

    def _settle(self, found: Generation | Exception) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was cancelled
            if isinstance(found, Generation):
                self.set_result(whole_answer(self._row, found))
            else:
                self.set_exception(found)

    def cancel(self) -> bool:
        """Cancel the request. False where it is settled already."""
        if not self.cancelled() and super().cancel():
            self.set_running_or_notify_cancel()
            self._opened.session.post(functools.partial(cancel_all, self._tasks))
        return self.cancelled()

    def __await__(self) -> Generator[Any, None, TextAnswer]:
        return asyncio.wrap_future(self).__await__()


class TextStream(Iterator[Part], AsyncIterator[Part]):
    """The parts of one answer as they come, read with `for` or with `async for`: each has a `text`, which may be empty,
    and the number of its `sample`. Once it is over, `result` is the whole answer. A stream that is dropped or closed
    cancels the request.
    """

    def __init__(self, llm: Opens, row: NamedRow, timeout: float | None, request: dict[str, Any]) -> None:
        self._llm, self._row, self._timeout, self._request = llm, row, timeout, request
        self._work: AnswerWork | None = None
        self._seen = False  # a part
        self._rest: deque[Part] = deque()  # of a backend that makes no parts: the answer itself
        self._arrived: tuple[int, int, Generation | Exception] | None = None
        self._found: TextAnswer | Exception | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Part:
        try:
            while (part := self._next()) is None:
                self._opened_work().parts.wait()
        except BaseException:
            self.close()
            raise
        if isinstance(part, _End):
            raise StopIteration
        return part

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Part:
        try:
            if self._work is None and not self._llm.is_open:
                await asyncio.to_thread(self._llm.opened)
            while (part := self._next()) is None:
                await self._opened_work().parts.arrival()
        except BaseException:
            self.close()
            raise
        if isinstance(part, _End):
            raise StopAsyncIteration
        return part

    def _opened_work(self) -> AnswerWork:
        if self._work is None:
            if self._row.error is not None:
                raise reworded(self._row.error)
            self._work = AnswerWork(self._llm.opened(), self._timeout, **self._request)
            self._work.submit(0, self._row.prompt, reads=True)
        return self._work

    def _next(self) -> Part | _End | None:
        if self._rest:
            return self._rest.popleft()
        if self._found is not None:
            return _END
        work = self._opened_work()
        self._arrived = self._arrived or work.answered.take()  # first: all parts are there before it
        if (part := work.parts.take()) is not None:
            self._seen = True
            return part
        if self._arrived is None:
            return None
        found = self._arrived[2]
        if not isinstance(found, Generation):
            self._found = found
            raise found
        self._found = whole_answer(self._row, found)
        if not self._seen:
            self._rest.extend(_whole(found.completions))
        return self._rest.popleft() if self._rest else _END

    @property
    def result(self) -> TextAnswer:
        """The whole answer, once all parts have been read. Raises `RuntimeError` before that."""
        if isinstance(self._found, TextAnswer) and not self._rest:
            return self._found
        raise RuntimeError("the answer has not been read to its end. Read all parts, then take the result.")

    def close(self) -> None:
        """Read no more; cancels the request when it is not finished."""
        if self._found is None:
            self._found = Closed("this stream was closed before its answer was complete. Ask again.")
            if self._work is not None:
                self._work.cancel()

    async def aclose(self) -> None:
        """`close`, in an `async with` or a task."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_found"):
            self.close()


def _whole(completions: Sequence[Completion]) -> Iterator[Part]:
    """Each answer as its one part."""
    for number, one in enumerate(completions):
        yield Part(
            sample=number,
            text=one.text,
            tokens=one.tokens,
            logprobs=one.logprobs,
            finish_reason=one.finish_reason,
            stop_reason=one.stop_reason,
            processed=one.processed,
            versions=one.versions[1:],
        )
