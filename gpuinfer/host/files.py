"""Files that others wait for: they are there whole, or not at all; and what stays of them when the power goes."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

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
