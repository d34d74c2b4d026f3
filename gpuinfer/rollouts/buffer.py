"""Where played groups wait for the trainer: bounded, never too old, each given out once; and how many groups may be
under way, so that none comes to the trainer older than it may be.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gpuinfer.errors import Closed
from gpuinfer.rollouts.record import Group, oldest_version


class ChangeEvent:
    """Coroutines wait for the next change. All calls belong to one event loop."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self) -> None:
        """Until the next `notify`."""
        changed = asyncio.get_running_loop().create_future()
        self._waiting.append(changed)
        try:
            await changed
        finally:
            if changed in self._waiting:  # cancelled before any change
                self._waiting.remove(changed)

    def notify(self) -> None:
        """Wake all that wait now."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)


BUFFER_CLOSED = "the run is ending: the buffer takes and gives nothing more."


class Shelf:
    """The groups in the buffer, without waiting; `GroupBuffer` adds that.

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
        """Whether there is room for one more group: `depth`, or `wanted` if a taker waits for more."""
        needed = wanted if self._filled else max(wanted, self.prefill)
        return len(self.waiting) < max(self.depth, needed)

    def stale(self, group: Group) -> bool:
        """Whether the group is too old, by the oldest version of any trainable token."""
        return (
            self.max_staleness is not None and self.version - oldest_version(group, self.version) > self.max_staleness
        )

    def add(self, group: Group) -> bool:
        """Whether the group is kept; a group that is too old is dropped."""
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
        """Set the trainer's version; returns the groups that are dropped as too old for it."""
        self.version = max(self.version, version)
        gone = [group for group in self.waiting if self.stale(group)]
        if gone:
            self.dropped += len(gone)
            self.waiting = deque(group for group in self.waiting if not self.stale(group))
        return gone


class GroupBuffer:
    """A shelf with waiting: `put` waits for room, `take` for groups, each first come, first served.

    `on_drop` is called with each group that is dropped. All methods belong to one event loop.
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
        self._changed = ChangeEvent()

    def __len__(self) -> int:
        return len(self.shelf.waiting)

    async def put(self, group: Group) -> bool:
        """Wait for room and add the group. False: the group was too old and is dropped.

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
                    raise Closed(BUFFER_CLOSED)
                kept = self.shelf.add(group)
                if not kept:
                    self._on_drop(group)
                return kept
        finally:
            self._coming -= 1
            self.shelf.ended = self._ending and not self._coming
            self._changed.notify()

    async def take(self, wanted: int) -> list[Group]:
        """Wait for so many groups. Once no more will come: the rest, and then none. Raises `Closed`.

        Cancelled, it has taken nothing.
        """
        if wanted < 1:
            raise ValueError("at least one group is taken")
        async with self._taking:
            self._wanted = wanted
            self._changed.notify()  # there may be room now for those who put
            try:
                while not self._closed and not self.shelf.ready(wanted):
                    await self._changed.wait()
            finally:
                self._wanted = 0
            if self._closed:
                raise Closed(BUFFER_CLOSED)
            taken = self.shelf.take(wanted)
            self._changed.notify()
            return taken

    def advance(self, version: int) -> int:
        """Set the trainer's version; returns how many groups were dropped as too old for it."""
        gone = self.shelf.advance(version)
        for group in gone:
            self._on_drop(group)
        self._changed.notify()
        return len(gone)

    def end(self) -> None:
        """No more groups will be put, except by those that wait in `put`; what is left can be taken."""
        self._ending = True
        self.shelf.ended = not self._coming
        self._changed.notify()

    def close(self) -> None:
        """`put` and `take` raise `Closed`, also those that wait. The groups stay where they were written."""
        self._closed = True
        self._changed.notify()


CAPACITY_CLOSED = "the run is ending: no more groups are begun."


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


class CapacityGate:
    """Admits groups in the order in which they ask. Each that was admitted ends in `accepted` or `failed`.

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
            raise Closed(CAPACITY_CLOSED)
        if self.capacity.room > 0 and not self._asking:
            self.capacity.running += 1
            self._promised += 1
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
        self.capacity.accepted += 1
        self.failed()

    def failed(self) -> None:
        """One that was under way will not come."""
        if self.capacity.running <= 0:
            raise RuntimeError("no group is under way")
        self.capacity.running -= 1
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
        """`admitted` raises `Closed`, also for those that wait."""
        self._closed = True
        while self._asking:
            turn = self._asking.popleft()
            if not turn.done():
                turn.set_exception(Closed(CAPACITY_CLOSED))

    def _let_in(self) -> None:
        while self._asking and self.capacity.room > 0:
            turn = self._asking.popleft()
            if not turn.done():
                self.capacity.running += 1
                self._promised += 1
                turn.set_result(None)
