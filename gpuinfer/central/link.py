"""An event loop's way to a central server."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable
from typing import Any

from numpy.typing import NDArray

from gpuinfer.api import Limits, Priority, Result
from gpuinfer.central.connection import LOOK_S, POOLED, Connection
from gpuinfer.central.wire import NOBODY
from gpuinfer.errors import BackendDied, Closed, GpuinferError


class Link:
    """One loop's connection. Like `client.Client`, but waiting is awaiting."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._waiting: dict[int, Any] = {}  # by the number of a request: the future of its answer
        self._numbers: dict[Hashable, int] = {}  # of the requests that wait, by their tags
        self._clients: dict[Hashable, int] = {}  # numbers, for the wire
        self._room = asyncio.Semaphore(POOLED)
        self._up = asyncio.Event()  # cleared while the server comes back
        self._lost: GpuinferError | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def limits(self) -> Limits:
        return self._connection.limits

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._connection.open)
        self._listen()
        self._keep(self._watch())

    def _listen(self) -> None:
        self._loop.add_reader(self._connection.fileno(), self._read)
        self._up.set()

    def _keep(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(self._tasks.discard)

    def block(self, rows: int) -> NDArray[Any]:
        return self._connection.block(rows)

    async def ask(
        self,
        payload: Any,
        rows: int,
        *,
        priority: Priority = Priority.NORMAL,
        deadline: float = math.inf,
        group: Hashable = None,
        client: Hashable = None,
        tag: Hashable,
    ) -> Result:
        """Send one request and wait for its answer. Raises as `Connection.ask` does, and the request's own error.

        `tag` is what `cancel` knows it by.
        """
        async with self._room:
            await self._up.wait()
            if self._lost is not None:
                raise self._lost
            who = NOBODY if client is None else self._clients.setdefault(client, len(self._clients))
            number = self._connection.ask(payload, rows, client=who, priority=priority, deadline=deadline, group=group)
            future = self._waiting[number] = self._loop.create_future()
            self._numbers[tag] = number
            try:
                return await future
            finally:
                del self._numbers[tag]
                if self._waiting.pop(number, None) is not None:  # whoever asked was cancelled
                    self._connection.abandon(number)

    def cancel(self, tag: Hashable) -> None:
        """Nobody wants this answer any more: whoever awaits it gets `Closed`, and the server is told."""
        if (number := self._numbers.get(tag)) is not None:
            self._settle(number, Closed("this request was cancelled."))
            self._connection.abandon(number)

    def _read(self) -> None:
        try:
            settled = self._connection.receive()
        except GpuinferError as error:
            self._gone(error)
            return
        for number, outcome in settled:
            self._settle(number, outcome)

    def _settle(self, number: int, outcome: Any) -> None:
        future = self._waiting.pop(number, None)
        if future is None or future.done():
            return
        if isinstance(outcome, GpuinferError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    async def _watch(self) -> None:
        """Look at the server's pulse: a stopped one hangs up by no other sign."""
        while self._lost is None:
            await asyncio.sleep(LOOK_S)
            if self._up.is_set() and (error := self._connection.stopped()) is not None:
                self._gone(error)

    def _gone(self, error: GpuinferError) -> None:
        self._loop.remove_reader(self._connection.fileno())
        self._up.clear()
        self._keep(self._come_back(error))

    async def _come_back(self, error: GpuinferError) -> None:
        try:
            if not isinstance(error, BackendDied):
                raise error
            await asyncio.to_thread(self._connection.come_back, error)
            self._listen()
        except GpuinferError as final:
            self._lose(final)
        except Exception as strange:  # noqa: BLE001 (whatever it is, nobody may wait for ever)
            self._lose(BackendDied(f"the way to the central server is lost: {strange!r}. Start it again."))

    @property
    def lost(self) -> BackendDied | None:
        """Why there is no way back to the server; None while there is, and after `close`."""
        return self._lost if isinstance(self._lost, BackendDied) else None

    def _lose(self, error: GpuinferError) -> None:
        """There is no way back: all who wait, and all who ask from now on, get this error."""
        self._lost = error
        for number in tuple(self._waiting):
            self._settle(number, error)
        self._up.set()

    async def close(self) -> None:
        self._lose(Closed("the backend was closed before this request was answered. Ask before you close it."))
        self._connection.give_up()
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        if self._connection.is_open:
            self._loop.remove_reader(self._connection.fileno())
        self._connection.close()
