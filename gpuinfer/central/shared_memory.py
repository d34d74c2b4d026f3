"""Anonymous shared memory: a descriptor that travels, and nothing in any folder that could be left behind.

A client's blocks of shared memory: rows on their way to the model, and its answers to the same rows beside them.

A pulse in shared memory: tells a server that is slow from one that is dead, at the cost of a look.

Any number of processes can look at it, which is what `runtime.pulse`, a pipe with one reader, does not allow.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.api import ModelSpec
from gpuinfer.errors import UsageError
from gpuinfer.models.row_format import AnswerLayout, row_dtype, row_shape

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
        descriptor = _open()
        os.ftruncate(descriptor, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        mapping = _map(descriptor, size)
        if hasattr(os, "memfd_create"):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise UsageError(
            f"{size:,} bytes of shared memory cannot be had: {error.strerror}. {_cure(error)}, or keep fewer rows "
            "outstanding."
        ) from error
    return descriptor, mapping


def attach(descriptor: int, size: int) -> mmap.mmap:
    """The other side's memory, mapped; the descriptor is closed. Raises `Unshareable`.

    It must be sealed against shrinking: reading beyond the end of a file that became shorter kills the reader.
    """
    try:
        if os.fstat(descriptor).st_size != size:
            raise Unshareable(f"{os.fstat(descriptor).st_size:,} bytes where {size:,} were said")
        if hasattr(os, "memfd_create") and not _is_sealed(descriptor):
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


def _is_sealed(descriptor: int) -> bool:
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # a file of another kind
        return False


def _open() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("gpuinfer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with contextlib.closing(tempfile.TemporaryFile(dir=_folder())) as file:  # no name, or none for long; mode 0600
        return os.dup(file.fileno())


def _folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _cure(error: OSError) -> str:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "Allow more open files (`ulimit -n`)"
    if hasattr(os, "memfd_create"):
        return "Make room for as much (memory, or the limit of the control group)"
    return f"Make room for as much (in {_folder() or 'TMPDIR'})"


ALIGNMENT = 64  # bytes: a cache line, and what vector loads like
PER_CLIENT = 256  # blocks


@dataclass(frozen=True, slots=True)
class BlockForm:
    """What the rows and answers of one model look like in memory."""

    spec: ModelSpec
    answer: AnswerLayout

    def offsets(self, rows: int) -> list[int]:
        """Where the rows begin, where each part of the answer does, and where all ends."""
        sizes = [rows * prod(row_shape(self.spec)) * row_dtype(self.spec).itemsize]
        sizes += [rows * prod(shape) * 4 for shape in self.answer.shapes]
        return [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]

    def size(self, rows: int) -> int:
        """Bytes of a block for so many rows."""
        return max(self.offsets(rows)[-1], mmap.PAGESIZE)

    def to_wire(self) -> dict[str, Any]:
        spec = self.spec
        row = {"name": spec.name, "inputs": spec.inputs, "input_dtype": spec.input_dtype}
        return {"row": row, "answer": self.answer.to_wire()}

    @classmethod
    def from_wire(cls, wire: Any) -> BlockForm:
        return cls(ModelSpec(**wire["row"]), AnswerLayout.from_wire(wire["answer"]))


class Block:
    """One block, mapped: `rows` as the model takes them [room, ...], `answers` float32 [room, ...] for each part, and
    `memory`, uint8, all of it.
    """

    __slots__ = ("_form", "answers", "memory", "number", "pin", "room", "rows")

    def __init__(self, number: int, room: int, memory: mmap.mmap, form: BlockForm) -> None:
        self.number, self.room = number, room
        self.pin: Any = None  # the server's registration of this memory with a device
        self._form = form
        offsets = form.offsets(room)
        self.memory: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self.rows: NDArray[Any] = _array(memory, offsets[0], (room, *row_shape(form.spec)), row_dtype(form.spec))
        parts = zip(form.answer.shapes, offsets[1:], strict=False)
        self.answers = [_array(memory, offset, (room, *shape), np.dtype(np.float32)) for shape, offset in parts]

    def let_go(self) -> None:
        """Use it no more: unmapped when the last array over its memory is collected, whoever still knows the block. No
        batch in flight may read or write it.
        """
        if self.pin is not None:
            self.pin.close()
        del self.rows, self.answers, self.memory

    def answer(self, rows: int, copied: bool) -> Any:
        """The answer to the first `rows` rows as the model gives it: a view of this memory, or a copy."""
        parts = [part[:rows].copy() if copied else part[:rows] for part in self.answers]
        return self._form.answer.arrange(parts)


def _array(memory: mmap.mmap, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.frombuffer(memory, dtype, prod(shape), offset).reshape(shape)


BEAT_S = 0.5  # between two beats
LATE_S = 5.0  # without a beat: dead, or stopped
AWAY_S = 2.0  # between two looks: whoever looks was itself away, and knows nothing

COUNT = struct.Struct("<Q")
PULSE_SIZE = mmap.PAGESIZE


class SharedHeart:
    """Beats from a thread that does nothing else, so that it goes on whatever the model does."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        threading.Thread(target=self._beat, name="gpuinfer-heart", daemon=True).start()

    def _beat(self) -> None:
        while True:
            (count,) = COUNT.unpack_from(self._memory)
            COUNT.pack_into(self._memory, 0, (count + 1) % 2**64)
            time.sleep(BEAT_S)


class SharedPulse:
    """Somebody else's heart. Look at least every `AWAY_S` seconds while you wait for it."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._count = -1
        self._beat_at = self._looked_at = time.monotonic()

    def late_s(self) -> float:
        """How long it has not beaten while we looked; 0 at the first look after a pause of our own."""
        now = time.monotonic()
        (count,) = COUNT.unpack_from(self._memory)
        if count != self._count or now - self._looked_at > AWAY_S:
            self._count, self._beat_at = count, now
        self._looked_at = now
        return now - self._beat_at

    @property
    def stopped(self) -> bool:
        return self.late_s() > LATE_S
