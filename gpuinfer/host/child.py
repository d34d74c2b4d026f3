"""A child process, and the conversation with it: how it starts, messages both ways, heartbeat, how it ended.

Arguments of the start are pickled by `multiprocessing`; every message after that is a plain value, msgpack on a socket
pair behind its length. A program in another Python, which need not have our packages, gets and sends lines of JSON. A
thread that never runs anybody else's code beats in shared memory, so that a slow process is told from a stuck one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host import children, error_text, shared_memory

T = TypeVar("T")

HEADER = struct.Struct("<I")  # bytes of the message that follows
LARGEST = 256 * 2**20  # bytes of one message: the receiver checks it before it takes the memory
BURIAL_S = 5.0  # for the system to take a killed process away
CHUNK = 1 << 20  # bytes read at once
SENT = 1 << 15  # bytes written at once where there is a deadline: a socket that is writable has room for so many

_decode = msgspec.msgpack.Decoder().decode


def _plain(value: Any) -> Any:
    """A number of NumPy's as one of Python's."""
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"{type(value).__name__} is no plain value")


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode


class ChannelClosed(EOFError):
    """The other end is gone."""


def framed(message: Any) -> bytes:
    """A message as it travels. Raises `WorkError` for one over `LARGEST` bytes."""
    packed = _encode(message)
    if len(packed) > LARGEST:
        raise WorkError(f"a message of {len(packed):,} bytes is over the limit of {LARGEST:,}. Send it in parts.")
    return HEADER.pack(len(packed)) + packed


def _size(header: bytes) -> int:
    (size,) = HEADER.unpack(header)
    if size > LARGEST:
        raise ChannelClosed(f"the other end announced a message of {size:,} bytes")
    return int(size)


class Channel:
    """An end whose calls block; it takes the socket over. One thread at a time.

    Each call raises `ChannelClosed` when the other end is gone, and `TimeoutError` when it takes longer than `within_s`
    seconds.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        self._descriptor = end.detach()

    def send(self, message: Any, within_s: float | None = None) -> None:
        data, until = memoryview(self._packed(message)), _deadline(within_s)
        while data:
            if until is not None and not self._ready(select.POLLOUT, until - time.monotonic()):
                raise TimeoutError("the other end does not read")
            try:
                data = data[os.write(self._descriptor, data if until is None else data[:SENT]) :]
            except OSError as error:
                raise ChannelClosed("the other end is gone") from error

    def _packed(self, message: Any) -> bytes:
        return framed(message)

    def poll(self, seconds: float) -> bool:
        """Whether there is something to receive (the end, too) within so many seconds."""
        return self._ready(select.POLLIN, seconds)

    def _ready(self, wanted: int, seconds: float) -> bool:
        try:
            ready = select.poll()
            ready.register(self._descriptor, wanted)
            return bool(ready.poll(1000 * max(0.0, seconds)))
        except (OSError, ValueError) as error:  # closed here, by another thread
            raise ChannelClosed("this end is closed") from error

    def receive(self, within_s: float | None = None) -> Any:
        until = _deadline(within_s)
        return _decode(self._read(_size(self._read(HEADER.size, until)), until))

    def _read(self, size: int, until: float | None) -> bytes:
        pieces = []
        while size > 0:
            pieces.append(self._piece(size, until))
            size -= len(pieces[-1])
        return b"".join(pieces)

    def _piece(self, size: int, until: float | None) -> bytes:
        if until is not None and not self.poll(until - time.monotonic()):
            raise TimeoutError("the other end says nothing")
        try:
            piece = os.read(self._descriptor, min(size, CHUNK))
        except OSError as error:
            raise ChannelClosed("the other end is gone") from error
        if not piece:
            raise ChannelClosed("the other end is gone")
        return piece

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    __del__ = close


def _deadline(within_s: float | None) -> float | None:
    return None if within_s is None else time.monotonic() + within_s


class LineChannel(Channel):
    """The same with a program that may lack our packages: a message is a line of JSON.

    `receive` raises `ValueError` for a line that is none.
    """

    _heard = b""

    def _packed(self, message: Any) -> bytes:
        return json.dumps(message).encode() + b"\n"

    def receive(self, within_s: float | None = None) -> Any:
        until = _deadline(within_s)
        while b"\n" not in self._heard:
            self._heard += self._piece(CHUNK, until)
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)


