"""The pool of pages of a decoder's cache: which are free, and how many rows have each of the others."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gpuinfer.text.generator.seams import Ints
from gpuinfer.text.step import PAGE


def pages_for(positions: int) -> int:
    """How many pages hold so many positions."""
    return -(-positions // PAGE)


class PagePool:
    """`len(pool)` pages are free. The others have rows, or wait in a prefix tree for rows that want them again."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.users = np.zeros(pages, np.int32)  # rows that have each page
        self._free = list(range(pages - 1, -1, -1))  # the one freed last is taken first: it may be in a core's cache

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Free pages, each with one user from now on. There must be as many."""
        taken = [self._free.pop() for _ in range(count)]
        self.users[taken] = 1
        return taken

    def free(self, pages: Iterable[int]) -> None:
        """No row has them, and nothing in them is wanted."""
        self._free.extend(pages)

    def share(self, pages: Ints) -> int:
        """One more row has each of these. Returns how many of them no row had."""
        unused = int(np.count_nonzero(self.users[pages] == 0))
        self.users[pages] += 1
        return unused

    def leave(self, pages: Ints) -> list[int]:
        """One row fewer has each of these. Returns those that no row has any more."""
        self.users[pages] -= 1
        found: list[int] = pages[self.users[pages] == 0].tolist()
        return found
