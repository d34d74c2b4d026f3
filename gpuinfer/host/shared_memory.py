"""Anonymous shared memory: a descriptor that travels, and nothing in any folder that could be left behind."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
import tempfile
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from gpuinfer.errors import UsageError

if hasattr(os, "memfd_create"):
    import fcntl

    SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Descriptor:
    """A descriptor that closes itself. It can be among a spawned process's arguments: over there its number differs."""

    number = -1

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.number)

    def __setstate__(self, travelling: Any) -> None:
        self.number = travelling.detach()


class Unshareable(Exception):
    """The other side's memory is not what it said."""


def create(size: int) -> tuple[int, mmap.mmap]:
    """`size` bytes of zeros: a descriptor to hand over, and the mapping. The caller closes the descriptor.

    All of it is taken at once, so that a lack of memory is an error here, and not a signal at some later write. Raises
    `UsageError` when there is not so much.
    """
    descriptor = -1
    try:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("gpuinfer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        else:
            with tempfile.TemporaryFile(dir=_folder()) as file:  # no name, or none for long; mode 0600
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        mapping = _map(descriptor, size)
        if hasattr(os, "memfd_create"):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        cure = f"Make room for as much (in {_folder() or 'TMPDIR'})"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            cure = "Allow more open files (`ulimit -n`)"
        elif hasattr(os, "memfd_create"):
            cure = "Make room for as much (memory, or the limit of the control group)"
        why = (
            f"{size:,} bytes of shared memory cannot be had: {error.strerror}. {cure}, or keep fewer rows outstanding."
        )
        raise UsageError(why) from error
    return descriptor, mapping


def attach(descriptor: int, size: int) -> mmap.mmap:
    """The other side's memory, mapped; the descriptor is closed. Raises `Unshareable`.

    It must be sealed against shrinking: reading beyond the end of a file that became shorter kills the reader.
    """
    try:
        if os.fstat(descriptor).st_size != size:
            raise Unshareable(f"{os.fstat(descriptor).st_size:,} bytes where {size:,} were said")
        if hasattr(os, "memfd_create"):
            seals = 0
            with contextlib.suppress(OSError):  # a file of another kind has none
                seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if not seals & fcntl.F_SEAL_SHRINK:
                raise Unshareable("memory that can still shrink")
        return _map(descriptor, size)
    except (OSError, ValueError) as error:
        raise Unshareable(str(error)) from error
    finally:
        os.close(descriptor)


def _map(descriptor: int, size: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, size, trackfd=False)  # else each mapping holds a descriptor of its own
    return mmap.mmap(descriptor, size)


def _folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