class AsyncChannel:
    """An end on an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, end: socket.socket) -> AsyncChannel:
        return cls(*await asyncio.open_connection(sock=end))

    def post(self, message: Any) -> None:
        """Send without waiting for room; what is sent after the other end is gone is lost."""
        if not self._writer.is_closing():
            with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: after `finish`
                self._writer.write(framed(message))  # `writelines` of a closed one fails in Python 3.12

    async def send(self, message: Any) -> None:
        """Send and wait for room. Raises `ChannelClosed` when the other end is gone, `WorkError` over 256 MiB."""
        data = framed(message)
        try:
            self._writer.write(data)
            await self._writer.drain()
        except (OSError, RuntimeError) as error:
            raise ChannelClosed("the channel is closed") from error

    async def receive(self) -> Any:
        """The next message. Raises `ChannelClosed` when the other end is gone, also in the middle of a message."""
        try:
            size = _size(await self._reader.readexactly(HEADER.size))
            return _decode(await self._reader.readexactly(size))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ChannelClosed("the other end is gone") from error

    def send_from_thread(self, message: Any) -> None:
        """Send a short last message from another thread while the event loop is blocked, if there is room for it."""
        with contextlib.suppress(OSError):
            os.write(self._writer.get_extra_info("socket").fileno(), framed(message))

    def finish(self) -> None:
        """Say that nothing more will be sent; what the other end still sends can be received."""
        if not self._writer.is_closing():
            self._writer.write_eof()

    async def hang_up(self) -> None:
        """Finish, and wait until the other end closes: closing on unread bytes would take the last sent ones away."""
        self.finish()
        with contextlib.suppress(OSError):
            while await self._reader.read(2**16):
                pass

    def close(self) -> None:
        """Hang up. What was sent before still arrives."""
        self._writer.close()


BEAT_S = 0.5  # between two beats
LATE_S = 5.0  # without a beat: stuck, or stopped
START_LATE_S = 60.0  # the same while a process starts: importing a large library may hold the interpreter for long
AWAY_S = 2.0  # longer between two looks the watcher itself was away: one look counts no more than this

BEATS = struct.Struct("<Q?")  # how many, and whether the start is over
HEARTBEAT_SIZE = mmap.PAGESIZE


class Heartbeat:
    """The process's side: beats from now until the process ends, in shared memory of `HEARTBEAT_SIZE` bytes."""

    def __init__(self, memory: shared_memory.Descriptor) -> None:
        self._memory = shared_memory.attach(os.dup(memory.number), HEARTBEAT_SIZE)
        self._started = False
        threading.Thread(target=self._beat, name="gpuinfer heartbeat", daemon=True).start()

    def started(self) -> None:
        """The start is over: from now on `LATE_S` without a beat is stuck."""
        self._started = True

    def _beat(self) -> None:
        while True:
            count, _ = BEATS.unpack_from(self._memory)
            BEATS.pack_into(self._memory, 0, (count + 1) % 2**64, self._started)
            time.sleep(BEAT_S)


