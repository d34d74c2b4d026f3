"""Sockets and event loops: listening on TCP and Unix sockets, TLS certificates that may be renewed, noticing that a
peer has disconnected, and uvloop where it is installed. A side that sends no more (FIN) may still read; one that
reads no more resets the connection (RST), at the latest when something is written to it. A loop that does not read
hears of no reset: Linux tells of it by epoll (EPOLLERR, EPOLLHUP), elsewhere it is noticed at the next write. A peer
that closed its socket before anything was written to it looks like one that has sent everything, until keep-alives
make its system answer with a reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import shlex
import socket
import ssl
import stat
import struct
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil

from gpuinfer.errors import UsageError
from gpuinfer.host import event_loop
from gpuinfer.host.files import read_regular

BACKLOG = 4096


@dataclass(frozen=True, slots=True)
class ListenFlags:
    """What stands before an address, and before a port, on the command line that says where to listen."""

    host: str = "--host "
    port: str = "--port "


SERVER_FLAGS = ListenFlags()


def bind_tcp(host: str, port: int, reuse_port: bool, flags: ListenFlags = SERVER_FLAGS) -> list[socket.socket]:
    """One socket for each address of `host`, all of one port; 0: one that is free. Raises UsageError, which names
    `flags`.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"there is no address '{host}' ({error}). Use {flags.host}127.0.0.1.") from None
    made: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            one = _listener(family, (str(address[0]), port, *address[2:]), reuse_port)
            made.append(one)
            port = one.getsockname()[1]
    except OSError as error:
        for one in made:
            one.close()
        raise _complaint(host, port, error, flags) from None
    return made


def _listener(family: int, address: tuple[object, ...], reuse_port: bool) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # connections inherit it: a client whose machine is gone is noticed within two minutes
        for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
            if hasattr(socket, name):
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if reuse_port:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        made.listen(BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


def bind_unix(path: str) -> socket.socket:
    """A socket at a path, of its owner only. One that a dead process left is replaced. Raises UsageError."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(1)
                try:
                    probe.connect(path)
                except ConnectionRefusedError:
                    os.unlink(path)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        before = os.umask(0o177)
        try:
            made.bind(path)
        finally:
            os.umask(before)
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise UsageError(f"cannot listen at {path} ({error.strerror or error}). Use another path.") from None
    return made


def _complaint(host: str, port: int, error: OSError, flags: ListenFlags) -> UsageError:
    """Why a port cannot be had; of one in use by whom, as far as this user may see it, and which one is free."""
    if error.errno in (errno.EACCES, errno.EPERM):
        return UsageError(f"port {port} of {host} is not for ordinary users. Use {flags.port}8000.")
    if error.errno == errno.EADDRNOTAVAIL:
        return UsageError(f"this machine has no address '{host}'. Use {flags.host}127.0.0.1.")
    if error.errno != errno.EADDRINUSE:
        return UsageError(f"cannot listen on port {port} of {host} ({error.strerror or error}). Use another.")
    cure, holder = "Stop it, or use another port.", ""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(found[0], socket.SOCK_STREAM) as probe:
            probe.bind(found[4])
            cure = f"Use {flags.port}{probe.getsockname()[1]}, which is free, or stop it."
    with contextlib.suppress(psutil.Error, OSError):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port and one.pid:
                holder = f" by {psutil.Process(one.pid).name()} (pid {one.pid})"
    return UsageError(f"port {port} of {host} is in use{holder}. {cure}")


def take_backlog(listener: socket.socket) -> list[socket.socket]:
    """The connections that the system has made and nobody has accepted: they would be reset with the socket."""
    made: list[socket.socket] = []
    listener.setblocking(False)
    with contextlib.suppress(OSError):
        while True:
            made.append(listener.accept()[0])
            made[-1].setblocking(False)
    return made


KEEP_ALIVE_S = 5  # between two keep-alives
AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER of no seconds: to close is to reset


def reset_connection(transport: asyncio.BaseTransport) -> None:
    """Close a connection by a reset, so that the peer notices at once that its answer is not wanted."""
    end = transport.get_extra_info("socket")
    if end is not None and end.fileno() >= 0:
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
    cast("asyncio.WriteTransport", transport).abort()


def close_write_side(transport: asyncio.Transport) -> None:
    """Close the writing side alone; the whole connection with TLS, and where the peer is gone already."""
    if not transport.can_write_eof():
        transport.close()
        return
    try:
        transport.write_eof()
    except OSError:
        transport.abort()


class DisconnectWatcher:
    """Watches sockets that are not read for a reset of the connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._calls: dict[int, Callable[[], None]] = {}
        if self._epoll is not None:
            loop.add_reader(self._epoll.fileno(), self._poll)

    @property
    def watched(self) -> int:
        """How many sockets are watched."""
        return len(self._calls)

    def watch(self, transport: asyncio.BaseTransport, call: Callable[[], None]) -> None:
        """Call this once the peer has disconnected."""
        fd = _fd(transport)
        if self._epoll is None or fd < 0:
            return
        self.forget(transport)
        self._epoll.register(fd, select.EPOLLONESHOT)  # epoll reports errors and hang-ups without being asked
        self._calls[fd] = call

    def watch_half_closed(self, transport: asyncio.BaseTransport, call: Callable[[], None]) -> None:
        """The same for a peer that has closed its writing side."""
        end = transport.get_extra_info("socket")
        if end is not None and end.family != socket.AF_UNIX and hasattr(socket, "TCP_KEEPIDLE"):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                    end.setsockopt(socket.IPPROTO_TCP, option, KEEP_ALIVE_S)
        self.watch(transport, call)

    def forget(self, transport: asyncio.BaseTransport) -> None:
        """Stop watching."""
        if not self._calls:
            return
        fd = _fd(transport)
        if self._calls.pop(fd, None) is not None and self._epoll is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def close(self) -> None:
        """Stop watching all sockets."""
        if self._epoll is not None:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None
        self._calls.clear()

    def _poll(self) -> None:
        if self._epoll is None:
            return
        for fd, _ in self._epoll.poll(0):
            call = self._calls.pop(fd, None)
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)
            if call is not None:
                call()


