"""Where played groups wait for the trainer: bounded, never too old, each given out once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from gpuinfer.errors import Closed
from gpuinfer.rollouts.record import Group
from gpuinfer.rollouts.versions import oldest
from gpuinfer.rollouts.waking import Changes

CLOSED = "the run is ending: the buffer takes and gives nothing more."


class Shelf:
    """What waits, and what may go, without any waiting. `Buffer` adds that.

    put = given + dropped + what waits, always.
    """

    def __init__(self, depth: int, prefill: int = 0, max_staleness: int | None = None, version: int = 0) -> None:
        """`depth`: groups that may wait. `prefill`: so many must have come before the first is given. `max_staleness`:
        versions that a group may lie behind the trainer's when it is given; None: any number.
        """
        if depth < 1 or prefill < 0 or (max_staleness is not None and max_staleness < 0):
            raise ValueError("a depth of at least 1, a prefill and a staleness of at least 0")
        self.depth, self.prefill, self.max_staleness = depth, prefill, max_staleness
        self.version = version  # the trainer's
        self.waiting: deque[Group] = deque()
        self.put = self.given = self.dropped = 0
        self.ended = False  # no more will come
        self._filled = prefill == 0

    def room(self, wanted: int = 0) -> bool:
        """Whether one more may come, where a taker waits for `wanted`: more than `depth`, if it wants more."""
        needed = wanted if self._filled else max(wanted, self.prefill)
        return len(self.waiting) < max(self.depth, needed)

    def stale(self, group: Group) -> bool:
        """Whether it is too old, counted from the oldest version of any trainable token."""
        return self.max_staleness is not None and self.version - oldest(group, self.version) > self.max_staleness

    def add(self, group: Group) -> bool:
        """Whether it is kept: one that is too old already is dropped."""
        self.put += 1
        if self.stale(group):
            self.dropped += 1
            return False
        self.waiting.append(group)
        self._filled = self._filled or len(self.waiting) >= self.prefill
        return True

    def ready(self, wanted: int) -> bool:
        """Whether a taker of `wanted` groups gets something now: all of them, or the rest once no more will come."""
        return self.ended or (self._filled and len(self.waiting) >= wanted)

    def take(self, wanted: int) -> list[Group]:
        """The oldest `wanted`, fewer where there are fewer."""
        taken = [self.waiting.popleft() for _ in range(min(wanted, len(self.waiting)))]
        self.given += len(taken)
        return taken

    def advance(self, version: int) -> list[Group]:
        """The trainer's version from now on; returns what is too old for it, and is dropped."""
        self.version = max(self.version, version)
        gone = [group for group in self.waiting if self.stale(group)]
        if gone:
            self.dropped += len(gone)
            self.waiting = deque(group for group in self.waiting if not self.stale(group))
        return gone

    def counts(self) -> dict[str, Any]:
        """What came and went: put, given, dropped, waiting."""
        return {"put": self.put, "given": self.given, "dropped": self.dropped, "waiting": len(self.waiting)}


class Buffer:
    """A shelf with those who wait for room on it, or for what is to come; each in the order of their coming.

    `on_drop` is told of each group that is dropped. All methods belong to one event loop.
    """

    def __init__(
        self,
        depth: int,
        prefill: int = 0,
        max_staleness: int | None = None,
        version: int = 0,
        on_drop: Callable[[Group], None] = lambda group: None,
    ) -> None:
        self.shelf = Shelf(depth, prefill, max_staleness, version)
        self._on_drop = on_drop
        self._putting, self._taking = asyncio.Lock(), asyncio.Lock()
        self._wanted = 0  # by the taker that waits
        self._coming = 0  # those that are being put
        self._ending = self._closed = False
        self._changed = Changes()

    def __len__(self) -> int:
        """How many groups wait."""
        return len(self.shelf.waiting)

    async def put(self, group: Group) -> bool:
        """Wait for room, and leave it there. Whether it was kept: False, it was too old and is dropped.

        Raises `Closed`; `ValueError` after `end`.
        """
        if self._ending:
            raise ValueError("no more groups were to come")
        self._coming += 1
        try:
            async with self._putting:
                while not (self._closed or self._ending or self.shelf.stale(group) or self.shelf.room(self._wanted)):
                    await self._changed.wait()
                if self._closed:
                    raise Closed(CLOSED)
                kept = self.shelf.add(group)
                if not kept:
                    self._on_drop(group)
                return kept
        finally:
            self._coming -= 1
            self._look_for_end()
            self._changed.tell()

    async def take(self, wanted: int) -> list[Group]:
        """Wait for so many groups. Once no more will come: the rest, and then none. Raises `Closed`.

        Cancelled, it has taken nothing.
        """
        if wanted < 1:
            raise ValueError("at least one group is taken")
        async with self._taking:
            self._wanted = wanted
            self._changed.tell()  # there may be room now for those who put
            try:
                while not self._closed and not self.shelf.ready(wanted):
                    await self._changed.wait()
            finally:
                self._wanted = 0
            if self._closed:
                raise Closed(CLOSED)
            taken = self.shelf.take(wanted)
            self._changed.tell()
            return taken

    def advance(self, version: int) -> int:
        """The trainer's version from now on. How many groups were too old for it, and were dropped."""
        gone = self.shelf.advance(version)
        for group in gone:
            self._on_drop(group)
        self._changed.tell()
        return len(gone)

    def end(self) -> None:
        """No more will come but those that wait to be put: what is there can be taken, and then there is nothing."""
        self._ending = True
        self._look_for_end()
        self._changed.tell()

    def close(self) -> None:
        """Whoever waits, or comes from now on, is told `Closed`. What is there stays where it was written."""
        self._closed = True
        self._changed.tell()

    def _look_for_end(self) -> None:
        self.shelf.ended = self._ending and not self._coming
