"""How many groups may be under way, so that none comes to the trainer older than it may be."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from gpuinfer.errors import Closed

CLOSED = "the run is ending: no more groups are begun."


@dataclass(slots=True)
class Capacity:
    """The rule of asynchronous reinforcement learning (Fu et al. 2025, AReaL, section 5.1; SkyRL's is the same):

        capacity = min(concurrency - running, (η + version + 1) · batch - accepted - running)

    One version is one batch trained on. With η = 0 the groups of the next batch are begun once the weights are there
    that this batch has made; with η = 1 they are played while the trainer is at work, and so on. What is dropped as
    too old is not accepted any more, so that others are played in its place.
    """

    concurrency: int  # groups under way at most
    batch: int = 1  # groups of one step of the trainer
    staleness: int | None = (
        None  # η: versions that a group may lie behind; None: there is no trainer, and no such bound
    )
    first: int = 0  # the version at the start
    version: int = 0  # the trainer's
    running: int = 0
    accepted: int = 0  # played, and trained on already, being trained on, or waiting for it

    def __post_init__(self) -> None:
        self.version = max(self.version, self.first)

    @property
    def room(self) -> int:
        """How many more may be begun; none where it is negative."""
        free = self.concurrency - self.running
        if self.staleness is None:
            return free
        versions = self.staleness + self.version - self.first + 1
        return min(free, versions * self.batch - self.accepted - self.running)


class Gate:
    """Lets groups begin, in the order in which they ask. Each that was admitted is told of: `accepted` or `failed`.

    All methods belong to one event loop.
    """

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self._asking: deque[asyncio.Future[None]] = deque()
        self._promised = 0  # admitted, and not yet started: they count as running
        self._closed = False

    @property
    def waiting(self) -> int:
        """How many wait to be admitted."""
        return len(self._asking)

    async def admitted(self) -> None:
        """Wait until one more group may begin; its place is taken with the return. Raises `Closed`."""
        if self._closed:
            raise Closed(CLOSED)
        if self.capacity.room > 0 and not self._asking:
            self._promise()
            return
        turn = asyncio.get_running_loop().create_future()
        self._asking.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.withdrawn()
            elif turn in self._asking:
                self._asking.remove(turn)
            raise

    def started(self) -> None:
        """The group that was admitted has begun. Raises `RuntimeError` when none was."""
        if not self._promised:
            raise RuntimeError("a group starts once it is admitted")
        self._promised -= 1

    def withdrawn(self) -> None:
        """The group that was admitted is not begun after all."""
        self.started()
        self.failed()

    def accepted(self) -> None:
        """One that was under way is played."""
        self._left()
        self.capacity.accepted += 1
        self._let_in()

    def failed(self) -> None:
        """One that was under way will not come."""
        self._left()
        self._let_in()

    def dropped(self) -> None:
        """One that was accepted is too old to be trained on."""
        if self.capacity.accepted <= 0:
            raise RuntimeError("only what was accepted is dropped")
        self.capacity.accepted -= 1
        self._let_in()

    def advance(self, version: int) -> None:
        """The trainer's weights are of this version now. Never an older one: `ValueError`."""
        if version < self.capacity.version:
            raise ValueError(f"version {version} comes after {self.capacity.version}")
        self.capacity.version = version
        self._let_in()

    def close(self) -> None:
        """Whoever waits, or asks from now on, is told `Closed`."""
        self._closed = True
        while self._asking:
            turn = self._asking.popleft()
            if not turn.done():
                turn.set_exception(Closed(CLOSED))

    def _promise(self) -> None:
        self.capacity.running += 1
        self._promised += 1

    def _left(self) -> None:
        if self.capacity.running <= 0:
            raise RuntimeError("no group is under way")
        self.capacity.running -= 1

    def _let_in(self) -> None:
        while self._asking and self.capacity.room > 0:
            turn = self._asking.popleft()
            if not turn.done():
                self._promise()
                turn.set_result(None)
