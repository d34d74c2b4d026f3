"""The loop: groups are begun, played, held against the reference, kept, and handed to the trainer."""

from __future__ import annotations

import asyncio
from typing import Protocol

from gpuinfer.rollouts.record import Group
from gpuinfer.workloads.rollouts.feeding import Admission, Feed
from gpuinfer.workloads.rollouts.keeping import Keeper
from gpuinfer.workloads.rollouts.playing import Player


class Reference(Protocol):
    """Adds what the reference thinks of a group's tokens."""

    inline: bool  # a group keeps its place until that is done

    async def admit(self) -> None:
        """Wait until one more group may be added."""
        ...

    async def add(self, group: Group) -> Group: ...
    @property
    def seconds(self) -> float:
        """For so long any group has waited for it, until now."""
        ...


class Trainer(Protocol):
    """The other end: takes groups, and gives weights."""

    async def put(self, group: Group) -> None: ...
    async def run(self) -> None:
        """Until it has all that it is going to get."""
        ...

    def all_begun(self) -> None:
        """No more groups will be begun."""
        ...

    def end(self) -> None:
        """No more groups will come."""
        ...


class NoReference:
    inline = False
    seconds = 0.0

    async def admit(self) -> None:
        pass

    async def add(self, group: Group) -> Group:
        return group


class NoTrainer:
    """Takes everything, and wants nothing of it."""

    async def put(self, group: Group) -> None:
        pass

    async def run(self) -> None:
        pass

    def all_begun(self) -> None:
        pass

    def end(self) -> None:
        pass


class Tally:
    """What has become of groups so far."""

    def __init__(self, before: int) -> None:
        self.before = before
        self.groups = self.games = self.failed = self.turns = self.steps = 0
        self.played_s = self.reference_s = self.game_s = 0.0  # of all groups, and of all games
        self.group_s = 0.0  # of all groups in their places

    def add(self, group: Group, inline: bool) -> None:
        """`inline`: it was in its place until its reference was computed."""
        self.played_s += group.seconds
        self.reference_s += group.reference_s
        self.group_s += group.seconds + (group.reference_s if inline else 0.0)
        self.game_s += sum(game.seconds for game in (*group.games, *group.failed))
        self.groups += 1
        self.games += len(group.games)
        self.failed += len(group.failed)
        self.steps += sum(game.steps for game in group.games)
        self.turns += sum(1 for _ in group.turns())

    @property
    def done(self) -> int:
        return self.before + self.groups


class Loop:
    """Everything between a group's number and the trainer."""

    def __init__(
        self, feed: Feed, gate: Admission, player: Player, reference: Reference, keeper: Keeper, trainer: Trainer
    ) -> None:
        self._feed, self._gate, self._player = feed, gate, player
        self._reference, self._keeper, self._trainer = reference, keeper, trainer
        self.tally = Tally(len(keeper.done))

    async def run(self) -> None:
        """Until every group is where it belongs. Raises, as an exception group, when the work cannot go on."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._trainer.run())
            async with asyncio.TaskGroup() as groups:
                async for number in self._feed:
                    groups.create_task(self._one(number))
                self._trainer.all_begun()
            await self._keeper.flush()
            self._trainer.end()

    async def _one(self, number: int) -> None:
        try:
            group = await self._player.play(number)
            await self._reference.admit()
            if self._reference.inline:
                group = await self._reference.add(group)
        except BaseException:
            self._gate.failed()
            raise
        finally:
            self._feed.finished()
        if not self._reference.inline:
            group = await self._reference.add(group)
        await self._keeper.add(group)
        self.tally.add(group, self._reference.inline)
        self._gate.accepted()
        await self._trainer.put(group)
