"""One run at a time records to one file: a second one would take the parts of the first for leftovers."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from gpuinfer.errors import UsageError
from gpuinfer.trace.form import lock_path, unwritable


@contextlib.contextmanager
def alone(trace: Path) -> Iterator[None]:
    """Hold the trace's lock. The system lets go of it when the process ends, however it does.

    Raises `UsageError` while another run records to this file, and where no file can be made. Where files cannot be
    locked, as on some network drives, nothing is.
    """
    try:
        descriptor = _locked(trace)
    except OSError as error:
        raise unwritable(trace, error) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lock_path(trace).unlink(missing_ok=True)  # while it is still held, so that it is ours that goes
        os.close(descriptor)


def _locked(trace: Path) -> int:
    path = lock_path(trace)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UsageError(
                f"--trace {trace}: another run records to this file. Wait for its end, or name another file."
            ) from None
        except OSError:
            return descriptor
        if _is_still(path, descriptor):
            return descriptor
        os.close(descriptor)  # whoever held it took the file away meanwhile


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether the file of this name is the one that is open."""
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False
