"""Memory in large pages, of which a processor needs fewer entries to find its way, and the system fewer faults to make
them: the pool of a cache's pages, and weights.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LINE = 64  # bytes: pages of a cache begin where a line of the processor's does
LARGE = 1 << 21  # bytes: a large page of memory
CHUNK = 64 << 20  # bytes that an arena maps at once, at least


def mapped(size: int) -> NDArray[np.uint8]:
    """So many bytes, zero, that begin with a large page of memory. They are resident once they are written."""
    memory = mmap.mmap(-1, size + LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # of a kernel that has no large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    room = np.frombuffer(memory, np.uint8)
    start = -room.ctypes.data % LARGE
    return room[start : start + size]


class Arena:
    """Memory for many arrays that are given up together, one behind the other in large pages."""

    def __init__(self) -> None:
        self._left: NDArray[np.uint8] = np.zeros(0, np.uint8)

    def take(self, size: int) -> NDArray[np.uint8]:
        """So many bytes, zero, that begin where a line of the processor's cache does."""
        if size > len(self._left):
            self._left = mapped(max(size, CHUNK))
        found = self._left[:size]
        self._left = self._left[-(-size // LINE) * LINE :]
        return found


class Pool:
    """`pages` pages of `page_bytes` bytes each, all zero at first. Memory is resident as far as pages were written."""

    def __init__(self, pages: int, page_bytes: int) -> None:
        self.page_bytes = -(-page_bytes // LINE) * LINE
        self._pages = mapped(pages * self.page_bytes).reshape(pages, self.page_bytes)
        self.address = self._pages.ctypes.data

    @property
    def nbytes(self) -> int:
        return self._pages.nbytes

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            self._pages[target] = self._pages[source]

    def fill(self) -> None:
        """Make all of it zero, and resident."""
        self._pages[...] = 0
