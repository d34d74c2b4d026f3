"""The one file that `make binary` builds: whether this process runs from it, and what others of it lie in the cache.

It unpacks itself into a folder of its own (`one_file/stub.c`), beside which a lock file says who uses it: each process
that runs from the folder has it shared, whoever removes the folder has it alone. Its date is that of the last start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "GPUINFER_ONE_FILE"
MARK = "one-file.json"  # in the folder that is unpacked
KERNELS = "kernels"  # beside it
KEPT_S = 24 * 3600.0
"""Unused for so long, another version is removed: who goes back and forth between two need not unpack each time."""


def one_file() -> Path | None:
    """The one file that this process was started from; None where gpuinfer was installed in another way.

    A Python of the user's that inherits the variable is not inside.
    """
    named = os.environ.get(VARIABLE)
    return Path(named) if named and (Path(sys.base_prefix) / MARK).exists() else None


def carried_kernels() -> Path | None:
    """The folder of compiled kernels that the one file brings, by the names of their folders; None outside of it."""
    return Path(sys.base_prefix, KERNELS) if one_file() is not None else None


def clear_old() -> None:
    """Remove other versions that no process uses and nobody has started for a day. What cannot be removed stays."""
    if one_file() is None:
        return
    ours = Path(sys.base_prefix)
    for part in ours.parent.glob("*.part"):  # of one who was killed where files cannot be locked
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > KEPT_S:
                shutil.rmtree(part, ignore_errors=True)
    for lock in ours.parent.glob("*.lock"):
        folder = lock.with_suffix("")
        with contextlib.suppress(OSError):
            if folder != ours and time.time() - lock.stat().st_mtime > KEPT_S:
                with _alone(lock):
                    _remove(folder)
                    lock.unlink()


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Raises `OSError` when somebody else holds it, or where files cannot be locked."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Its name goes first: nobody may find a part of it."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    if folder.exists():
        folder.rename(part)
        shutil.rmtree(part)
