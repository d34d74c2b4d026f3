"""The loop: groups are begun, played, held against the reference, kept in files or nowhere, and handed to the trainer;
with the figures that the report and the verdict take from it (`gpuinfer.report.causes_rollouts`).
"""

from __future__ import annotations

import asyncio
import statistics
import time

from gpuinfer.rollouts.concurrency import GroupFeed
from gpuinfer.rollouts.files import GroupKeeper
from gpuinfer.rollouts.gameplay import GroupPlayer
from gpuinfer.rollouts.record import Group
from gpuinfer.rollouts.reference_model import ReferenceModel
from gpuinfer.rollouts.training import Training


class RolloutTally:
    """What has become of groups so far."""

    def __init__(self, before: int) -> None:
        self.before = before
        self.groups = self.games = self.failed = self.turns = self.steps = 0
        self.played_s = self.reference_s = self.game_s = 0.0  # of all groups, and of all games
        self.group_s = 0.0  # of all groups in their places
        self._rewards: list[float] = []  # of the policy's trajectories, in groups that `take_figures` has not had
        self._metrics: dict[str, list[float]] = {}  # of their games, by name

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
        for game in group.games:
            self._rewards += [one.reward for one in game.trajectories if one.trainable]
            for name, value in game.metrics.items():
                self._metrics.setdefault(name, []).append(value)

    def take_figures(self) -> dict[str, float]:
        """Means over the groups that were added since the last call: rewards, and the environment's metrics."""
        rewards, self._rewards = self._rewards, []
        metrics, self._metrics = self._metrics, {}
        found = {f"metric_{name}": statistics.fmean(values) for name, values in metrics.items()}
        if rewards:
            found |= {"reward": statistics.fmean(rewards), "reward_std": statistics.pstdev(rewards)}
        return found

    @property
    def done(self) -> int:
        return self.before + self.groups


class RolloutLoop:
    """Everything between a group's number and the trainer; what is None is left out."""

    def __init__(
        self,
        feed: GroupFeed,
        player: GroupPlayer,
        *,
        reference: ReferenceModel | None = None,
        keeper: GroupKeeper | None = None,
        training: Training | None = None,
    ) -> None:
        self._feed, self._player = feed, player
        self._reference, self._keeper, self._training = reference, keeper, training
        self.tally = RolloutTally(0 if keeper is None else len(keeper.done))

    async def run(self) -> None:
        """Until every group is where it belongs. Raises, as an exception group, when the work cannot go on."""
        async with asyncio.TaskGroup() as tasks:
            if self._training is not None:
                tasks.create_task(self._training.run())
            async with asyncio.TaskGroup() as groups:
                async for number in self._feed:
                    groups.create_task(self._one(number))
                if self._training is not None:
                    self._training.recorder.tail_from = time.monotonic()  # no more groups are begun
            if self._keeper is not None:
                await self._keeper.flush()
            if self._training is not None:
                self._training.end()

    async def _one(self, number: int) -> None:
        reference, training = self._reference, self._training
        inline = reference is not None and reference.inline
        try:
            group = await self._player.play(number)
            if reference is not None:
                await reference.admit()
                group = await reference.add(group) if inline else group
        except BaseException:
            if training is not None:
                training.failed()
            raise
        finally:
            self._feed.finished()
        if reference is not None and not inline:
            group = await reference.add(group)
        if self._keeper is not None:
            await self._keeper.add(group)
        self.tally.add(group, inline)
        if training is not None:
            training.accepted()
            await training.put(group)


def report_facts(tally: RolloutTally, player: GroupPlayer, limit: int | None) -> dict[str, float]:
    """`groups_in_flight` is a mean, by Little's law; `groups_limited`: the user's limit."""
    elapsed_s, counts = time.monotonic() - player.began, player.counts
    facts = {
        "calls": float(counts.calls),
        "games_failed": float(tally.failed),
        "groups_in_flight": tally.group_s / elapsed_s if elapsed_s > 0 else 0.0,
        "environment_share": counts.environment_s / tally.game_s if tally.game_s else 0.0,
        "reference_share": tally.reference_s / whole if (whole := tally.played_s + tally.reference_s) else 0.0,
    }
    return facts if limit is None else {**facts, "groups_limited": float(limit)}
