"""Memory: smaller steps when it runs out, said once; and an allocator that keeps large buffers for the next forward."""

from __future__ import annotations

import ctypes
import logging
import threading

import torch

from gpuinfer.errors import BackendError

logger = logging.getLogger("gpuinfer")

# What the CPU allocator and oneDNN say; torch.OutOfMemoryError is CUDA's alone.
PHRASES = ("can't allocate memory", "not enough memory", "out of memory", "could not create a memory object")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on the device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in PHRASES)


class StepSize:
    """How many rows go through the model at once; it only ever shrinks. Threads may share one."""

    def __init__(self, rows: int, where: str = "", whose: str = "") -> None:
        """`where` names the device and `whose` the model, where there may be several."""
        self.rows = rows
        self._where = (f" of {whose}" if whose else "") + (f" on {where}" if where else "")
        self._lock = threading.Lock()
        self._said = False

    def halve(self, failed_rows: int, cause: BaseException) -> None:
        """After `failed_rows` rows did not fit. Raises `BackendError` when a single row does not.

        Fewer than a step may have failed because another thread's step held the memory: then that one is halved, and
        those rows are tried again as they are.
        """
        with self._lock:
            if max(failed_rows, self.rows) <= 1:
                raise self._single(cause)
            self.rows = min(self.rows, failed_rows // 2) if failed_rows >= self.rows else self.rows // 2
            rows, said, self._said = self.rows, self._said, True
        if not said:
            logger.warning(
                "out of memory at %d rows%s: going on with at most %d at a time. Set -B chunk_rows=%d to start there.",
                failed_rows,
                self._where,
                rows,
                rows,
            )

    def _single(self, cause: BaseException) -> BackendError:
        error = BackendError(
            f"out of memory on a single row{self._where}: {first_line(cause)}. Use a smaller model, --dtype bfloat16, "
            "or a device with more free memory."
        )
        error.__cause__ = cause
        return error


RAISED_IN = "raised in "


def raised_in(error: BaseException, where: str) -> None:
    """Note where a part of a model raised it, unless that is known: its traceback and `first_line` tell."""
    if not _places(error):
        error.add_note(f"{RAISED_IN}{where}")


def first_line(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
    return "".join([line, *(f" ({place})" for place in _places(error))])


def _places(error: BaseException) -> list[str]:
    return [note for note in getattr(error, "__notes__", ()) if note.startswith(RAISED_IN)]


# of glibc's malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEPT, STEP = 1 << 30, 1 << 20  # bytes
LARGEST = 32 << 20  # the largest threshold that glibc takes
LARGEST_OF_ROWS = 8 << 20
"""Of a network of rows on the CPU. A run's portions of 1,024 rows have no piece of that size, unless a layer is 2,048
wide and more, where the product takes a hundred times as long as its pages. Larger portions fill the holes that pieces
of other sizes leave behind so badly that a process held half as much again as it used."""


def keep_freed_memory(largest: int = LARGEST) -> None:
    """Let freed memory stay with this process, but for pieces of `largest` bytes and more; does nothing where the C
    library has no such knobs.

    By default glibc gives large buffers back to the system at once, and the next forward takes a page fault for each
    4 KiB of them again: a tenth of its time on a virtual machine.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for knob, value in ((M_MMAP_THRESHOLD, largest), (M_TRIM_THRESHOLD, KEPT), (M_TOP_PAD, STEP)):
        mallopt(knob, value)
