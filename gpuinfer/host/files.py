"""Files that others wait for: they are there whole, or not at all; and what stays of them when the power goes."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from gpuinfer.errors import UsageError

TORN = ".tmp"  # the end of a name under which nothing is whole yet


def write_whole(path: Path, content: bytes) -> None:
    """Readable by their owner alone; whoever sees the name sees all of the content."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def read_regular(path: Path, most: int) -> tuple[bytes, os.stat_result]:
    """The first `most` bytes of a regular file, and its status. Raises OSError, also for what is no regular file.

    A FIFO or a device in its place would block its reader, or have no end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        parts, left = [], most
        while left and (part := os.read(descriptor, left)):
            parts.append(part)
            left -= len(part)
        return b"".join(parts), status
    finally:
        os.close(descriptor)


def no_folder(flag: str, path: Path) -> UsageError:
    """Of a file that is to be written, and there is no folder for it."""
    folder = path.parent
    return UsageError(f"{flag} {path}: there is no folder {folder}. Create it (mkdir -p {shlex.quote(str(folder))}).")


def make_ours(folder: Path) -> bool:
    """Make the folder if need be; whether it can be written to, and by nobody else: code that is cached there is run as
    it is found.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True, mode=0o700)
        status = folder.stat()
        owners = {status.st_uid, folder.lstat().st_uid}  # of the folder, and of a link that leads there
    except OSError:
        return False
    return owners == {os.getuid()} and not status.st_mode & 0o022 and os.access(folder, os.W_OK)


def sync_folder(path: Path) -> None:
    """The names in it are on the disk when this returns: what was made, renamed or removed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """What `write` writes, on the disk under that name when this returns; else the name is as it was. Raises what the
    disk and `write` raise. For files of any size: `write_whole` holds the content in memory, and hides it from others.
    """
    torn = path.with_name(path.name + TORN)
    try:
        with torn.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        torn.rename(path)
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            torn.unlink(missing_ok=True)
        raise
