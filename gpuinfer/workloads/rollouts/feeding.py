"""Which group is begun when: as many at once as keep the model busy, or as were asked for, and as a gate allows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Protocol

from gpuinfer.errors import Closed
from gpuinfer.workloads.rollouts.crowding import Crowd


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
    """Gives out numbers of groups: while fewer than `limit` are under way, or, without one, whenever there is room in
    the crowd for one more game.
    """

    def __init__(self, numbers: Iterable[int], gate: Admission, crowd: Crowd, limit: int | None = None) -> None:
        self._numbers, self._gate, self._crowd, self._limit = numbers, gate, crowd, limit
        self.under_way = 0  # groups that have been begun and are not over
        self._change = asyncio.Event()
        crowd.changed = self._change.set

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
            self.under_way += 1
            yield number

    def finished(self) -> None:
        """One group is over."""
        self.under_way -= 1
        self._change.set()

    @property
    def _room(self) -> bool:
        return self._crowd.room if self._limit is None else self.under_way < self._limit
