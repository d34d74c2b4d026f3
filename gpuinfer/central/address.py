"""Where a server listens, and how a client gets there: a local socket that only its owner's processes can use."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ABSTRACT = sys.platform == "linux"  # a name outside of any folder, gone with the last descriptor
BACKLOG = 512


@dataclass(frozen=True, slots=True)
class Address:
    """All that a client process must know. It is handed over by whoever started the server, and nowhere shown."""

    path: str
    token: bytes


def listen() -> tuple[socket.socket, Address]:
    """A new listening socket."""
    name = f"gpuinfer-{secrets.token_hex(16)}"
    path = f"\0{name}" if ABSTRACT else str(Path(tempfile.mkdtemp(prefix="gpuinfer-")) / "server")  # mode 0700
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(BACKLOG)
    return listener, Address(path, secrets.token_bytes(16))


def forget(address: Address) -> None:
    """Take away what the address left in the file system, if anything."""
    if not ABSTRACT:
        Path(address.path).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            Path(address.path).parent.rmdir()


def is_ours(connection: socket.socket) -> bool:
    """Whether a process of the same user is at the other end; where the system does not tell, the folder's mode did."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())
