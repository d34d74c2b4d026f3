"""Which group is begun when: as many at once as keep the model busy, or as were asked for, and as a gate allows."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable
from typing import Protocol

from gpuinfer.errors import Closed
from gpuinfer.workloads.rollouts.speaking import Counts

LEAST_GROUPS, MOST_CROWD = 2, 4  # groups at once; games for each slot


class Admission(Protocol):
    """What else may keep a group from being begun: the capacity rule of a trainer."""

    async def admitted(self) -> None: ...
    def started(self) -> None: ...
    def accepted(self) -> None: ...
    def failed(self) -> None: ...


class Open:
    """A gate that keeps nobody."""

    async def admitted(self) -> None:
        pass

    def started(self) -> None:
        pass

    def accepted(self) -> None:
        pass

    def failed(self) -> None:
        pass


class Feed:
    """Gives out numbers of groups, each when there is room for it.

    Without a `limit` there is room while fewer answers are under way than the model has slots for; a group that has not
    asked yet counts as a row for each of its games.
    """

    def __init__(
        self, numbers: Iterable[int], counts: Counts, gate: Admission, *, slots: int, samples: int, limit: int | None
    ) -> None:
        self._numbers, self._counts, self._gate = numbers, counts, gate
        self._slots, self._samples, self._limit = slots, samples, limit
        self._most = max(LEAST_GROUPS, math.ceil(MOST_CROWD * slots / samples))
        self._quiet: dict[int, int] = {}  # group → games of it that have not asked for anything yet
        self._change = asyncio.Event()
        counts.changed = self._change.set

    async def __aiter__(self) -> AsyncIterator[int]:
        for number in self._numbers:
            try:
                await self._gate.admitted()
            except Closed:  # nobody wants more
                return
            while not self._room:
                self._change.clear()
                await self._change.wait()
            self._gate.started()
            self._quiet[number] = self._samples
            yield number

    @property
    def under_way(self) -> int:
        """Groups that have been begun and are not over."""
        return len(self._quiet)

    def begun(self, number: int) -> None:
        """One of its games is about to ask for the first time."""
        self._quiet[number] = max(0, self._quiet[number] - 1)
        self._change.set()

    def finished(self, number: int) -> None:
        """This group is over."""
        del self._quiet[number]
        self._change.set()

    @property
    def _room(self) -> bool:
        if self._limit is not None:
            return self.under_way < self._limit
        if self.under_way >= self._most:
            return False
        return not self.under_way or self._counts.asked + sum(self._quiet.values()) < self._slots
