"""Sockets to listen on, and whose fault it is that there are none."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat

import psutil

from gpuinfer.errors import UsageError

BACKLOG = 4096


def listeners(host: str, port: int, reuse_port: bool) -> list[socket.socket]:
    """One socket for each address of `host`, all of one port; 0: one that is free. Raises UsageError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"there is no address '{host}' ({error}). Use --host 127.0.0.1.") from None
    made: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            one = _listener(family, (str(address[0]), port, *address[2:]), reuse_port)
            made.append(one)
            port = one.getsockname()[1]
    except OSError as error:
        for one in made:
            one.close()
        raise _complaint(host, port, error) from None
    return made


def _listener(family: int, address: tuple[object, ...], reuse_port: bool) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _notice_the_dead(made)
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


def _notice_the_dead(made: socket.socket) -> None:
    """A client whose machine is gone is noticed within two minutes; connections inherit it."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def unix_listener(path: str) -> socket.socket:
    """A socket at a path, of its owner only. One that a dead process left is replaced. Raises UsageError."""
    _remove_dead(path)
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


def _remove_dead(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1)
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
            except OSError:
                return


def _complaint(host: str, port: int, error: OSError) -> UsageError:
    if error.errno == errno.EADDRINUSE:
        free = _free(host)
        cure = f"Use --port {free}, which is free, or stop it." if free else "Stop it, or use another port."
        return UsageError(f"port {port} of {host} is in use{holder(port)}. {cure}")
    if error.errno in (errno.EACCES, errno.EPERM):
        return UsageError(f"port {port} of {host} is not for ordinary users. Use --port 8000.")
    if error.errno == errno.EADDRNOTAVAIL:
        return UsageError(f"this machine has no address '{host}'. Use --host 127.0.0.1.")
    return UsageError(f"cannot listen on port {port} of {host} ({error.strerror or error}). Use another.")


def holder(port: int) -> str:
    """` by NAME (pid N)` of who listens on a port, as far as this user may see it."""
    with contextlib.suppress(psutil.Error, OSError):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port and one.pid:
                return f" by {psutil.Process(one.pid).name()} (pid {one.pid})"
    return ""


def _free(host: str) -> int | None:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(found[0], socket.SOCK_STREAM) as probe:
            probe.bind(found[4])
            return int(probe.getsockname()[1])
    except OSError:
        return None
