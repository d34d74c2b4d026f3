"""The far end of a launcher that reaches another machine by a connection with two streams, such as that of ssh:
`python -m gpuinfer.launchers.remote_end`, started over there.

It says which version it is, gets an order, runs the process, and reports its address and its end; the process writes
its log to standard error, which the connection carries. Frames go both ways, each a line of JSON, so that a connection
of text will do. It leaves, and ends the process with all that it has started, when its standard input ends (the
connection, or the launcher with it), or when no frame has come for `SILENCE_S`: a cable that was cut ends no connection
here.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from gpuinfer.config import registry
from gpuinfer.errors import WorkError
from gpuinfer.host import machine
from gpuinfer.launchers import carried_process
from gpuinfer.launchers.carried_process import CarriedProcess

BEGIN = b"gpuinfer remote_end begins\n"  # what a login shell prints comes before it
BEAT_S = 5.0  # between two frames of the launcher's
SILENCE_S = 60.0  # without one, after which the launcher counts as gone
LOOK_S = 0.05  # between two polls of the process
LARGEST = 64 << 20  # bytes of a frame


class RemoteOrder(msgspec.Struct, frozen=True):
    """What the launcher sends first. `host`: where one that serves listens; None: at the address by which ssh came."""

    process: carried_process.ProcessOrder
    folder: str | None = None  # where it runs; None: the home folder
    share: int = 1  # processes that share this host's cores
    host: str | None = None


class RemoteState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What this end says: first its version, later where the process listens, how it ended, or why it never began."""

    version: str = ""
    address: tuple[str, int] | None = None
    pid: int = 0
    code: int | None = None
    refused: str = ""


def encode_frame(content: Any) -> bytes:
    return msgspec.json.encode(content) + b"\n"


class FrameReader:
    """Frames out of a stream of bytes, whole ones only."""

    def __init__(self) -> None:
        self._read = bytearray()

    def feed(self, more: bytes) -> Iterator[bytes]:
        """Frames that are complete by now. Raises `WorkError` for what is none."""
        self._read += more
        *whole, rest = self._read.split(b"\n")
        self._read = rest
        if len(rest) > LARGEST:
            raise WorkError(f"{len(rest):,} bytes are no frame. Use the same gpuinfer on both sides.")
        yield from map(bytes, whole)


class RemoteEnd:
    """One process and the two streams of its connection."""

    def __init__(self, orders: int, reports: int) -> None:
        """`orders` and `reports`: descriptors for frames that come and go."""
        self._orders, self._reports = orders, reports
        self._frames = FrameReader()
        self._process = CarriedProcess()
        self._heard = time.monotonic()
        self._served = False

    def run(self) -> None:
        """Until the process has ended, or the launcher is gone."""
        try:
            self._report(RemoteState(version=registry.own_version(), pid=os.getpid()), BEGIN)
            while self._heed() and not self._ended():
                pass
        except BrokenPipeError:  # the connection
            pass
        finally:
            self._process.end()

    def _heed(self) -> bool:
        """Take what has come. Whether the launcher is there."""
        if not select.select([self._orders], [], [], LOOK_S)[0]:
            return time.monotonic() - self._heard < SILENCE_S
        more = os.read(self._orders, 1 << 16)
        self._heard = time.monotonic()
        for body in self._frames.feed(more):
            if not self._process.started:
                self._start(msgspec.json.decode(body, type=RemoteOrder))
            elif msgspec.json.decode(body) == "terminate":
                self._process.terminate()
        return bool(more)

    def _start(self, order: RemoteOrder) -> None:
        process = order.process
        if process.threads is None and order.share > 1:
            process = msgspec.structs.replace(process, threads=max(1, machine.cores() // order.share))
        try:
            if order.folder is not None:
                os.chdir(os.path.expanduser(order.folder))
            pid = self._process.start(process, 2, order.host or _own_address())
        except OSError as error:
            self._report(RemoteState(refused=f"{error.filename or 'it'}: {error.strerror}"))
            raise SystemExit(1) from None
        self._report(RemoteState(pid=pid))

    def _ended(self) -> bool:
        """Report what is new. Whether the process has ended."""
        if not self._process.started:
            return False
        code = self._process.code
        if not self._served and (address := self._process.address) is not None:
            self._served = True
            self._report(RemoteState(address=(address.host, address.port)))
        if code is not None:
            self._report(RemoteState(code=code))
        return code is not None

    def _report(self, state: RemoteState, before: bytes = b"") -> None:
        left = memoryview(before + encode_frame(state))
        while left:
            left = left[os.write(self._reports, left) :]


def _own_address() -> str:
    """This host's address at which the connection came: `SSH_CONNECTION` is the client's address and port, and ours."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else socket.gethostname()


def main() -> None:
    reports = os.dup(1)
    os.set_inheritable(reports, False)
    os.dup2(2, 1)  # whatever is printed is part of the log
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of `finally`
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the end of standard input says it
    RemoteEnd(0, reports).run()


if __name__ == "__main__":
    main()
