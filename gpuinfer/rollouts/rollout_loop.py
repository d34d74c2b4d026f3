"""The loop: groups are begun, played, held against the reference, kept in files or nowhere, and handed to the trainer;
with the figures that the report and the verdict take from it (`gpuinfer.report.causes_rollouts`).
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from gpuinfer.rollouts.concurrency import Admission, GroupFeed
from gpuinfer.rollouts.gameplay import GroupPlayer
from gpuinfer.rollouts.record import Group


class GroupKeeper(Protocol):
    """Keeps each group once. `done`: the numbers of those that an earlier run has kept."""

    @property
    def done(self) -> frozenset[int]: ...
    async def add(self, group: Group) -> None: ...
    async def flush(self) -> None: ...
    async def close(self) -> None: ...


class NullKeeper:
    """Without `--out`."""

    done: frozenset[int] = frozenset()

    async def add(self, group: Group) -> None:
        pass

    async def flush(self) -> None:
        pass

    async def close(self) -> None:
        pass


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


class RolloutTally:
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


class RolloutLoop:
    """Everything between a group's number and the trainer."""

    def __init__(
        self,
        feed: GroupFeed,
        gate: Admission,
        player: GroupPlayer,
        reference: Reference,
        keeper: GroupKeeper,
        trainer: Trainer,
    ) -> None:
        self._feed, self._gate, self._player = feed, gate, player
        self._reference, self._keeper, self._trainer = reference, keeper, trainer
        self.tally = RolloutTally(len(keeper.done))

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


def report_facts(tally: RolloutTally, player: GroupPlayer, limit: int | None) -> dict[str, float]:
    """`groups_in_flight` is a mean, by Little's law; `groups_limited`: somebody has said how many there may be."""
    elapsed_s, counts = time.monotonic() - player.began, player.counts
    told = {
        "calls": float(counts.calls),
        "games_failed": float(tally.failed),
        "groups_in_flight": tally.group_s / elapsed_s if elapsed_s > 0 else 0.0,
        "environment_share": counts.environment_s / tally.game_s if tally.game_s else 0.0,
        "reference_share": tally.reference_s / whole if (whole := tally.played_s + tally.reference_s) else 0.0,
    }
    return told if limit is None else {**told, "groups_limited": float(limit)}
