"""One answer of a model of text: as a future, and as a stream of its parts."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
from collections import deque
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from typing import Any

from gpuinfer.errors import Closed
from gpuinfer.generation import Completion, Generation, Part
from gpuinfer.library.choices import reworded
from gpuinfer.library.llm_session import OpenedLLM, Opens, PendingCall
from gpuinfer.library.mailbox import ReadTwice
from gpuinfer.library.text_answers import END_OF_ANSWERS, AnswerReader, EndOfAnswers, TextAnswer, whole_answer
from gpuinfer.serving.openai.row_names import NamedRow


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
            self._opened.cancel(self._tasks)
        return self.cancelled()

    def result(self, timeout: float | None = None) -> TextAnswer:
        """The answer, waited for. Raises `TimeoutError` after so many seconds, and what has kept it from coming."""
        if not self.done():
            self._opened.refuse_fork()
        return super().result(timeout)

    def __await__(self) -> Generator[Any, None, TextAnswer]:
        if not self.done():
            self._opened.refuse_fork()
        return asyncio.wrap_future(self).__await__()


class TextStream(AnswerReader, Iterator[Part], AsyncIterator[Part]):
    """The parts of one answer as they come, read with `for` or with `async for`: each has a `text`, which may be empty,
    and the number of its `sample`. Once it is over, `result` is the whole answer. A stream that is dropped or closed
    cancels the request.
    """

    def __init__(self, llm: Opens, row: NamedRow, timeout: float | None, request: dict[str, Any]) -> None:
        self._llm, self._row, self._timeout, self._request = llm, row, timeout, request
        self._call: PendingCall | None = None
        self._seen = False  # a part
        self._rest: deque[Part] = deque()  # of a backend that makes no parts: the answer itself
        self._arrived: tuple[int, int, Generation | Exception] | None = None
        self._found: TextAnswer | Exception | None = None

    def __next__(self) -> Part:
        try:
            while (part := self._next()) is None:
                self._opened_call().parts.wait()
        except ReadTwice:
            raise
        except BaseException:
            self.close()
            raise
        if isinstance(part, EndOfAnswers):
            raise StopIteration
        return part

    async def __anext__(self) -> Part:
        try:
            if self._call is None and not self._llm.is_open:
                await asyncio.to_thread(self._llm.opened)
            while (part := self._next()) is None:
                await self._opened_call().parts.arrival()
        except ReadTwice:
            raise
        except BaseException:
            self.close()
            raise
        if isinstance(part, EndOfAnswers):
            raise StopAsyncIteration
        return part

    def _opened_call(self) -> PendingCall:
        if self._call is None:
            if self._row.error is not None:
                raise reworded(self._row.error)
            self._call = PendingCall(self._llm.opened(), self._timeout, self._request)
            self._call.submit(0, self._row.prompt, reads=True)
        self._call.opened.refuse_fork()
        return self._call

    def _next(self) -> Part | EndOfAnswers | None:
        if self._rest:
            return self._rest.popleft()
        if self._found is not None:
            return END_OF_ANSWERS
        call = self._opened_call()
        self._arrived = self._arrived or call.answered.take()  # first: all parts are there before it
        if (part := call.parts.take()) is not None:
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
        return self._rest.popleft() if self._rest else END_OF_ANSWERS

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
            if self._call is not None:
                self._call.cancel()

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
