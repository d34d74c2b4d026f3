"""Gives games of a source to worker processes, each to one at a time, and adds up what they report.

To a worker: {games: [numbers], more: whether other games are left}, and {over} when all games count.
From it: {ready: slots of each block}, {note}, {need: how many games}, and {counts: {games, simulations, evaluations},
begun, kept: [numbers of games that count from now on], and of each of these what is counted: points, where there is an
opponent, resignations, where players may resign}, the last time with {ended}.

A worker that is killed has its games taken back. With records on disk a game counts when its shard is there: the last
one may have reached the disk without a word, so the folder is looked at first. Workers that have run out stay until all
games count, since they may yet be assigned those of another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuinfer.api import Progress, Workers
from gpuinfer.errors import GpuinferError, WorkerDied
from gpuinfer.host.event_loop import cancel_until_done
from gpuinfer.workloads.selfplay.game_records import GameTally

COUNTS = ("games", "simulations", "evaluations")

log = logging.getLogger(__name__)


@dataclass
class WorkerGames:
    """What one worker has, and has done."""

    arguments: Mapping[str, Any]
    held: set[int] = field(default_factory=set)  # games assigned to it that do not count yet
    kept: int = 0  # of its games count
    counts: Mapping[str, int] = field(default_factory=dict)
    begun: float = 0.0
    note: str = ""  # what it does until it is ready, where that takes long
    blocks: list[int] | None = None  # the slots of each, once it is ready
    plays: bool = True  # neither ended nor dead
    ended: bool = False  # by itself
    dry: bool = False  # has been sent word that there are no more games

    def keep(self, games: set[int]) -> None:
        self.kept += len(games)
        self.held -= games


class GameSource(ABC):
    """Where the numbers of games come from, and where those that count are reported."""

    total: int | None = None  # games of the run; None: not known
    before: int = 0  # of these, by an earlier run
    cure = "Run again, with --out to keep games and with fewer --workers."  # when all workers were killed

    @property
    @abstractmethod
    def left(self) -> float:
        """Games that have not been taken: infinity while that is not known, 0 once there are no more."""

    @abstractmethod
    async def take(self, most: int) -> Sequence[int]:
        """Up to `most` games, at least one: waits until there are some. Empty once there are no more."""

    def kept(self, games: Sequence[int], message: Mapping[str, Any]) -> None:  # noqa: B027
        """These games count. `message` has what a worker says of them."""


class NumberedGames(GameSource):
    """All games of a run up to `total`, but for those that are finished."""

    def __init__(self, total: int, finished: set[int]) -> None:
        self.total, self.before = total, len(finished)
        self._left = total - len(finished)
        self._numbers = itertools.filterfalse(finished.__contains__, range(total))

    @property
    def left(self) -> float:
        return self._left

    async def take(self, most: int) -> Sequence[int]:
        taken = list(itertools.islice(self._numbers, most))
        self._left -= len(taken)
        return taken


class Match:
    """The games of a source, played by workers with these arguments. `on_disk` reads the numbers of the games that have
    reached the disk; `tallies` add up what is reported of games, by its name.
    """

    def __init__(
        self,
        source: GameSource,
        arguments: Iterable[Mapping[str, Any]],
        on_disk: Callable[[], set[int]] = set,
        tallies: Mapping[str, GameTally] | None = None,
    ) -> None:
        self._source = source
        self._free: deque[int] = deque()  # games that were taken and that no worker has
        self._hands = [WorkerGames(one) for one in arguments]
        self._wants: dict[int, int] = {}  # how many games a worker waits for
        self._news = asyncio.Event()  # of `_free` or `_wants`
        self._on_disk, self._tallies = on_disk, tallies or {}
        self._playing = False
        self._over = False

    @property
    def arguments(self) -> list[Mapping[str, Any]]:
        return [hand.arguments for hand in self._hands]

    @property
    def left(self) -> float:
        """Games that no worker has and that do not count."""
        return len(self._free) + self._source.left

    @property
    def done(self) -> int:
        return self._source.before + sum(hand.counts.get("games", 0) for hand in self._hands)

    async def follow(self, workers: Workers) -> AsyncGenerator[Progress]:
        """Until every worker has ended. Raises `WorkerDied` when all were killed before the end."""
        dealing = asyncio.create_task(self._deal(workers))
        try:
            async for worker, message in workers:
                if dealing.done():
                    dealing.result()
                if message is None:
                    await self._give_back(worker)
                else:
                    self._receive(worker, message)
                if self._playing:
                    yield self.progress()
                elif not all(hand.blocks for hand in self._hands if hand.plays):
                    unready = (hand for hand in self._hands if hand.plays and not hand.blocks)
                    note = next((hand.note for hand in unready if hand.note), "starting the workers")
                    yield self.progress(note, setup=True)
                else:
                    self._playing = True
                    yield self.progress()  # the run's clock starts
                    self._supply_idle()
                await self._end_if_over(workers)
        finally:
            await cancel_until_done(dealing)

    async def _end_if_over(self, workers: Workers) -> None:
        if self._over or self.left or any(hand.held for hand in self._hands):
            return
        self._over = True
        for other, hand in enumerate(self._hands):
            if hand.plays:
                await _send(workers, other, {"over": True})

    def _receive(self, worker: int, message: Mapping[str, Any]) -> None:
        hand = self._hands[worker]
        if "note" in message:
            hand.note = message["note"]
        elif "ready" in message:
            hand.blocks = message["ready"]
        elif "need" in message:
            self._wants[worker] = message["need"]
            self._news.set()
        elif "counts" in message:
            hand.counts, hand.begun = message["counts"], message["begun"]
            hand.keep(hand.held.intersection(message["kept"]))
            self._source.kept(message["kept"], message)
            for name, tally in self._tallies.items():
                tally.add(dict(zip(message["kept"], message[name], strict=True)))
            hand.ended = "ended" in message
            hand.plays = not hand.ended

    async def _give_back(self, worker: int) -> None:
        """Take back the games of a worker that was killed, but for those that count."""
        hand = self._hands[worker]
        if hand.ended:
            return
        hand.plays = False
        if hand.held:
            hand.keep(hand.held & await asyncio.to_thread(self._on_disk))
        hand.counts, hand.begun = {**hand.counts, "games": hand.kept}, 0.0
        back, hand.held = sorted(hand.held), set()
        self._free.extendleft(reversed(back))
        if self.left and not any(other.plays or other.ended for other in self._hands):  # ended: requested to stop
            out = hand.arguments["out"]
            kept = f"{self.done} of {self._source.total} games are kept in {out}: run again with --resume."
            raise WorkerDied(
                "every worker was killed before the games were done (SIGKILL; out of memory?). "
                f"{kept if out else self._source.cure}"
            )
        if back:
            log.warning("worker %d was killed: the others play the %d games that it had", worker, len(back))
        if self._playing:
            self._supply_idle()

    def _supply_idle(self) -> None:
        """Games for those who have none coming, as many as fit."""
        for worker, hand in enumerate(self._hands):
            if hand.plays and (hand.dry or not hand.held):
                self._wants[worker] = hand.arguments["slots"]
        self._news.set()

    async def _deal(self, workers: Workers) -> None:
        """Give games to the workers that want some, in equal shares."""
        taking: asyncio.Task[None] | None = None
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                if taking is not None and taking.done():
                    taking.result()  # raises its error
                    taking = None
                wants = {worker: want for worker, want in self._wants.items() if self._hands[worker].plays}
                if not wants:  # they were requested to stop meanwhile, or killed
                    continue
                if self._free or not self._source.left:
                    await self._give(wants, workers)
                elif taking is None:
                    share = self.left / sum(hand.plays for hand in self._hands)
                    most = sum(math.ceil(min(want, share)) for want in wants.values())
                    taking = asyncio.create_task(self._take(most))
                    taking.add_done_callback(lambda _: self._news.set())
        finally:
            await cancel_until_done(taking)

    async def _take(self, most: int) -> None:
        self._free.extend(await self._source.take(most))

    async def _give(self, wants: Mapping[int, int], workers: Workers) -> None:
        """Games that are free to those who want some; word that there are no more, once there are none."""
        assigned: dict[int, list[int]] = {}
        for number, (worker, want) in enumerate(sorted(wants.items(), key=lambda item: item[1])):
            share = min(want, math.ceil(len(self._free) / (len(wants) - number)))
            if share or not self.left:
                assigned[worker] = [self._free.popleft() for _ in range(share)]
                self._hands[worker].held.update(assigned[worker])
                del self._wants[worker]
        if self._wants:
            self._news.set()
        for worker, games in assigned.items():
            self._hands[worker].dry = not self.left
            await _send(workers, worker, {"games": games, "more": not self._hands[worker].dry})

    def progress(self, note: str = "", setup: bool = False) -> Progress:
        slots = sum(hand.arguments["slots"] for hand in self._hands if hand.plays or hand.ended)
        facts = {
            "workers": sum(hand.plays or hand.ended for hand in self._hands),
            "blocks": max((len(hand.blocks) for hand in self._hands if hand.blocks), default=1),
            "games_in_flight": slots,
            "rows_outstanding": slots * self._hands[0].arguments["search"]["determinizations"],
        }
        return Progress(
            done=self.done,
            total=self._source.total,
            unit="games",
            before=self._source.before,
            begun=sum(hand.begun for hand in self._hands),
            counts={name: sum(hand.counts.get(name, 0) for hand in self._hands) for name in COUNTS},
            facts=facts | {name: fact for one in self._tallies.values() for name, fact in one.facts().items()},
            note=note,
            setup=setup,
        )


async def _send(workers: Workers, worker: int, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(GpuinferError):  # it is gone, and `follow` will hear of it
        await workers.send(worker, message)