def _fd(transport: asyncio.BaseTransport) -> int:
    end = transport.get_extra_info("socket")
    return -1 if end is None else int(end.fileno())


def file_version(*paths: Path | None) -> object:
    """Of these files; another one once they have been written, replaced, or given to others to read."""
    try:
        found = [path.stat() for path in paths if path is not None]
    except OSError:
        return None
    return [(one.st_ctime_ns, one.st_mtime_ns, one.st_size, one.st_ino) for one in found]


SHUTDOWN_S = 2.0  # for a client to confirm the end of a connection; one that idles does not read it


class Certificate:
    """`context` serves what the files held when they last were right."""

    def __init__(self, path: Path, key: Path) -> None:
        """Raises UsageError for files that are no certificate with its key."""
        self.path, self._key = path, key
        self._version = file_version(self.path, self._key)
        self.context = _context()
        self._load(self.context)

    def of_server(self, handshake_s: float) -> dict[str, Any]:
        """What asyncio's `create_server` takes of it."""
        return {"ssl": self.context, "ssl_handshake_timeout": handshake_s, "ssl_shutdown_timeout": SHUTDOWN_S}

    def reload(self) -> list[str] | None:
        """Read them again if they have changed; something, if so. Raises UsageError, once, where they are wrong."""
        version = file_version(self.path, self._key)
        if version == self._version:
            return None
        self._version = version
        self._load(_context())  # a context that has failed to load serves nothing any more
        self._load(self.context)
        return []

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            read_regular(self.path, 0)  # OpenSSL would wait for a FIFO's writer
            if read_regular(self._key, 0)[1].st_mode & stat.S_IRWXO:
                raise UsageError(
                    f"the key {self._key} can be read by others. Run: chmod 600 {shlex.quote(str(self._key))}"
                )
            context.load_cert_chain(self.path, self._key, password=lambda: b"")
        except ssl.SSLError as error:
            why = (error.reason or "no PEM").lower().replace("_", " ")
            raise UsageError(
                f"{self.path} and {self._key} are no certificate with its key ({why}). Give --tls-cert the certificate "
                "and its chain, --tls-key the key without a password, both in PEM."
            ) from None
        except OSError as error:
            raise UsageError(
                f"cannot read {error.filename or self.path} ({error.strerror}). Give regular files to --tls-cert and "
                "--tls-key."
            ) from None


def _context() -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # 1.2 and on
    made.set_alpn_protocols(["http/1.1"])
    return made


T = TypeVar("T")


def new_network_loop() -> asyncio.AbstractEventLoop:
    """A loop of uvloop's; where the extra `serve` is not installed, the ordinary one with precise timers."""
    try:
        import uvloop
    except ImportError:
        return event_loop.new_loop()
    made: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return made


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Like `host.event_loop.run`, on `new_network_loop()`. Timers are of whole milliseconds there."""
    return event_loop.run(main, new_network_loop)
