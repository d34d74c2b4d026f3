"""A program's client of a central server: `evaluate` blocks, `submit` overlaps."""

from __future__ import annotations

import math
import numbers
import os
import select
import threading
import time
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.api import Priority, Request, Result
from gpuinfer.central.connection import GREETING_S, LOOK_S, POOLED, CentralConnection
from gpuinfer.central.protocol import ServerAddress
from gpuinfer.engine.scheduler import class_of
from gpuinfer.errors import BackendDied, Closed, Expired, GpuinferError, QueueFull, UsageError
from gpuinfer.models.row_layout import RowLayout, batch_leaves, batch_payload, is_tensor

SPIN_S = 200e-6  # a short round trip between two processes that are awake; longer ones may sleep
PROBE_S = 500e-6  # the same when both have to wake up first
PROBES = 3  # spins in vain, one after the other, after which it is not tried again soon
PROBE_AGAIN = 64  # waits without a spin, after one that was in vain


class PendingResult:
    """An answer that is on its way. `done` once it has come: then `error` or, if that is None, `value`.

    Answers are read only while a thread of this client waits or submits.
    """

    __slots__ = ("_client", "done", "error", "number", "tensors", "timeout", "value")

    def __init__(self, client: CentralClient, number: int, timeout: float | None, tensors: bool = False) -> None:
        self.number = number
        self.tensors = tensors  # the rows were tensors, and so is the answer
        self.timeout = timeout  # seconds that it was given when it was sent
        self.done = False
        self.value: Result = None
        self.error: GpuinferError | None = None
        self._client = client

    def __repr__(self) -> str:
        if not self.done:
            return f"<Pending {self.number}: no answer yet>"
        return f"<Pending {self.number}: {'answered' if self.error is None else type(self.error).__name__}>"

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the answer, for `timeout` seconds at most. Raises what `CentralClient.evaluate` raises.

        After `Expired` of that timeout the answer is still on its way, and another call waits for it again.
        """
        return self._client.wait(self, timeout)

    def cancel(self) -> None:
        """Cancel the request, unless its answer has come: then `result` raises `Closed`."""
        self._client.abandon(self, Closed("this request was cancelled. Send the rows again if they are wanted."))


class CentralClient:
    """One process's client of a `CentralServer`. Threads may share it.

    Until its first use it can be passed to a child process of any start method; each process needs one of its own.
    """

    def __init__(self, address: ServerAddress, restarts_within_s: float = 0.0) -> None:
        self._arguments = address, restarts_within_s
        self._connection: CentralConnection | None = None
        self._ready: CentralConnection | None = None  # the same, but while its server comes back and after the end
        self._process = 0  # that opened it
        self._closed = False
        self._changed = threading.Condition()
        self._reading = False  # a thread is
        self._pending: dict[int, PendingResult] = {}
        self._poll = select.poll()
        self._asleep = 0  # waits since the last that a spin was enough for
        self._lost: GpuinferError | None = None

    def __repr__(self) -> str:
        opened = "waits for its server" if self._connection is not None else "not open"
        opened = "open" if self._ready is not None else opened
        state = "closed" if self._closed else "lost" if self._lost is not None else opened
        return f"<Client of a CentralServer: {state}, {len(self._pending)} pending>"

    def __reduce__(self) -> tuple[Any, ...]:
        return CentralClient, self._arguments

    def __enter__(self) -> CentralClient:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Asking

    def block(self, rows: int) -> NDArray[Any]:
        """An array [rows, features] to fill and to evaluate views of, from the first row on: it travels without a copy.

        The answer to such a view lies in shared memory too; it is overwritten when the same block is submitted again.
        """
        self._refuse_other_process()
        with self._changed:
            return (self._ready or self._open()).block(rows)

    def evaluate(
        self,
        rows: Any,
        *,
        timeout: float | None = None,
        priority: Priority = Priority.NORMAL,
        group: Hashable = None,
    ) -> Result:
        """The model's answer to `rows`, an array [rows, features] in the model's input dtype: float32 arrays [rows, …],
        alone, in a tuple or in a dict as the model answers.

        Of a server whose rows have a shape (`CentralServer(model, example=…)`) `rows` are tensors or arrays
        [rows, *shape], in tuples and dicts as the example, and answers are tensors or arrays in the model's dtypes.

        Raises `BackendError` when the rows do not fit the model or the model fails on them, `BadResult`, `QueueFull`
        where the server's queue is full or the client's own blocks leave no room, `Expired` after `timeout` seconds,
        `BackendDied` when the server is gone, `Closed`.
        """
        pending = self.submit(rows, timeout=timeout, priority=priority, group=group)
        try:
            return self.wait(pending, timeout)
        except Expired as error:
            self.abandon(pending, error)
            raise

    def submit(
        self,
        rows: Any,
        *,
        timeout: float | None = None,
        priority: Priority = Priority.NORMAL,
        group: Hashable = None,
    ) -> PendingResult:
        """Send the rows without waiting for the answer: `result()` of the returned object waits. Raises as `evaluate`.

        While no block is free (`connection.POOLED` requests are open), this waits until an answer frees one.
        """
        deadline = _deadline(timeout)
        self._refuse_other_process()
        tensors, request = False, None
        with self._changed:
            while True:
                connection = self._ready or self._open(deadline)
                if request is None:
                    layout = connection.form.spec.layout
                    if layout is not None:
                        rows, tensors = packed_batch(rows, layout)
                    count = rows.shape[0] if getattr(rows, "shape", ()) else 0
                    request = Request(rows, count, priority=class_of(priority), deadline=deadline, group=group)
                if connection.abandoned or connection.outstanding >= POOLED:
                    if not self._reading:  # what has come may free blocks
                        self._take_in()
                        self._changed.notify_all()
                    connection = self._ready or self._open(deadline)
                try:
                    number = connection.ask(request, 0)
                except QueueFull:
                    if not connection.lent:
                        raise
                    self._wait_on(deadline, timeout)
                else:
                    pending = self._pending[number] = PendingResult(self, number, timeout, tensors)
                    return pending

    def _wait_on(self, deadline: float, timeout: float | None) -> None:
        """Wait until any answer may have come. Raises `Expired` after the deadline."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise _too_late(timeout)
        if self._reading or self._ready is None:  # another thread takes in everybody's answers
            self._changed.wait(min(left, LOOK_S))
        else:
            self._read(min(left, LOOK_S))

    def _open(self, deadline: float = float("inf")) -> CentralConnection:
        """The connection, made at first use; waits while the server comes back."""
        while self._ready is None:
            left = deadline - time.monotonic()
            if self._closed:
                raise Closed("this client is closed. Take another from server.client().")
            if self._lost is not None:
                raise self._lost
            if left <= 0:
                raise Expired("the server was not there in time. Allow more time, or try again later.")
            if self._connection is not None:
                self._changed.wait(min(left, LOOK_S))
                continue
            connection = self._connection = CentralConnection(*self._arguments)  # already, for `close` to interrupt it
            try:
                connection.open(min(deadline - time.monotonic(), GREETING_S))
            except GpuinferError as error:
                self._connection = None
                if not isinstance(error, BackendDied) or time.monotonic() < deadline:  # else too late, whyever
                    raise
            else:
                self._poll.register(connection.fileno(), select.POLLIN)
                self._ready, self._process = connection, os.getpid()
        return self._ready

    def _refuse_other_process(self) -> None:
        """Refuse use in a forked child, before the lock is taken: a thread of the parent may have held it."""
        if self._process not in (0, os.getpid()):
            raise UsageError(
                "this client was opened in another process and came here by fork: two cannot share one line. Hand over "
                "server.client() itself, and use it in the child only."
            )

    # Waiting

    def wait(self, pending: PendingResult, timeout: float | None = None) -> Result:
        """The answer of `pending`, or its error raised; `Expired` if neither is there after `timeout` seconds."""
        give_up_at = _deadline(timeout)
        self._refuse_other_process()
        with self._changed:
            while not pending.done:
                self._wait_on(give_up_at, timeout)
        if pending.error is not None:
            raise pending.error
        return as_tensors(pending.value) if pending.tensors else pending.value

    def abandon(self, pending: PendingResult, error: GpuinferError) -> None:
        """Let `pending` fail with `error`, unless its answer has come, and cancel it in the server."""
        self._refuse_other_process()
        with self._changed:
            if pending.done:
                return
            self._settle(pending.number, error)
            if self._connection is not None:
                self._connection.abandon(pending.number)
            self._changed.notify_all()

    def _read(self, seconds: float) -> None:
        """Wait that long at most, without the lock, and process what has come."""
        self._reading = True
        try:
            self._changed.release()
            try:
                asleep = True
                if (
                    self._asleep < PROBES or self._asleep % PROBE_AGAIN == 0
                ):  # spins a little first, as long as that pays
                    until = time.perf_counter() + (PROBE_S if self._asleep else SPIN_S)
                    while asleep and time.perf_counter() < until:
                        asleep = not self._poll.poll(0)
                self._asleep = self._asleep + 1 if asleep else 0
                if asleep:
                    self._poll.poll(1000 * seconds)
            finally:
                self._changed.acquire()
            self._take_in()
        finally:
            self._reading = False
            self._changed.notify_all()

    def _take_in(self) -> None:
        connection = self._connection
        if connection is None or self._closed:
            return self._fail_all(Closed("this client was closed. Take another from server.client()."))
        try:
            settled = connection.receive()
            if not settled and (stopped := connection.stopped()) is not None:
                raise stopped
        except GpuinferError as error:
            return self._come_back(connection, error)
        for number, outcome in settled:
            pending = self._pending.get(number)
            if isinstance(outcome, Expired) and pending is not None and pending.timeout is not None:
                outcome = _too_late(pending.timeout)  # the server knows only what was left of it
            self._settle(number, outcome)
        return None

    def _settle(self, number: int, outcome: Any) -> None:
        if (pending := self._pending.pop(number, None)) is not None:
            pending.done = True
            if isinstance(outcome, GpuinferError):
                pending.error = outcome
            else:
                pending.value = outcome

    def _come_back(self, connection: CentralConnection, error: GpuinferError) -> None:
        """The server has gone: reconnect to the one that takes its place, or fail all requests.

        In a thread of its own, without the lock: waiting callers keep their deadlines.
        """
        self._ready = None
        self._poll.unregister(connection.fileno())
        if not (isinstance(error, BackendDied) and connection.comes_back):
            return self._lose(connection, error)
        try:
            threading.Thread(target=self._return, args=(connection, error), name="gpuinfer-return", daemon=True).start()
        except RuntimeError:  # this process ends
            self._lose(connection, error)
        return None

    def _return(self, connection: CentralConnection, cause: BackendDied) -> None:
        final: GpuinferError | None = None
        try:
            connection.come_back(cause)
        except GpuinferError as error:
            final = error
        except Exception as strange:  # noqa: BLE001 (whatever it is, no caller may wait for ever)
            final = BackendDied(f"the way to the central server is lost: {strange!r}. Start it again.")
        with self._changed:
            if final is not None or self._closed:
                self._lose(connection, final or cause)
            else:
                self._poll.register(connection.fileno(), select.POLLIN)
                self._ready = connection
            self._changed.notify_all()

    def _lose(self, connection: CentralConnection, error: GpuinferError) -> None:
        self._lost = error
        connection.close()
        self._fail_all(error)

    def _fail_all(self, error: GpuinferError) -> None:
        for number in tuple(self._pending):
            self._settle(number, error)

    def close(self) -> None:
        """Close the connection. Open requests fail with `Closed`."""
        if self._process not in (0, os.getpid()):  # in a forked child: the line is its parent's
            return
        if self._connection is not None:
            self._connection.give_up()  # a thread may be waiting for a server that comes back
        with self._changed:
            self._closed, self._ready = True, None
            if self._connection is not None:
                self._connection.close()
            self._fail_all(Closed("this client was closed. Take another from server.client()."))
            self._changed.notify_all()


