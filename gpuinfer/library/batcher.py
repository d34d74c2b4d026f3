"""`Batcher`: rows of many callers share batches of one model, from threads and from coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import threading
import time
from collections import deque
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Coroutine,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeVar

import numpy as np

from gpuinfer import stats
from gpuinfer.api import Backend, Priority, Progress, Request, Roofline, Setup, Strategy
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.config import registry
from gpuinfer.engine.results import CheckedResult
from gpuinfer.errors import Closed, Expired, GpuinferError, QueueFull, UsageError
from gpuinfer.host import children
from gpuinfer.library.choices import (
    backend_of,
    checked_options,
    in_python_words,
    priority_of,
    reworded,
    seconds_of,
    setup_from,
    strategy_name,
    strategy_of,
)
from gpuinfer.library.measured import SessionClock, SessionFigures
from gpuinfer.models.row_layout import (
    ANY_MODEL,
    Ragged,
    RowLayout,
    SingleRow,
    batch_leaves,
    batch_payload,
    checked_leaves,
    first_row,
    full_leaves,
    is_tensor,
    layout_of_row,
    named_spec,
    padded_leaves,
)
from gpuinfer.runtime import run_roofline
from gpuinfer.runtime.background_session import BackgroundSession, PendingAnswer
from gpuinfer.runtime.session import Session

if TYPE_CHECKING:
    from gpuinfer.engine.engine import Engine
    from gpuinfer.models.model_object import LocalModel

LEAST_CAPACITY = 4096  # rows that may be outstanding, unless the program says another number
BATCHES_OUTSTANDING = 64  # the same, in full batches
WINDOW_BATCHES = 4  # that `map` keeps outstanding
LEAST_TIMEOUT_S = 1e-6  # of a request whose time was over before it came to the queue: it expires there
FIGURES_S = 0.25  # between two looks at the counters of another process
ROOM_LOOK_S = 0.002  # of a coroutine that waits for room in another thread's queue


A = TypeVar("A", "RowFuture", "WaitedRow")


class SharedDevice:
    """What batchers that share a device have in common: the backend that was opened there first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.first: InProcess | None = None


