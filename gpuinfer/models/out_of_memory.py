"""Errors of a device: smaller steps when memory runs out, logged once, and whether an error means that the device is
lost.

Also an allocator setting that keeps large buffers for the next forward.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Iterator

import torch

from gpuinfer.errors import BackendError
from gpuinfer.host import error_text

logger = logging.getLogger("gpuinfer")

# What the CPU allocator, oneDNN and CUDA's libraries say; torch.OutOfMemoryError is CUDA's alone.
PHRASES = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "could not create a memory object",
    "status_alloc_failed",  # cuBLAS and cuDNN, of their own workspace
)
WAIT_S = 60.0  # for another thread's step to end: longer than any that is of use to anybody


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on the device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in error_text.safe_str(error).lower() for phrase in PHRASES)


class StepSize:
    """How many rows go through the model at once; only ever shrinks. Threads may share one.

    A thread that fails beside a step that began before the last halving waits for that step's end instead of halving
    again: otherwise several threads would come down to a single row, and fail, while one is held up with a large step.
    """

    def __init__(self, rows: int, where: str = "", whose: str = "", *, wait_s: float = WAIT_S) -> None:
        """`where` names the device and `whose` the model, where there may be several. `wait_s`: at most so long a
        thread waits for another's step.
        """
        self.rows = rows
        self.waiting = 0  # threads that have failed and wait for another's step
        self._where = (f" of {whose}" if whose else "") + (f" on {where}" if where else "")
        self._wait_s = wait_s
        self._ended = threading.Condition()
        self._under_way: dict[object, int] = {}  # rows of each step that may hold memory
        self._one_by_one = threading.Lock()
        self._failed = 0  # rows of the first step for which memory ran out
        self._said = False

    @contextlib.contextmanager
    def under_way(self, rows: int) -> Iterator[None]:
        """Wrap a step of so many rows. Once memory has run out for all but single rows they run one at a time, so that
        none fails because of another.
        """
        alone = self._failed and self.rows <= 1 and self._one_by_one.acquire(timeout=self._wait_s)
        step = object()
        with self._ended:
            self._under_way[step] = rows
        try:
            yield
        finally:
            with self._ended:
                self._under_way.pop(step, None)
                self._ended.notify_all()
            if alone:
                self._one_by_one.release()

    def make_room(self, failed_rows: int, cause: BaseException) -> None:
        """Call after a step of `failed_rows` rows ran out of memory: waits for a larger step, or halves. Raises
        `BackendError` when a single row does not fit.

        Fewer rows than a step may fail because another thread's step held the memory: then that size is halved, and
        these rows are tried again as they are.
        """
        with self._ended:
            if larger := [step for step, rows in self._under_way.items() if rows > self.rows]:
                self.waiting += 1
                try:
                    ended = self._ended.wait_for(
                        lambda: any(step not in self._under_way for step in larger), self._wait_s
                    )
                finally:
                    self.waiting -= 1
                if ended:
                    return
                for step in larger:  # it hangs: no thread waits for it again
                    self._under_way.pop(step, None)
            if max(failed_rows, self.rows) <= 1:
                raise BackendError(
                    f"out of memory on a single row{self._where}: {first_line(cause)}. Use a smaller model, dtype "
                    "bfloat16, or a device with more free memory."
                ) from cause
            self.rows = min(self.rows, failed_rows // 2) if failed_rows >= self.rows else self.rows // 2
            self._failed = self._failed or failed_rows

    def made(self, rows: int) -> None:
        """Call after a step of so many rows was answered. Logs once how many rows fit after memory ran out."""
        if self._said or not self._failed or rows < self.rows:  # of a smaller one nobody learns what does
            return
        with self._ended:
            failed, said, self._said = self._failed, self._said, True
        if not said:
            logger.warning(
                "out of memory at %d rows%s: going on with at most %d at a time. "
                "Set chunk_rows=%d (on the command line -B chunk_rows=%d) to start there.",
                failed,
                self._where,
                rows,
                rows,
                rows,
            )


RAISED_IN = "raised in "


def raised_in(error: BaseException, where: str) -> None:
    """Add a note that says where in a model the error was raised, unless it has one: tracebacks and `first_line` show
    it.
    """
    if not _places(error):
        error.add_note(f"{RAISED_IN}{where}")


def first_line(error: BaseException) -> str:
    line = error_text.safe_str(error).strip().partition("\n")[0].rstrip(".") or error_text.type_name(error)
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
    """Keep freed memory in this process, except for pieces of `largest` bytes and more; does nothing where the C
    library has no such settings.

    By default glibc returns large buffers to the system at once, and the next forward takes a page fault for each 4 KiB
    of them: a tenth of its time on a virtual machine.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for knob, value in ((M_MMAP_THRESHOLD, largest), (M_TRIM_THRESHOLD, KEPT), (M_TOP_PAD, STEP)):
        mallopt(knob, value)


# What CUDA, its libraries and torch say when nothing works on the device afterwards.
WORDS = ("cuda error", "device-side assert", "illegal memory access", "unspecified launch failure", "nccl")
ROWS_FAULT = "device-side assert"  # code of the model's own saw a value that it cannot take, such as an index


def says_lost(error: BaseException) -> bool:
    """Whether the message says that a device is lost. Errors of memory do not count, whatever they say."""
    return not is_out_of_memory(error) and any(word in error_text.safe_str(error).lower() for word in WORDS)


def is_lost(error: BaseException, device: torch.device) -> bool:
    """Whether `device` is lost. Some CUDA errors pass, such as a launch of too many threads, and others stay: a device
    whose error may stay is tested.
    """
    return says_lost(error) and (device.type != "cuda" or not answers(device))


def answers(device: torch.device) -> bool:
    """Whether a CUDA device still computes."""
    try:
        with torch.cuda.device(device):
            torch.zeros(1, device=device).add_(1).item()
    except Exception:  # noqa: BLE001 (whatever it says, it does not work)
        return False
    return True


def is_the_rows_fault(error: BaseException) -> bool:
    """Whether the rows caused the loss of the device, and would of any other."""
    return ROWS_FAULT in error_text.safe_str(error).lower()
