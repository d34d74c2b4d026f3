"""The session of an `LLM` once it is open, and the requests that one call has under way there."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import os
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeVar

from gpuinfer.api import Limits
from gpuinfer.errors import Closed, Expired, GpuinferError, UsageError
from gpuinfer.generation import Generation, Part, Prompt
from gpuinfer.library.choices import reworded
from gpuinfer.library.mailbox import Mailbox
from gpuinfer.runtime.background_session import BackgroundSession
from gpuinfer.serving.prompt_requests import PromptRequester, most_samples, rows_in_flight

T = TypeVar("T")

CLOSED_EARLY = "this LLM was closed before its answer was complete. Make another one, and ask again."


class OpenedLLM:
    """The session of an `LLM` once it is open: what is under way there, and what was answered. Its coroutines run on
    the session's loop.
    """

    def __init__(self, session: BackgroundSession, limits: Limits) -> None:
        self.session, self.limits = session, limits
        self.rows = rows_in_flight(limits)  # under way at most, for one call
        self.tasks: set[asyncio.Task[Any]] = set()
        self._lock, self._shut, self._process = threading.Lock(), False, os.getpid()
        self.done = self.failed = self.input_tokens = self.output_tokens = self.cached_tokens = 0
        self.first_failure = ""

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that has opened it: its threads are not here."""
        return self._process != os.getpid()

    def refuse_fork(self) -> None:
        """Raises `UsageError` where nothing would ever be answered."""
        if self.forked:
            raise UsageError(
                "this LLM was opened before this process was forked, and its threads did not come along. Make another "
                'one here; or start processes with multiprocessing.get_context("spawn").'
            )

    def requester(self, **request: Any) -> PromptRequester:
        return PromptRequester(self.session.session, self.rows, most_samples(self.limits), **request)

    def begin(
        self,
        ask: Callable[[], Coroutine[Any, Any, T]],
        tasks: set[asyncio.Task[Any]],
        done: Callable[[T | Exception], None],
    ) -> None:
        """Run this coroutine there, as one of these tasks; `done` gets the result or the error, whatever happens."""

        def settled(task: asyncio.Task[T]) -> None:
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

    def wait_for(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run this coroutine there, and wait for it. A wait that is interrupted cancels it."""
        result: concurrent.futures.Future[T] = concurrent.futures.Future()
        tasks: set[asyncio.Task[Any]] = set()

        def done(found: T | Exception) -> None:
            if isinstance(found, Exception):
                result.set_exception(found)
            else:
                result.set_result(found)

        self.begin(work, tasks, done)
        try:
            return result.result()
        except BaseException:
            self.cancel(tasks)
            raise

    def cancel(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        """Have these cancelled soon. Any thread may ask; in a fork, which has no part in them, nothing happens."""
        if not self.forked:
            self.session.post(functools.partial(cancel_all, tasks))

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


class PendingCall:
    """The prompts of one call that are under way. It does not know the iterator that reads its answers: one that is
    dropped cancels it.
    """

    def __init__(self, opened: OpenedLLM, timeout: float | None, request: dict[str, Any]) -> None:
        self.opened, self._timeout = opened, timeout
        self._requester = opened.requester(**request)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.answered: Mailbox[tuple[int, int, Generation | Exception]] = Mailbox()  # place, rows, answer
        self.parts: Mailbox[Part | None] = Mailbox()  # None: the answer is there

    def submit(self, place: int, prompt: Prompt, reads: bool = False) -> None:
        def done(found: Generation | Exception) -> None:
            self.answered.put((place, prompt.samples, found))
            if reads:
                self.parts.put(None)

        reader = self.parts.put if reads else None
        ask = functools.partial(self.opened.ask, self._requester, prompt, self._timeout, reader)
        self.opened.begin(ask, self._tasks, done)

    def cancel(self) -> None:
        """What is not finished is not wanted. Any thread."""
        self.opened.cancel(self._tasks)