class Batcher(SessionFigures):
    """Answers rows with a model, many at a time: rows that several callers ask at once share a batch.

    `model`: any `torch.nn.Module` (the object is given back untouched: gradients and dropout are off in a copy of its
    modules that shares its weights), a class of such (`arguments` are passed to it), a function of a batch, or a name:
    a built-in network or `"module:factory"`, with `weights` of a file. It is called with the rows of a batch joined
    along a new first dimension, and answers with a tensor, or a tuple or dict of tensors, whose first dimension is that
    of the rows. It is tried on two and three rows of ones first.

    A row is a tensor or an array of any shape and dtype, a number, or a tuple or dict of these. The first row says what
    all look like, unless `example` does. The parts of a tuple or dict are passed one by one if the model takes them so.
    Answers to tensors are tensors, to arrays arrays. They lie on the CPU; but rows on a CUDA device that the model
    computes on are joined there, without a way through the host, and so are their answers: complete, in memory of the
    stream that was the current one when the row was asked.

        with gpuinfer.Batcher(model) as batcher:             # from any thread
            y = batcher.predict(x)
            future = batcher.submit(x)
            ys = list(batcher.map(xs))

        async with gpuinfer.Batcher(model) as batcher:       # from any coroutine of this event loop
            y = await batcher(x, priority="high", timeout=0.2)

    `strategy`: when a batch is cut; a name, or `gpuinfer.Dynamic`, `Adaptive`, `ByPriority`. `backend`: "inprocess";
    "central" for a server process, which imports the model's class; or "fleet", with a model's name, or with None and
    `endpoint="http://host:8000"` of a server that runs. `devices`: "auto", "cpu", "cuda:1", "all", or a list. `dtype`:
    what modules compute in; by default their own where that is float16 or bfloat16 and the device has fast products of
    it, else float32. Their answers are float32. `ragged`: how rows whose first dimensions differ share batches: "pad"
    (filled up at their end with `pad_value`, to a few lengths) or "group" (with rows of the same shape only); to other
    processes "pad" alone, to the length of the `example`. `queue`: when `max_queue_rows` are outstanding, a further row
    waits ("wait") or raises `QueueFull` ("refuse"). `check`: an answer with NaN or +inf raises `BadResult`. `roofline`:
    measure the bare model first, for some seconds; the verdict then knows what larger batches would bring. Further
    keyword arguments are the backend's options (`gpuinfer docs reference/plugins#backend-inprocess`), such as
    `max_rows=256` (of a batch) or `threads=1`. On a CUDA device two threads run the model, each on its own stream; a
    model that changes itself while it computes needs `in_flight=1`.

    A row is read when its batch is computed: write to its memory only once its answer is there.

    Raises `UsageError` for what cannot be served, with the cure. Where a row makes the model raise, that row's caller
    gets the error, and its neighbours are answered.
    """

    def __init__(
        self,
        model: Any,
        *,
        strategy: Strategy | str = "dynamic",
        backend: str = "inprocess",
        devices: Any = "auto",
        dtype: Any = None,
        example: Any = None,
        ragged: Ragged = None,
        pad_value: float = 0,
        queue: Literal["wait", "refuse"] = "wait",
        max_queue_rows: int | None = None,
        check: bool = True,
        deterministic: bool = False,
        arguments: Mapping[str, Any] | None = None,
        weights: str | os.PathLike[str] | None = None,
        seed: int = 0,
        share: float = 1.0,
        roofline: bool = False,
        **options: Any,
    ) -> None:
        for name, given, choices in (("ragged", ragged, (None, "pad", "group")), ("queue", queue, ("wait", "refuse"))):
            if given not in choices:
                raise UsageError(f"{name}={given!r} is no choice. Give one of {', '.join(map(repr, choices))}.")
        self._model, self._arguments, self._check = model, dict(arguments or {}), check
        self._weights = None if weights is None else os.fspath(weights)
        if max_queue_rows is not None and max_queue_rows < 1:
            raise UsageError(f"max_queue_rows={max_queue_rows!r} lets no row in. Give 1 or more.")
        self._backend, self._options, self._measures = backend, options, roofline
        checked_options(backend, options, inspect.signature(Batcher).parameters)
        self._strategy = strategy_of(strategy)
        self._ragged: Ragged = ragged
        self._pad_value, self._refuses, self._max_queue_rows = pad_value, queue == "refuse", max_queue_rows
        self._source: LocalModel | None = None
        if backend != "inprocess" and (ragged == "group" or (ragged == "pad" and example is None)):
            raise UsageError(
                f'ragged={ragged!r} and backend="{backend}": to other processes all rows travel in one shape. Give '
                'ragged="pad" and the longest row as the example, or use backend="inprocess".'
            )
        if weights is not None and not isinstance(model, str | None):
            raise UsageError(
                "weights go with a model's name, and this one is an object. Load them into it first: "
                "model.load_state_dict(safetensors.torch.load_file(weights))."
            )
        if model is None and "endpoint" not in options:
            raise UsageError(
                'model=None is that of a server that runs. Say where: backend="fleet", endpoint="http://host:8000"; '
                "or pass a model."
            )
        if backend == "fleet" and not isinstance(model, str | None):
            cure = "Pass None." if "endpoint" in options else "Pass 'module:factory', a function in a file."
            raise UsageError(f"the replicas of a fleet load their model by its name, and this one is an object. {cure}")
        if model is None:
            self._model = ANY_MODEL
        elif not isinstance(model, str):
            from gpuinfer.models.model_object import LocalModel, PortableModel

            self._source = LocalModel(model, self._arguments)
            if backend != "inprocess":
                PortableModel.refuse_immovable(self._source)
            elif roofline:
                try:
                    PortableModel.refuse_immovable(self._source)
                except UsageError as error:
                    raise UsageError(
                        "roofline=True measures the model in a process of its own, and this one cannot go there. Leave "
                        "it out, or write the model to a file and import it."
                    ) from error
            dtype = dtype or self._source.half_dtype
        self._setup = setup_from(devices=devices, dtype=dtype, seed=seed, deterministic=deterministic, share=share)
        self._layout = None if example is None else layout_of_row(example, ragged)
        self._clock = SessionClock("batcher", backend, strategy_name(self._strategy), self._setup)
        self._process = os.getpid()
        self._closed = False
        self._shared = SharedDevice()
        self._opening = threading.Lock()
        self._background: BackgroundSession | None = None  # for threads
        self._loop: asyncio.AbstractEventLoop | None = None  # of `async with`
        self._opening_here = asyncio.Lock()
        self._refreshing: asyncio.Task[None] | None = None
        self._session: Session | None = None  # once the model is open
        self._final: stats.Snapshot | None = None  # once it is closed
        self._room = threading.Condition()
        self._waits_for_room = False  # some thread
        self._outstanding = 0  # rows that are not settled
        self._peak = 0  # the most that ever were
        self._capacity = 0
        self._largest = 0  # rows of one request
        self._single: tuple[Any, Any, Any] = (None, None, None)  # class, shape and dtype of rows that are one array
        self._flat = False  # rows go to the backend as float32 [rows, features]
        self._devices: frozenset[Any] = frozenset()  # CUDA devices on which rows stay

    def __repr__(self) -> str:
        from gpuinfer.models.model_object import title_of

        state = "closed" if self._closed else "open" if self._session is not None else "not open yet"
        rows = "" if self._layout is None else f", rows of {self._layout}"
        return f"<gpuinfer.Batcher of {title_of(self._model) or 'a model'} on {self._backend}, {state}{rows}>"

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a batcher is not sent to other processes, nor copied. Make one in each process, or share one model among "
            "them: gpuinfer.CentralServer."
        )

    # Opening and closing

    def __enter__(self) -> Self:
        self._refuse_unusable(in_loop=False)
        if self._layout is not None:
            self._open(self._layout)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, layout: RowLayout) -> None:
        """Open the model, in a thread that answers any other. Blocks."""
        with self._opening:
            if self._session is not None:
                return
            self._refuse_unusable(in_loop=False)
            backend = self._backend_for(layout)
            measured = self._measured(backend)
            background = BackgroundSession(backend, strategy_of(self._strategy, setup=backend.setup))
            background.__enter__()
            try:
                with in_python_words():
                    background.session.roofline = self._clock.roofline = measured
                    background.ready()
            except BaseException:
                background.__exit__(None, None, None)
                self._release()
                raise
            self._background = background
            self._opened(layout, backend, background.session)

    def _measured(self, backend: Backend) -> Roofline | None:
        """What the bare model does, measured in a process of its own, where that is wanted. Blocks for some seconds."""
        spec = backend.setup.model
        if not self._measures or spec is None:
            return None
        children.refuse_while_imported("measuring a model")
        if spec.layout is not None and spec.layout.form is not None:
            raise UsageError("roofline=True measures models of one tensor, and a row here has parts. Leave it out.")
        if self._source is not None:
            from gpuinfer.models.model_object import PortableModel

            setup = replace(backend.setup, model=replace(spec, source=PortableModel.of(self._source)))
            backend = backend_of(self._backend, setup, self._options)
        with in_python_words(), run_roofline.bare_model(backend) as bare:
            return bare.before()

    def _opened(self, layout: RowLayout, backend: Backend, session: Session) -> None:
        limits = session.limits
        if isinstance(backend, InProcess):
            from gpuinfer.models.open_model import end_thread_pool

            end_thread_pool()  # of this thread, which may have computed before: the model computes in another
        self._layout, self._remote = layout, session.remote
        self._largest = limits.max_rows
        most = max(LEAST_CAPACITY, BATCHES_OUTSTANDING * limits.max_rows)
        self._capacity = self._max_queue_rows or most
        if not self._remote and not self._flat:
            from gpuinfer.models.device import resolve_devices

            if self._source is None or not self._source.takes_arrays:
                self._devices = frozenset(one for one in resolve_devices(self._setup.devices) if one.type == "cuda")
            self._single = plain_row(layout)
        self._clock.setup = session.setup
        self._clock.settings = {
            "backends": {self._clock.backend: backend.options.model_dump(mode="json")},
            "strategies": {self._clock.strategy: self._strategy.options.model_dump(mode="json")},
        }
        self._clock.begin()
        self._session = session

    def share_device(self, device: SharedDevice) -> None:
        """Take turns at a device with the other batchers that share it. Before this one is opened."""
        self._shared = device

    def _backend_for(self, layout: RowLayout) -> Backend:
        if self._backend != "inprocess":
            children.refuse_while_imported("a server")
        setup = self._setup_of(layout)
        with self._shared.lock, in_python_words():
            backend = backend_of(self._backend, setup, self._options)
            if isinstance(backend, InProcess):
                if self._shared.first is not None:
                    backend.share_device(self._shared.first)
                self._shared.first = self._shared.first or backend
        return backend

    def _setup_of(self, layout: RowLayout) -> Setup:
        if self._source is not None:
            from gpuinfer.models.model_object import object_spec

            elsewhere = self._backend != "inprocess"
            spec = object_spec(self._source, layout, check=self._check, elsewhere=elsewhere)
        else:
            spec = named_spec(self._model, replace(layout, check=self._check), self._weights, self._arguments)
        with in_python_words():
            kind = registry.load("backends", self._backend)
        if is_flat(layout) and not kind.remote and not issubclass(kind, InProcess):
            self._flat = True  # such a backend has rows as the contract says: float32 [rows, features]
            spec = replace(spec, inputs=layout.leaves[0].shape[0], input_dtype="float32", layout=None)
        return replace(self._setup, model=spec)

    async def __aenter__(self) -> Self:
        self._refuse_unusable(in_loop=True)
        self._loop = asyncio.get_running_loop()
        if self._layout is not None:
            await self._open_here(self._layout)
        return self

    async def _open_here(self, layout: RowLayout) -> None:
        """Open the model on the running event loop."""
        async with self._opening_here:
            if self._session is not None:
                return
            if self._closed:
                raise Closed("this batcher is closed. Make another.")
            backend = self._backend_for(layout)
            measured = await asyncio.to_thread(self._measured, backend)
            session = Session(backend, strategy_of(self._strategy, setup=backend.setup))
            await session.__aenter__()
            try:
                with in_python_words():
                    session.roofline = self._clock.roofline = measured
                    await session.ready()
                await session.mark()
            except BaseException:
                await session.__aexit__()
                self._release()
                raise
            self._opened(layout, backend, session)
            if session.remote:
                self._refreshing = asyncio.create_task(self._refresh_often(session))

    @staticmethod
    async def _refresh_often(session: Session) -> None:
        """Ask another process for its counters now and then: `stats` cannot, on the loop that would have to answer."""
        while True:
            await asyncio.sleep(FIGURES_S)
            with contextlib.suppress(GpuinferError):
                await session.refresh()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        async with self._opening_here:  # a first row may be opening the model
            session = self._session
        if session is None:
            self._release()
            return
        while self._outstanding:  # noqa: ASYNC110 (its watchdog ends every wait)
            await asyncio.sleep(ROOM_LOOK_S)
        if self._refreshing is not None:
            self._refreshing.cancel()
        await session.refresh()
        try:
            await session.__aexit__()
        finally:
            self._end(session)

    def close(self) -> None:
        """Answer what was asked, then close. Further rows raise `Closed`."""
        if self._loop is not None and not self._closed:
            raise UsageError("this batcher is open in an event loop. Leave its `async with` block instead.")
        with self._opening:
            background, was_closed, self._closed = self._background, self._closed, True
        if was_closed or self._process != os.getpid():
            return
        if background is None:
            self._release()
            return
        with self._room:
            while self._outstanding and background.alive:  # its watchdog ends every wait
                self._waits_for_room = True
                self._room.wait(0.1)
        try:
            if background.alive:
                with contextlib.suppress(GpuinferError, TimeoutError):
                    background.call(background.session.refresh(), timeout=10)
            background.__exit__(None, None, None)
        finally:
            self._end(background.session)

    def _end(self, session: Session) -> None:
        self._final = session.snapshot()
        self._clock.end()
        self._release()

    def _release(self) -> None:
        if self._source is not None:
            self._source.release()

    def _refuse_other_process(self) -> None:
        if self._process != os.getpid():
            raise UsageError(
                "this batcher came into this process by fork, and its threads did not. Make another here, or start "
                'processes by the method "spawn".'
            )

    def _refuse_unusable(self, *, in_loop: bool) -> None:
        self._refuse_other_process()
        if self._closed:
            raise Closed("this batcher is closed. Make another.")
        if in_loop and (self._session is not None or self._loop is not None):
            raise UsageError("this batcher is open already. Make another for this event loop.")
        if not in_loop and self._loop is not None:
            raise UsageError(
                "this batcher was opened by `async with`: await it in that event loop. Threads and other loops need "
                "one that was opened by `with`."
            )

    # Asking

    def predict(
        self, row: Any, *, priority: Priority | str = Priority.NORMAL, timeout: float | str | None = None
    ) -> Any:
        """The model's answer to one row. Blocks; call it from as many threads as you like.

        Raises `Expired` after `timeout` seconds ("200ms"), `QueueFull` where the queue refuses, `BackendError` where
        the model raises on this row, `BadResult`, `RequestError` for a row unlike the others, `Closed`.
        """
        payload, group, until = self._prepared(row, timeout)
        answer = self._send(WaitedRow, payload, None, group, priority_of(priority), until)
        return answer.wait(until, timeout)

    def submit(
        self, row: Any, *, priority: Priority | str = Priority.NORMAL, timeout: float | str | None = None
    ) -> Future[Any]:
        """Ask for one row without waiting for its answer: `result()` of the future waits, `cancel()` cancels.

        Waits while `max_queue_rows` are outstanding, unless the queue refuses. Raises as `predict` does.
        """
        payload, group, until = self._prepared(row, timeout)
        return self._send(RowFuture, payload, None, group, priority_of(priority), until)

    def _prepared(self, row: Any, timeout: float | str | None) -> tuple[Any, Hashable, float]:
        """A thread's row as it travels, whose batches it may share, and until when it is waited for
        (`time.monotonic`); opens the model.
        """
        if self._session is None or self._loop is not None or self._closed or self._process != os.getpid():
            self._refuse_unusable(in_loop=False)
            if self._session is None:
                self._open(self._layout or layout_of_row(row, self._ragged))
        return *self._payload(row), math.inf if timeout is None else time.monotonic() + seconds_until(timeout)

    def predict_batch(
        self,
        rows: Any,
        *,
        split: bool = False,
        priority: Priority | str = Priority.NORMAL,
        timeout: float | str | None = None,
    ) -> Any:
        """The answers to rows that the caller brings together: arrays with the rows along their first dimension.

        More rows than a batch may have are divided, with `split` also among all devices. Raises as `predict` does.
        """
        self._refuse_unusable(in_loop=False)
        if self._session is None:
            self._open(self._layout or layout_of_row(first_row(rows), self._ragged))
        parts = [self._batch_payload(part) for part in self._divided(rows, split)]
        until, of = time.monotonic() + seconds_until(timeout), priority_of(priority)
        futures = [self._send(RowFuture, payload, count, group, of, until) for payload, count, group in parts]
        return joined_answers([self._waited(future, until, timeout) for future in futures])

    def map(
        self,
        rows: Iterable[Any],
        *,
        ordered: bool = True,
        priority: Priority | str = Priority.NORMAL,
        progress: bool = False,
    ) -> Iterator[Any]:
        """The answers to rows that are read as they are needed, in their order or (`ordered=False`) as they come.

        `progress` draws a bar on standard error. Raises as `predict` does, at the place of the row; what is
        outstanding then is cancelled.
        """
        from gpuinfer.cli.screen.display import progress_bar

        if isinstance(rows, Mapping):
            raise UsageError(
                "map takes rows one by one, and a dict is one row. A dict of arrays, whose first dimension is that of "
                "the rows, goes to predict_batch."
            )
        total = len(rows) if isinstance(rows, Sized) else None
        with progress_bar("rows", total) if progress else contextlib.nullcontext(lambda count: None) as advance:
            for answer in self._mapped(iter(rows), ordered, priority):
                yield answer
                advance(1)

    def _mapped(self, rows: Iterator[Any], ordered: bool, priority: Priority | str) -> Iterator[Any]:
        asked: deque[Future[Any]] = deque()
        come: deque[Future[Any]] = deque()
        arrived = threading.Semaphore(0)

        def note(future: Future[Any]) -> None:
            come.append(future)
            arrived.release()

        def ask() -> bool:
            for row in rows:
                try:
                    future = self.submit(row, priority=priority)
                except GpuinferError as error:  # raised at its place
                    future = Future()
                    future.set_exception(error)
                asked.append(future)
                if not ordered:
                    future.add_done_callback(note)
                return True
            return False

        more = True
        try:
            while more or asked:
                while more and len(asked) < self._window and not (asked[0].done() if ordered and asked else come):
                    more = ask()
                if not asked:
                    return
                if ordered:
                    future = asked.popleft()
                else:
                    arrived.acquire()
                    future = come.popleft()
                    asked.remove(future)
                yield future.result()
        finally:
            for future in asked:
                future.cancel()

    def __call__(
        self, row: Any, *, priority: Priority | str = Priority.NORMAL, timeout: float | str | None = None
    ) -> Coroutine[Any, Any, Any]:
        """The model's answer to one row, awaited: `y = await batcher(x)`, in a coroutine.

        Cancelling the wait cancels the request. Raises as `predict` does, and `UsageError` where no event loop runs.
        """
        if asyncio._get_running_loop() is None:
            raise UsageError(
                "batcher(row) is awaited by coroutines: y = await batcher(row). Where no event loop runs, call "
                "batcher.predict(row)."
            )
        return self._awaited(row, priority, timeout)

    async def _awaited(self, row: Any, priority: Priority | str, timeout: float | str | None) -> Any:
        session = self._session
        if session is None or self._closed or os.getpid() != self._process:
            session = await self._ready_here(row)
        if priority is not Priority.NORMAL:
            priority = priority_of(priority)
        payload, group = self._payload(row)
        loop = asyncio.get_running_loop()
        if timeout is None and self._loop is loop and self._outstanding < self._capacity:
            self._outstanding += 1
            if self._outstanding > self._peak:
                self._peak = self._outstanding
            engine, answered = session.engine, loop.create_future()
            request = Request(payload, 1, time.monotonic(), priority, math.inf, group)
            try:
                engine.enqueue(request, answered)
                answer = await answered
            except GpuinferError as error:
                raise reworded(error) from error.__cause__
            except BaseException:
                engine.withdraw(request)  # the wait was cancelled
                raise
            finally:
                self._outstanding -= 1
            return self._unwrapped(answer, None) if self._remote or self._flat else answer.value
        return await self._ask(session, payload, None, group, priority, timeout)

    async def batch(
        self,
        rows: Any,
        *,
        split: bool = False,
        priority: Priority | str = Priority.NORMAL,
        timeout: float | str | None = None,
    ) -> Any:
        """`predict_batch`, awaited."""
        session = self._session
        if session is None or self._closed:
            session = await self._ready_here(first_row(rows))
        parts = self._divided(rows, split)
        of = priority_of(priority)
        asked = (self._ask(session, *self._batch_payload(part), of, timeout) for part in parts)
        return joined_answers(await asyncio.gather(*asked))

    async def stream(self, rows: Iterable[Any] | AsyncIterable[Any], *, ordered: bool = True) -> AsyncIterator[Any]:
        """`map`, for `async for`: rows are read in a task of their own while answers are awaited."""
        source = aiter(rows) if isinstance(rows, AsyncIterable) else _as_async(iter(rows))
        ready: asyncio.Queue[asyncio.Future[Any] | None] = asyncio.Queue()
        room = asyncio.Semaphore(1)  # until the model is open, and says how many rows a batch has
        tasks: set[asyncio.Future[Any]] = set()

        async def read() -> None:
            widened = False
            async for row in source:
                await room.acquire()
                task = asyncio.ensure_future(self(row))
                tasks.add(task)
                if ordered:
                    ready.put_nowait(task)
                else:
                    task.add_done_callback(ready.put_nowait)
                if not widened:
                    await asyncio.wait({task})
                    widened = True
                    for _ in range(self._window - 1):
                        room.release()

        reader = asyncio.ensure_future(read())
        reader.add_done_callback(lambda _: ready.put_nowait(None))
        try:
            while not (reader.done() and not tasks):
                if (task := await ready.get()) is None:
                    continue
                try:
                    answer = await task
                finally:
                    tasks.discard(task)
                    room.release()
                yield answer
            reader.result()
        finally:
            for one in (reader, *tasks):
                one.cancel()

    @property
    def _window(self) -> int:
        return max(1, min(self._capacity, WINDOW_BATCHES * self._largest))

    # One request

    def _payload(self, row: Any) -> tuple[Any, Hashable]:
        """A row as it travels, and whose batches it may share."""
        kind, shape, dtype = self._single
        like_most = type(row) is kind and row.shape == shape and row.dtype == dtype
        if like_most and (kind.__name__ == "ndarray" or (row.is_cpu and not row.requires_grad)):
            return SingleRow((row,)), None
        layout = self._layout
        assert layout is not None
        leaves = checked_leaves(row, layout, self._devices)
        if self._flat:
            return np.asarray(leaves[0], np.float32)[None], None
        group = None
        if layout.ragged is not None and not self._remote:
            if layout.ragged == "pad":
                leaves = padded_leaves(leaves, layout, self._pad_value)
            group = tuple(tuple(leaf.shape) for leaf in leaves)
        if self._remote:
            if layout.ragged is not None:
                leaves = full_leaves(leaves, layout, self._pad_value)
            return batch_payload([leaf[None] for leaf in leaves], 1, layout, packed=True), None
        if self._lies_there(leaves):
            from gpuinfer.models.forward_leaves_cuda import DeviceRows

            return DeviceRows([leaf[None] for leaf in leaves], 1, single=True), group
        return SingleRow(leaves), group

    def _lies_there(self, leaves: Sequence[Any]) -> bool:
        return bool(self._devices) and any(getattr(leaf, "is_cuda", False) for leaf in leaves)

    def _batch_payload(self, leaves: Sequence[Any]) -> tuple[Any, int, Hashable]:
        layout = self._layout
        assert layout is not None
        rows = len(leaves[0])
        if self._flat:
            return np.asarray(leaves[0], np.float32), rows, None
        if layout.ragged is not None and self._remote:
            leaves = full_leaves(leaves, layout, self._pad_value, batch=True)
        group = tuple(tuple(leaf.shape[1:]) for leaf in leaves) if layout.ragged and not self._remote else None
        if self._lies_there(leaves):
            from gpuinfer.models.forward_leaves_cuda import DeviceRows

            return DeviceRows(leaves, rows), rows, group
        return batch_payload(leaves, rows, layout, packed=self._remote), rows, group

    def _divided(self, rows: Any, split: bool) -> list[list[Any]]:
        """The leaves of a batch, in portions that a request may have."""
        layout = self._layout
        assert layout is not None
        leaves = batch_leaves(rows, layout, self._devices)
        count = len(leaves[0])
        portion = self._largest
        if split and self._session is not None:
            portion = min(portion, -(-count // max(1, self._session.limits.in_flight)))
        return [[leaf[start : start + portion] for leaf in leaves] for start in range(0, count, portion)]

    def _send(
        self, kind: type[A], payload: Any, count: int | None, group: Hashable, priority: Priority, until: float
    ) -> A:
        """`count`: how many rows it has; None for a single row, whose answer has no axis of the rows."""
        background, session, rows = self._background, self._session, count or 1
        assert background is not None
        assert session is not None
        with self._room:
            while self._outstanding and self._outstanding + rows > self._capacity:
                if self._refuses or background.is_current_thread:
                    raise self._full(rows)
                left = until - time.monotonic()
                if left <= 0:
                    raise Expired("no room in the queue within the timeout. Ask fewer rows at once, or wait longer.")
                self._waits_for_room = True
                self._room.wait(min(1.0, left))
                self._refuse_unusable(in_loop=False)
            self._outstanding += rows
            if self._outstanding > self._peak:
                self._peak = self._outstanding
        now = time.monotonic()
        request = Request(payload, rows, now, priority, max(until, now + LEAST_TIMEOUT_S), group)
        answer = kind(background, request, session.engine)
        answer.owner, answer.count = self, count
        background.post(answer.enqueue)
        return answer

    def _full(self, rows: int) -> QueueFull:
        return QueueFull(
            f"the queue is full: {self._outstanding} of {self._capacity} rows are outstanding, and {rows} more do not "
            'fit. Wait for answers first, raise max_queue_rows, or give queue="wait".'
        )

    def _settled(self, rows: int) -> None:
        """So many rows are answered, or failed, or cancelled."""
        with self._room:
            self._outstanding -= rows
            if self._waits_for_room:
                self._waits_for_room = False  # those who find none wait again
                self._room.notify_all()

    @staticmethod
    def _waited(future: Future[Any], until: float, timeout: float | str | None) -> Any:
        if until == math.inf:
            return future.result()
        try:
            return future.result(max(0.0, until - time.monotonic()))
        except TimeoutError:
            future.cancel()
            raise _too_late(seconds_until(timeout)) from None

    async def _ready_here(self, row: Any) -> Session:
        """Open with this first row: on this loop after `async with`, else in a thread."""
        if self._loop is None:
            self._refuse_unusable(in_loop=False)
            await asyncio.to_thread(self._open, self._layout or layout_of_row(row, self._ragged))
        else:
            self._refuse_other_process()
            self._refuse_other_loop()
            await self._open_here(self._layout or layout_of_row(row, self._ragged))
        assert self._session is not None
        return self._session

    def _refuse_other_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise UsageError(
                "this batcher was opened in another event loop. Await it there, or open one by `with`, which any loop "
                "and thread may ask."
            )

    async def _ask(
        self,
        session: Session,
        payload: Any,
        count: int | None,
        group: Hashable,
        priority: Priority,
        timeout: float | str | None,
    ) -> Any:
        """One request, with the wait for room; `timeout` bounds both."""
        self._refuse_other_process()
        if self._loop is not None:
            self._refuse_other_loop()
        seconds, rows = seconds_until(timeout), count or 1
        until = time.monotonic() + seconds
        try:
            async with asyncio.timeout(None if seconds == math.inf else seconds):
                while self._outstanding and self._outstanding + rows > self._capacity:
                    if self._refuses:
                        raise self._full(rows)
                    await asyncio.sleep(ROOM_LOOK_S)
                if self._loop is None:
                    return await asyncio.wrap_future(self._send(RowFuture, payload, count, group, priority, until))
                self._outstanding += rows
                if self._outstanding > self._peak:
                    self._peak = self._outstanding
                try:
                    left = max(until - time.monotonic(), LEAST_TIMEOUT_S)
                    answer = await session(payload, rows=rows, priority=priority, timeout=left, group=group)
                finally:
                    self._outstanding -= rows
        except TimeoutError:
            raise _too_late(seconds) from None
        except GpuinferError as error:
            raise reworded(error) from error.__cause__
        return self._unwrapped(answer, count)

    def _unwrapped(self, answer: Any, count: int | None) -> Any:
        """An answer as the caller gets it. From another process, and for flat rows, come arrays [rows, …]."""
        if not self._flat or isinstance(answer, CheckedResult):
            answer = answer.value
        if not (self._remote or self._flat):
            return answer
        layout = self._layout
        assert layout is not None

        def made(part: Any) -> Any:
            part = part[0] if count is None else part
            if is_tensor(part):
                part = part.detach().cpu().numpy()
            if isinstance(part, np.ndarray) and not part.flags.writeable:  # of a body
                part = part.copy()
            if layout.kind == "numpy":
                return part
            import torch

            return torch.from_numpy(part) if getattr(part, "shape", ()) else torch.tensor(part)

        if isinstance(answer, Mapping):
            return {name: made(part) for name, part in answer.items()}
        return tuple(map(made, answer)) if isinstance(answer, tuple | list) else made(answer)

    # Figures

    def _progress(self, snapshot: stats.Snapshot) -> Progress:
        at_once = self._peak * snapshot.requests / snapshot.rows if snapshot.rows else 0  # requests of several rows
        return Progress(snapshot.rows, unit="rows", facts={"clients": at_once} if at_once else {})

    def _snapshot(self) -> stats.Snapshot:
        if self._final is not None:
            return self._final
        if self._session is None:
            return stats.Snapshot()
        background = self._background
        if self._remote and background is not None and background.alive and not background.is_current_thread:
            background.call(self._session.refresh(), timeout=10)
        return self._session.snapshot()


class RowFuture(PendingAnswer):
    """The future of a row's answer, as its caller gets it."""

    owner: Batcher
    count: int | None  # of the rows; None: a single one

    def set_result(self, result: Any) -> None:
        """On the session's loop."""
        try:
            answer = self.owner._unwrapped(result, self.count)
        except Exception as error:  # noqa: BLE001 (the caller's: whoever waits must not wait for ever)
            self.set_exception(error)
            return
        self.owner._settled(self.request.rows)  # first: who waits for this may ask for the next at once
        super().set_result(answer)

    def set_exception(self, exception: BaseException | None) -> None:
        """On the session's loop."""
        if isinstance(exception, GpuinferError):
            exception = reworded(exception)
        self.owner._settled(self.request.rows)
        super().set_exception(exception)

    def cancelled_here(self) -> None:
        """On the session's loop."""
        self.owner._settled(self.request.rows)


class WaitedRow:
    """The answer to a row that its thread waits for. Costs a third of what a future does, on its own and in switches
    of threads.
    """

    __slots__ = ("_answer", "_error", "_settled", "_settling", "background", "count", "engine", "owner", "request")

    owner: Batcher
    count: int | None

    def __init__(self, background: BackgroundSession, request: Request, engine: Engine) -> None:
        self.background, self.request, self.engine = background, request, engine
        self._answer: Any = None
        self._error: BaseException | None = None
        self._settled = False
        self._settling = threading.Lock()
        self._settling.acquire()  # until it is settled

    def wait(self, until: float, timeout: float | str | None) -> Any:
        """The answer; raises its error. `timeout`: what the caller said."""
        if until == math.inf:
            self._settling.acquire()
        elif not self._settling.acquire(timeout=max(0.0, until - time.monotonic())):
            self.background.post(self._withdraw)
            raise _too_late(seconds_until(timeout))
        if self._error is not None:
            raise self._error
        return self._answer

    # On the session's loop:

    def enqueue(self) -> None:
        try:
            self.engine.enqueue(self.request, self)
        except Exception as error:  # noqa: BLE001 (the caller's)
            self.set_exception(error)

    def done(self) -> bool:
        return self._settled

    def set_result(self, result: Any) -> None:
        try:
            self._answer = self.owner._unwrapped(result, self.count)
        except Exception as error:  # noqa: BLE001 (as of a future)
            self._error = error
        self._settle()

    def set_exception(self, error: BaseException) -> None:
        self._error = reworded(error) if isinstance(error, GpuinferError) else error
        self._settle()

    def cancel(self) -> None:
        """Nobody waits any more."""
        if not self._settled:
            self._settle()

    def _settle(self) -> None:
        self._settled = True
        self.owner._settled(self.request.rows)  # first: who waits for this may ask for the next at once
        self._settling.release()

    def _withdraw(self) -> None:
        if not self._settled:
            self.engine.withdraw(self.request)


def is_flat(layout: RowLayout) -> bool:
    """Whether a row is one float32 vector, the rows of which every backend takes."""
    (first, *others) = layout.leaves
    alone = layout.form is None and not others and layout.ragged is None
    return alone and first.dtype == "float32" and len(first.shape) == 1 and first.shape[0] > 0


def plain_row(layout: RowLayout) -> tuple[Any, Any, Any]:
    """Class, shape and dtype of a row that is a single array on the CPU; three None where rows are checked in full."""
    if layout.form is not None or layout.ragged is not None:
        return None, None, None
    (leaf,) = layout.leaves
    if layout.kind == "numpy":
        return np.ndarray, leaf.shape, np.dtype(leaf.dtype)
    import torch

    return torch.Tensor, torch.Size(leaf.shape), getattr(torch, leaf.dtype)


def joined_answers(answers: Sequence[Any]) -> Any:
    """The answers to portions of a batch as one: tensors, arrays, or tuples and dicts of them."""
    first = answers[0]
    if len(answers) == 1:
        return first
    if isinstance(first, Mapping):
        return {name: joined_answers([one[name] for one in answers]) for name in first}
    if isinstance(first, tuple):
        return tuple(joined_answers(parts) for parts in zip(*answers, strict=True))
    if hasattr(first, "untyped_storage"):
        import torch

        return torch.cat(list(answers))
    return np.concatenate(answers)


async def _as_async(rows: Iterator[Any]) -> AsyncIterator[Any]:
    for number, row in enumerate(rows):
        if number % 64 == 0:
            await asyncio.sleep(0)  # others have their turn
        yield row


def seconds_until(timeout: float | str | None) -> float:
    """The seconds of a timeout; infinite without one. Raises `UsageError`."""
    seconds = seconds_of("timeout", timeout)
    return math.inf if seconds is None else seconds


def _too_late(seconds: float) -> Expired:
    return Expired(f"no answer within {seconds:g} s. Ask fewer rows at once, or give a longer timeout.")