class HeartbeatWatch:
    """A watcher's side; there may be any number of them. Look at least every `AWAY_S` seconds.

    A look counts `AWAY_S` seconds at most, so that a watcher that was suspended itself accuses nobody.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._count, self._late_s, self._looked_at = -1, 0.0, time.monotonic()

    def late_s(self) -> float:
        """For how long there has been no beat while this watcher looked."""
        now = time.monotonic()
        count, _ = BEATS.unpack_from(self._memory)
        self._late_s = self._late_s + min(now - self._looked_at, AWAY_S) if count == self._count else 0.0
        self._count, self._looked_at = count, now
        return self._late_s

    def close(self) -> None:
        """Unmap the memory, which before Python 3.13 holds a descriptor."""
        self._memory.close()

    @property
    def stopped(self) -> bool:
        return self.late_s() > LATE_S

    def is_stuck(self, pid: int) -> bool:
        """Whether the process is stuck: one that starts only after `START_LATE_S`, or when it is stopped (SIGSTOP)."""
        import psutil  # 50 ms

        late_s, (_, started) = self.late_s(), BEATS.unpack_from(self._memory)
        if late_s <= LATE_S:
            return False
        with contextlib.suppress(psutil.Error):  # gone: its channel says so
            return bool(started or late_s > START_LATE_S or psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        return bool(started)


def started_with_channel(start: Callable[[socket.socket], T]) -> tuple[socket.socket, T]:
    """Our end of a new channel, and the process that `start` has started with the other end."""
    ours, theirs = socket.socketpair()
    try:
        return ours, start(theirs)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()


class Child:
    """A process that runs a function from the top of a module, which calls `children.set_up_child` first.

    The function's arguments are its end of the channel, and those given here. `end` is our end of the channel, for
    `Channel` or `AsyncChannel`.
    """

    def __init__(
        self, target: Callable[..., None], *arguments: Any, name: str, group: bool = False, daemon: bool = False
    ) -> None:
        """`group`: it starts processes itself, which end with it. `daemon`: Python ends it at its own exit.

        Raises `UsageError` for arguments that cannot be pickled, `OSError` when the system has no room for a process.
        """
        self._group = group
        self.end, self.process = started_with_channel(
            lambda theirs: children.spawn(target, theirs, *arguments, name=name, daemon=daemon)
        )

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    @property
    def alive(self) -> bool:
        with contextlib.suppress(ValueError):  # closed, since it had ended
            return self.process.is_alive()
        return False

    def kill(self, within_s: float = 0.0) -> None:
        """Kill the process, with its group; wait so many seconds at most until the system has taken it away."""
        with contextlib.suppress(ValueError):
            if self._group and self.pid > 1:
                with contextlib.suppress(OSError):  # all of them have ended
                    os.killpg(self.pid, signal.SIGKILL)
            self.process.kill()
            if within_s > 0:
                self.process.join(within_s)

    def exit_code(self, within_s: float = 1.0) -> int | None:
        """The exit code, negative for a signal; None when the process does not end within so many seconds."""
        self.process.join(within_s)
        return self.process.exitcode


class ChildProgram:
    """A program that talks with `LineChannel` over its standard input and output, such as one of another Python, with
    the interface of `Child`.

    It has a session of its own, which ends with it: a Ctrl-C does not reach it. `log` takes all else that it prints.
    Raises `OSError` when there is no such program.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        with log.open("wb") as noise:
            self.end, self.process = started_with_channel(
                lambda theirs: children.start_program(command, noise, environment, theirs)
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self, within_s: float = 0.0) -> None:
        """Kill the program with its session; wait so many seconds at most until the system has taken it away."""
        children.kill_group(self.process)
        self.exit_code(within_s)

    def exit_code(self, within_s: float = 1.0) -> int | None:
        """The exit code, negative for a signal; None when the program does not end within so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(within_s)
        return self.process.returncode


class ChildLost(WorkError):
    """A child ended, gave no answer in time, or said what is no answer."""


class Conversation:
    """Requests to a child, and an answer to each within a deadline. `name`: of the child, in errors.

    A child that has missed a deadline is ended, since what it says later would answer another request.
    """

    def __init__(self, name: str, child: Child | ChildProgram, channel: Channel) -> None:
        self.name, self.child, self._channel = name, child, channel
        self._lost: ChildLost | None = None
        self._busy = False  # with a request that has no answer yet

    def ask(self, request: Any, within_s: float) -> Any:
        """The answer. Raises `ChildLost`, as every later call then does."""
        until = time.monotonic() + within_s

        def exchange() -> Any:
            self._channel.send(request, within_s)
            return self._channel.receive(until - time.monotonic())

        return self._transfer(exchange, within_s)

    def receive(self, within_s: float) -> Any:
        """A further answer to the last request. Raises `ChildLost`."""
        return self._transfer(lambda: self._channel.receive(within_s), within_s)

    def _transfer(self, call: Callable[[], Any], within_s: float) -> Any:
        if self._lost is not None:
            raise self._lost
        self._busy = True
        try:
            result = call()
            self._busy = False
            return result
        except TimeoutError:
            why = f"gave no answer within {within_s:g} s"
        except ChannelClosed:
            why = how_it_ended(self.child.exit_code(BURIAL_S))
        except ValueError as error:
            why = f"said what is no answer ({error})"
        self.child.kill(BURIAL_S)
        self._lost = ChildLost(f"{self.name} {why}.")
        raise self._lost

    def tell(self, message: Any, within_s: float) -> None:
        """Send what has no answer, to a child that waits for it."""
        if not self._busy:
            with contextlib.suppress(ChildLost):
                self._transfer(lambda: self._channel.send(message, within_s), within_s)

    def close(self, within_s: float = 0.0) -> None:
        """Hang up, and kill a child that has not ended by itself within so many seconds; a busy one at once."""
        self._channel.close()
        if not self._busy:
            self.child.exit_code(within_s)
        self.child.kill(BURIAL_S)


def cannot_start(what: str, error: Exception) -> UsageError:
    """The error of a `Child` that could not be started."""
    return UsageError(
        f"{what} could not be started: {error_text.full_message(error)}. What it is given (a backend's connect(), "
        "options, the strategy's class, arguments) must be picklable: define classes at the top of a module."
    )


def how_it_ended(code: int | None) -> str:
    """The end of a process by its exit code, such as `was killed (SIGKILL; out of memory?)`; None: it has not ended."""
    if code is None:
        return "does not end: it hangs in a call of the system, such as to a disk or a device that does not answer"
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL; out of memory?)"
    return f"crashed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
