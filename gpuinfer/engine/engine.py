"""The queue core on an event loop: takes requests, does what the core decides, calls the backend, settles the futures.

Everything happens on one event loop and in one order: `submit` hands a request to the core and wakes, `_dispatch` does
what is decided, `_serve` runs one batch in a forward lane and settles it. The dispatcher is woken at most once for each
turn of the loop, and not at all while the backend has no room: so the queue grows while the backend is busy, and a
request costs no task.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Callable, Coroutine, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from gpuinfer.api import (
    Backend,
    BackendContext,
    Limits,
    Priority,
    Request,
    Result,
    Roofline,
    Strategy,
    forward_lane,
    forward_lanes,
    prompts_lane,
)
from gpuinfer.config import blame
from gpuinfer.engine.core import Batch, Core, Journal
from gpuinfer.engine.lanes import FreeLanes
from gpuinfer.engine.lanes import forward_lanes as opened_lanes
from gpuinfer.engine.results import Future, OnPart, Unsettled, answer, as_failure
from gpuinfer.engine.scheduler import Cut, PassThrough, class_of
from gpuinfer.engine.watchdog import Held, Patience
from gpuinfer.errors import Closed, WorkError
from gpuinfer.host.event_loop import Alarm
from gpuinfer.stats import Lane, Snapshot

log = logging.getLogger(__name__)

CANCEL_WAIT_S = 1.0  # how long a cancelled batch may take to let go
HURRY_S = 0.5  # how long the backend may take to close when the user does not wait any more
LET_GO_S = 0.1  # the same as `CANCEL_WAIT_S`


class Engine:
    """Batches requests for one backend, which it starts and closes.

    `max_queue_rows` bounds the rows that may wait (see `QueueBounds`); `recorder` writes down what happens, and is
    closed by its maker; `patience_s` is how long `close` waits with nothing coming back. All methods but `held` belong
    to the event loop that called `start`.
    """

    limits: Limits  # the backend's, once it has started

    def __init__(
        self,
        backend: Backend,
        strategy: Strategy,
        *,
        max_queue_rows: int | None = None,
        recorder: Journal | None = None,
        clock: Callable[[], float] = time.monotonic,
        patience_s: float = 30.0,
    ) -> None:
        self.backend = backend
        self.strategy = PassThrough() if backend.remote else strategy
        self._given_strategy = strategy  # which a remote backend takes to where batches form
        # of the forward, one for each batch in flight; with slots one a device, and "prompts 0" beside them
        self.lanes: list[Lane] = []
        self._own_lanes: list[Lane] = []  # the backend's, which stand behind these
        self._max_queue_rows = max_queue_rows
        self._clock = clock
        self._patience_s = patience_s
        self._warn = blame.WarnOnce()
        self._core = Core(self.strategy, recorder, self._warn)
        self._unsettled = Unsettled(self._core.settled, clock)
        self._free = FreeLanes(())
        self._running: dict[asyncio.Task[None], Batch] = {}  # the batches under way
        self.longest_s = 0.0  # that a batch, or forward step, took until now
        self._doing = ""  # starting or closing
        self._given_up: WorkError | None = None
        self._hurried: asyncio.Future[None]  # since `start`: done when the user does not want to wait
        self._woken = False
        self._shut: str | None = "has not been started. Await start() first."  # why it takes no request
        self._draining = False
        self._backend_open = False
        self._admits = False  # rows take free slots, and the backend tells its own steps: its lane is one, never taken

    async def start(self, roofline: Roofline | None = None) -> None:
        """Start the backend and open for requests. A backend that cannot start is closed again.

        `roofline` is what the bare model was measured to do, for the backend to know.
        """
        self._loop = asyncio.get_running_loop()
        self._hurried = self._loop.create_future()
        self._alarm = Alarm(self._loop, self._dispatch)  # batches run in this context, not in that of some request
        self._backend_open, self._doing = True, "starting"

        def settle(request: Request, outcome: str, now: float, detail: object) -> None:
            """With slots: those that the request took are free, though its batch runs on."""
            self._core.settled(request, outcome, now, detail)
            self._wake()

        context = BackendContext(
            strategy=self._given_strategy,
            roofline=roofline,
            stepped=self._stepped,
            resized=self._resized,
            lane=self._lane,
        )
        try:
            with blame.blaming(self.backend, "start"):
                if not await self._ends(self.backend.start(context)):
                    raise self._given_up or _closed()
            self._doing = ""
            with blame.blaming(self.backend, "limits"):
                self.limits = limits = self.backend.limits
                self._streams = self.backend.streams
                self._admits = limits.slots is not None and self._streams
                self._core.open(limits, self._max_queue_rows, stepped=self._admits)
                if limits.slots is not None:
                    self._unsettled.settled = settle
                self.lanes = opened_lanes(limits, self._clock, admits=self._admits)
                self._free = FreeLanes(self.lanes)
                if self._admits:
                    self.lanes.append(Lane("prompts 0", clock=self._clock))
        except BaseException:
            self._doing = ""
            await self._close_backend()
            raise
        self._shut = None

    def _lane(self, name: str) -> Lane:
        """Another one, for a thread of the backend's own. Any thread may ask, until `start` has returned."""
        self._own_lanes.append(Lane(name, clock=self._clock))
        return self._own_lanes[-1]

    def _stepped(self, rows: int, seconds: float) -> None:
        self.longest_s = max(self.longest_s, seconds)
        self._core.stepped(rows, seconds)

    def _resized(self, slots: int) -> None:
        if self._admits:
            self._core.resize(slots)
            self._wake()

    # Requests

    async def submit(
        self,
        payload: Any,
        *,
        rows: int = 1,
        priority: Priority = Priority.NORMAL,
        timeout: float = math.inf,
        group: Hashable = None,
        client: Hashable = None,
        on_part: OnPart | None = None,
    ) -> Result:
        """Queue one request and wait for its result; errors and cancellation are as `api.Infer` promises.

        `on_part` is handed the parts of the answer as they come, on this loop; it must neither wait nor raise.
        """
        if self._shut is not None:
            raise self._refusal()
        if type(priority) is not Priority:  # counted by its number: one that is none must do no harm half-way
            priority = class_of(priority)
        now = self._clock()
        request = Request(payload, rows, now, priority, now + timeout, group, client, on_part is not None)
        future = self._loop.create_future()
        self.enqueue(request, future, on_part)
        try:
            return await future
        except BaseException:
            self.withdraw(request)  # where the client was cancelled
            raise

    def enqueue(self, request: Request, future: Future, on_part: OnPart | None = None) -> None:
        """Queue one request that has arrived now. `future` gets its result or error, on this loop; it may be one that
        another thread waits for. Raises what `submit` raises at once.
        """
        if self._shut is not None:
            raise self._refusal()
        if (shed := self._core.arrive(request)) is not None:
            for other, error in shed.turned_away:
                self._unsettled.fail(other, error)
            if shed.refusal is not None:
                raise shed.refusal
        self._unsettled.add(request, future, on_part)
        if request.deadline < math.inf:
            self._alarm.ring_within(request.deadline - request.arrived)
        if self._free and not self._woken:
            self._wake()

    def _refusal(self) -> WorkError:
        return self._given_up or Closed(f"the engine {self._shut}")

    def withdraw(self, request: Request) -> None:
        """Cancel a request that is not settled yet."""
        if request in self._unsettled:
            waited = self._core.withdraw(request)
            self._unsettled.drop(request)
            if waited:
                self._wake()
            else:
                try:
                    self.backend.cancel(request)
                except Exception as error:  # noqa: BLE001 (a plugin may raise anything: no request depends on it)
                    self._warn(self.backend, "cancel", error)

    async def update(self, version: str, weights: str, *, adapter: str | None = None, drain: bool = True) -> None:
        """Have the backend change its weights: see `Backend.update`. Raises what it raises, and `Closed`."""
        change = functools.partial(self.backend.update, version, weights, adapter=adapter, drain=drain)
        await self._change("update", change, "the weights were changed")

    async def unload(self, adapter: str) -> None:
        """Have the backend unload an adapter: see `Backend.unload`. Raises what it raises, and `Closed`."""
        await self._change("unload", functools.partial(self.backend.unload, adapter), "the adapter was unloaded")

    async def free_memory(self) -> Mapping[str, int]:
        """Have the backend give memory back: see `Backend.free_memory`. Raises what it raises, and `Closed`."""
        found: dict[str, int] = {}  # `_change` answers nothing

        async def free() -> None:
            found.update(await self.backend.free_memory())

        await self._change("free_memory", free, "the memory was free")
        return found

    async def _change(self, method: str, change: Callable[[], Coroutine[Any, Any, None]], done: str) -> None:
        if self._shut is not None:
            raise self._refusal()
        with blame.blaming(self.backend, method):
            if not await self._ends(change()):
                raise self._given_up or Closed(f"the engine was closed before {done}.")

    def join(self, client: Hashable) -> None:
        self._core.join(client, self._clock())
        self._wake()

    def leave(self, client: Hashable) -> None:
        self._core.leave(client)
        self._wake()

    def snapshot(self) -> Snapshot:
        return self._core.snapshot([*self.lanes, *self._own_lanes])

    # Cutting

    def _wake(self) -> None:
        """Dispatch at the end of this turn of the loop, so that all who submit in it can share a batch."""
        if self._core.queue.rows and not self._woken:
            self._woken = True
            self._alarm.ring_soon()

    def _dispatch(self) -> None:
        self._woken = False
        now = self._clock()
        while not isinstance(step := self._core.decide(now, len(self._free), draining=self._draining), float):
            if isinstance(step, Cut):
                self._launch(step, now)
            else:
                for request in step.requests:
                    self._unsettled.fail(request, step.error_of(request))
        if step < math.inf:
            self._alarm.ring_within(max(0.0, step - now))

    def _launch(self, cut: Cut, now: float) -> None:
        gone = [request for request in cut.requests if self._unsettled.cancelled(request)]
        if gone:  # in this very turn of the loop
            for request in gone:
                self._unsettled.drop(request)
            wanted = tuple(request for request in cut.requests if request in self._unsettled)
            cut = replace(cut, requests=wanted, rows=sum(request.rows for request in wanted))
        if cut.requests:
            batch = self._core.launch(cut, now)
            lane = self.lanes[0] if self._admits else self._free.take(cut.rows)
            task = self._loop.create_task(self._serve(batch, lane), name=lane.name)
            self._running[task] = batch
            task.add_done_callback(functools.partial(self._ended, lane))

    # Serving

    async def _serve(self, batch: Batch, lane: Lane) -> None:
        """Run one batch in one lane. Whatever happens, each of its requests is settled."""
        forward_lane.set(lane)
        if self._admits:
            forward_lanes.set(self.lanes[:-1])
            prompts_lane.set(self.lanes[-1])
        else:
            lane.enter("forward")
        started = self._clock()
        try:
            ended = await answer(self.backend, batch.requests, self._unsettled, lane, self._clock)
            self.longest_s = max(self.longest_s, seconds := ended - started)
            self._free.took(lane, batch.rows, seconds)
            self._core.ended(batch, started, seconds, ended)
        except BaseException as error:
            self._unsettled.fail_all(batch.requests, as_failure(self.backend, error))
            if not isinstance(error, Exception | asyncio.CancelledError):  # an interrupt is not ours to keep
                raise
        finally:
            if not self._admits:
                lane.enter("idle")

    def _ended(self, lane: Lane, task: asyncio.Task[None]) -> None:
        batch = self._running.pop(task)
        if task.cancelled():  # before its first step
            self._unsettled.fail_all(batch.requests, as_failure(self.backend, asyncio.CancelledError()))
        if lane.retired:
            self._core.lose_lane()
        elif not self._admits:
            self._free.put(lane)
        self._wake()

    # Who holds what

    @property
    def busy(self) -> bool:
        return bool(self._unsettled or self._running)

    @property
    def serving(self) -> bool:
        """Whether the backend has been given anything that it has not answered."""
        return bool(self._running)

    @property
    def waiting_rows(self) -> int:
        return self._core.queue.rows

    @property
    def moved(self) -> int:
        """A number that changes whenever something is cut, computed, answered or given up."""
        return self._core.moved + self._core.batches + self._unsettled.parts

    def held(self, patience: Patience) -> Iterator[Held]:
        """What backend and strategy have in hand. Any thread may ask."""
        if self._doing:
            limit_s = patience.start_s if self._doing == "starting" else math.inf  # `close` has a limit of its own
            yield Held(self._doing, self.backend, f"has been {self._doing} for {{age}}", limit_s)
        if batches := list(self._running.values()):  # the oldest first
            yield self._held_batch(batches[0], patience)
        else:
            yield from self._core.held(patience)

    def _held_batch(self, batch: Batch, patience: Patience) -> Held:
        """A batch; where answers come one by one, or from a far side, that none has come."""
        remote = self.backend.remote
        limit_s = patience.batch_s(self.longest_s, remote)
        try:
            reason = self.backend.waits_for()
        except Exception:  # noqa: BLE001 (a plugin's, in the watchdog's thread: the batch is named without it)
            reason = ""
        waits = f", and waits for {reason.replace('{', '{{').replace('}', '}}')}" if reason else ""
        if remote or self._streams:
            doing = f"has answered nothing for {{age}} ({_counted(len(self._unsettled), 'request')} outstanding){waits}"
            return Held(("answers", self._core.moved + self._unsettled.parts), self.backend, doing, limit_s)
        what = f"{_counted(len(batch.requests), 'request')}, {_counted(batch.rows, 'row')}"
        doing = f"has had batch {batch.number} ({what}) for {{age}}{waits}"
        return Held(("batch", batch.number), self.backend, doing, limit_s)

    def give_up(self, error: WorkError) -> None:
        """Fail all that is unsettled with this error, and wait for nothing in `close`."""
        if not self._backend_open:
            return
        self._given_up, self._shut = error, "was given up."
        self.hurry()
        for request in self._unsettled:
            self._core.withdraw(request)
            self._unsettled.fail(request, error)
        for task in tuple(self._running):
            task.cancel()

    def hurry(self) -> None:
        """The user does not want to wait any more: `close` waits for no batch, and for the backend only a moment."""
        if (hurried := getattr(self, "_hurried", None)) is not None and not hurried.done():
            hurried.set_result(None)

    async def _ends(self, work: Coroutine[Any, Any, None], within_s: float = math.inf) -> bool:
        """Let the backend do this, for so long at most and after `hurry` only for a moment, before it is cancelled.

        Whether it has ended by itself. Raises what it raises.
        """
        task = self._loop.create_task(work)
        hurried, timeout = self._hurried, None if within_s == math.inf else within_s
        try:
            await asyncio.wait({task, hurried}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if hurried.done() and not task.done():
                await asyncio.wait({task}, timeout=HURRY_S)
            ended = task.done()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=LET_GO_S if hurried.done() else CANCEL_WAIT_S)
        if ended:
            task.result()
        elif task.done() and not task.cancelled():
            task.exception()  # seen, and too late
        return ended

    # Closing

    async def close(self, drain: bool = True) -> None:
        """Take no more requests, settle those there are, close the backend.

        With `drain` what waits is still served, else it fails with `Closed` at once. So does, with and without,
        whatever is left when nothing has come back for `patience_s`.
        """
        self._shut, self._draining = "is closed. Start another.", True
        if not self._backend_open:  # never started, or closed before: nothing is unsettled
            return
        try:
            if not drain:
                self._fail_waiting()
            while (self._unsettled or self._running) and not self._hurried.done():  # as long as something comes back
                self._dispatch()
                before = len(self._unsettled)
                if not self._running:
                    break
                done, _ = await asyncio.wait(
                    {*self._running, self._hurried}, timeout=self._patience_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done and len(self._unsettled) == before:
                    break
        finally:
            self._fail_waiting()
            self._unsettled.fail_all(self._unsettled, _closed())
            self._alarm.clear()
            tasks = tuple(self._running)
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=LET_GO_S if self._hurried.done() else CANCEL_WAIT_S)
            await self._close_backend()

    def _fail_waiting(self) -> None:
        for request in self._unsettled:
            if self._core.withdraw(request):
                self._unsettled.fail(request, _closed())

    async def _close_backend(self) -> None:
        if not self._backend_open:
            return
        self._backend_open, self._doing = False, "closing"
        try:
            if not await self._ends(self.backend.close(), self._patience_s):
                log.warning("%s did not close in time, and is left as it is.", blame.who(self.backend))
        except Exception as error:  # noqa: BLE001 (as for `cancel`)
            self._warn(self.backend, "close", error)
        self._doing = ""


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _closed() -> Closed:
    return Closed("the engine was closed before this request was served. Submit it again to another engine.")
