"""The lines of a server: who connects, who may stay, what they send, what they are sent."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from gpuinfer.central.address import is_ours
from gpuinfer.central.caller import ROWS, Bounds, Caller
from gpuinfer.central.wire import Garbled, Record
from gpuinfer.errors import BackendError, GpuinferError, UsageError
from gpuinfer.host import spoken

log = logging.getLogger(__name__)

GREETING_S = 5.0  # for a new client to say who it is
PAUSE_S = 0.1  # without new clients while there are no descriptors
SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
MOST_STRANGERS = 256  # that have not yet
LONGEST_WAIT_S = 3600.0  # at once: the system counts a wait in milliseconds, and refuses one of a month
HELD_S = 0.01  # between two looks whether a client that has come back may be let in
FINE_S = 2e-3  # below it a wait needs a finer clock than the selector's milliseconds

Ready = Sequence[tuple[selectors.SelectorKey, int]]
OnRecord = Callable[[Caller, Record], None]
Forget = Callable[[Caller], None]


class ClientLines:
    """One thread at a time waits and takes in; any thread may send.

    A client that takes us for dead may come back with the same blocks on another line. It is let in once no batch
    uses them any more for the line before: what that writes, or has the device write, is never over something else.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        most_clients: int,
        welcome: tuple[bytes, int],
        pin: Callable[[Any], Any],
        bounds: Bounds = ROWS,
    ) -> None:
        """`welcome` is the record that greets a client, and the descriptor that travels along; `pin` see `Caller`."""
        self.callers: dict[int, Caller] = {}
        self._strangers: set[Caller] = set()  # of the callers, those that have not said who they are
        self._held: list[Caller] = []  # of the callers, those that have, and have another line that is not over
        self._leaving: list[Caller] = []  # gone, with requests in a batch
        self._listener, self._token = listener, token
        self._most_clients = most_clients
        self._welcome, self._pin, self._bounds = welcome, pin, bounds
        self._numbers = 0
        self._paused = False  # since the last that was accepted
        self._bell, self._rope = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._selector.register(self._bell, selectors.EVENT_READ, None)

    # Waiting

    def fileno(self) -> int:
        """For whoever waits elsewhere: it is readable when `look` finds something."""
        return self._selector.fileno()

    def ring(self) -> None:
        """Wake whoever waits, now and from now on."""
        self._rope.send(b"!")

    def look(self) -> Ready:
        """What is ready now."""
        return self._selector.select(0)

    def wait(self, seconds: float) -> Ready:
        """What is ready, as soon as anything is, at the latest after so many seconds."""
        if self._strangers:
            seconds = min(seconds, GREETING_S)
        if self._held:
            seconds = min(seconds, HELD_S)
        if LONGEST_WAIT_S < seconds < math.inf:
            seconds = LONGEST_WAIT_S
        if seconds < FINE_S:
            select.select([self._selector], [], [], max(0.0, seconds))  # type: ignore[list-item]
            seconds = 0
        return self._selector.select(None if seconds == math.inf else seconds)

    # Taking in

    def take_in(self, ready: Ready, on_record: OnRecord, forget: Forget) -> None:
        """Hand each record to `on_record`, and to `forget` each client that has gone, or is sent away for what it said.

        `on_record` raises `Garbled`, or a `GpuinferError` that the client is told, for a record that makes no sense.
        """
        for key, events in ready:
            if key.fileobj is self._listener:
                self._accept(forget)
            elif key.data is not None and not key.data.gone and not self._hear(key.data, events, on_record):
                self._drop(key.data, forget)
        for caller in self.overdue:
            self._drop(caller, forget)
        for caller in tuple(self._held):
            if not self._has_another_line(caller):
                self._held.remove(caller)
                self._greet(caller)

    @property
    def due(self) -> bool:
        """Whether `take_in` may have something to do although nothing is ready."""
        return bool(self._held or self.overdue)

    @property
    def overdue(self) -> list[Caller]:
        """Who should have said by now who it is; the next `take_in` sends them away."""
        return [one for one in self._strangers if time.monotonic() - one.since > GREETING_S] if self._strangers else []

    def _accept(self, forget: Forget) -> None:
        try:
            line, _ = self._listener.accept()
        except OSError as error:  # it has left again, or there are no more descriptors
            if error.errno in SCARCE:
                self._pause(error)
            return
        if not is_ours(line):
            line.close()
            return
        self._paused = False
        self._numbers += 1
        caller = Caller(line, self._numbers, self._pin, self._bounds)
        self._selector.register(line, selectors.EVENT_READ, caller)
        self.callers[caller.number] = caller
        self._strangers.add(caller)
        if len(self._strangers) > MOST_STRANGERS:  # a client of ours speaks at once
            self._drop(min(self._strangers, key=lambda stranger: stranger.since), forget)

    def _pause(self, error: OSError) -> None:
        """Accept nobody for a moment: the listener stays ready, and whoever waits would turn round and round."""
        if not self._paused:
            log.warning("no client can be taken in: %s. Allow more open files (`ulimit -n`).", error.strerror)
        self._paused = True
        self._selector.unregister(self._listener)
        again = threading.Timer(PAUSE_S, self._selector.register, (self._listener, selectors.EVENT_READ, None))
        again.daemon = True
        again.start()

    def _hear(self, caller: Caller, events: int, on_record: OnRecord) -> bool:
        """Take in what one client has sent; whether it may stay."""
        if events & selectors.EVENT_WRITE:
            self.send(caller, b"")
        if not events & selectors.EVENT_READ:
            return True
        try:
            for record in caller.receive():
                if caller in self._held:
                    raise Garbled("a request before the greeting was answered")
                if caller.welcome:
                    on_record(caller, record)
                else:
                    self._admit(caller, record)
        except EOFError:
            return False
        except Garbled as error:
            caller.dismiss(UsageError(f"the server was sent {error}. Use gpuinfer's own client."))
        except GpuinferError as error:
            caller.dismiss(error)
        except Exception as error:  # noqa: BLE001 (whatever one client sends, the others are served)
            log.warning("a client was dropped: %s.", spoken.in_full(error))
            caller.dismiss(BackendError("the server could not make sense of this client. See its last words."))
        else:
            return True
        return False

    def _admit(self, caller: Caller, hello: Record) -> None:
        caller.admit(hello, self._token)
        self._strangers.discard(caller)
        if len(self.callers) - len(self._strangers) > self._most_clients:
            raise UsageError(
                f"the server has {self._most_clients} clients already. "
                "Close some, or start it with a larger max_clients."
            )
        if self._has_another_line(caller):
            self._held.append(caller)
        else:
            self._greet(caller)

    def _greet(self, caller: Caller) -> None:
        record, descriptor = self._welcome
        caller.send(record, (descriptor,))

    def _has_another_line(self, caller: Caller) -> bool:
        """Whether the same client has one whose end has not been read yet, or whose requests are in a batch."""
        self._leaving = [one for one in self._leaving if one.serving]
        others = [*self.callers.values(), *self._leaving]
        return any(one is not caller and one.client == caller.client and one not in self._held for one in others)

    def _drop(self, caller: Caller, forget: Forget) -> None:
        with caller.sending:  # another thread may be about to watch for room on its line
            self._selector.unregister(caller.fileno())
        del self.callers[caller.number]
        self._strangers.discard(caller)
        if caller in self._held:
            self._held.remove(caller)
        forget(caller)
        caller.hang_up()
        if caller.serving:
            self._leaving.append(caller)

    # Sending

    def send(self, caller: Caller, data: bytes) -> None:
        """Not with a lock held, where that can be helped: whoever is woken by it may take this core at once."""
        with caller.sending:
            stuck = caller.stuck
            if caller.gone or caller.send(data) != stuck:
                return
            # from now on, or no longer, we must know when its line takes more
            events = selectors.EVENT_READ if stuck else selectors.EVENT_READ | selectors.EVENT_WRITE
            with contextlib.suppress(KeyError):  # it is being dropped
                self._selector.modify(caller.fileno(), events, caller)