def packed_batch(rows: Any, layout: RowLayout) -> tuple[NDArray[np.uint8], bool]:
    """A batch of rows of this layout as it travels, uint8 [rows, row_bytes], and whether they were tensors. Rows that
    are packed already stay where they are. Raises `RequestError` for rows unlike those of the server.
    """
    if isinstance(rows, np.ndarray) and rows.dtype == np.uint8 and rows.shape[1:] == (layout.row_bytes,):
        return rows, False
    leaves = batch_leaves(rows, layout)
    return batch_payload(leaves, len(leaves[0]), layout, packed=True), is_tensor(leaves[0])


def as_tensors(answer: Result) -> Any:
    """An answer's arrays as tensors on the same memory."""
    import torch

    if isinstance(answer, Mapping):
        return {name: torch.from_numpy(part) for name, part in answer.items()}
    return tuple(map(torch.from_numpy, answer)) if isinstance(answer, tuple) else torch.from_numpy(answer)


def _too_late(timeout: float | None) -> Expired:
    return Expired(f"no answer within {timeout or 0:g} s. Allow more time, or send fewer rows.")


def _deadline(timeout: float | None) -> float:
    """When so many seconds are over; inf for None. Raises `UsageError` for what is no number."""
    if timeout is None:
        return math.inf
    if not isinstance(timeout, numbers.Real):
        raise UsageError(f"timeout is {timeout!r}. Give seconds as a number, or None to wait as long as it takes.")
    if math.isnan(timeout):
        raise UsageError("timeout is NaN. Give seconds, or None to wait as long as it takes.")
    return time.monotonic() + timeout
