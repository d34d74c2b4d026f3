"""Hands games out to worker processes, each to one at a time, and adds up what they report.

To a worker: {games: [numbers], more: whether other games are left}, and {over} when all games count.
From it: {ready: slots of each block}, {note}, {need: how many games}, and {counts: {games, simulations, evaluations},
begun, kept: [numbers of games that count from now on], and of each of these what is counted: points, where there is an
opponent, resignations, where players may resign}, the last time with {ended}.

A worker that is killed has its games taken back. With records on disk a game counts when its shard is there: the last
one may have reached the disk without a word, so the folder is looked at first. Workers that have run out stay until all
games count, since they may yet be given those of another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpuinfer.api import Progress, Workers
from gpuinfer.errors import GpuinferError, WorkerDied

COUNTS = ("games", "simulations", "evaluations")

log = logging.getLogger(__name__)


@dataclass
class WorkerGames:
    """What one worker has, and has done."""

    arguments: Mapping[str, Any]
    held: set[int] = field(default_factory=set)  # games given to it that do not count yet
    kept: int = 0  # of its games count
    counts: Mapping[str, int] = field(default_factory=dict)
    begun: float = 0.0
    note: str = ""  # what it does until it is ready, where that takes long
    blocks: list[int] | None = None  # the slots of each, once it is ready
    plays: bool = True  # neither ended nor dead
    ended: bool = False  # by itself
    dry: bool = False  # was told that there are no more games

    def keep(self, games: set[int]) -> None:
        self.kept += len(games)
        self.held -= games


class GameTally(Protocol):
    """Adds up something of games, by their numbers; a game counts once."""

    def add(self, games: Mapping[int, Any], /) -> None: ...

    def facts(self) -> Mapping[str, float]: ...


class Match:
    """All games of one run. `on_disk` reads the numbers of the games that have reached the disk; `tallies` add up what
    is told of games, by its name.
    """

    def __init__(
        self,
        total: int,
        finished: set[int],
        arguments: Iterable[Mapping[str, Any]],
        on_disk: Callable[[], set[int]] = set,
        tallies: Mapping[str, GameTally] | None = None,
    ) -> None:
        self.left = total - len(finished)  # given to no worker yet
        self._total, self._before = total, len(finished)
        self._ids: Iterator[int] = itertools.filterfalse(finished.__contains__, range(total))
        self._hands = [WorkerGames(one) for one in arguments]
        self._on_disk, self._tallies = on_disk, tallies or {}
        self._playing = False
        self._over = False

    @property
    def arguments(self) -> list[Mapping[str, Any]]:
        return [hand.arguments for hand in self._hands]

    @property
    def done(self) -> int:
        return self._before + sum(hand.counts.get("games", 0) for hand in self._hands)

    async def follow(self, workers: Workers) -> AsyncIterator[Progress]:
        """Until every worker has ended. Raises `WorkerDied` when all were killed before the end."""
        async for worker, message in workers:
            if message is None:
                await self._give_back(worker, workers)
            else:
                await self._receive(worker, message, workers)
            if self._playing:
                yield self.progress()
            elif not all(hand.blocks for hand in self._hands if hand.plays):
                unready = (hand for hand in self._hands if hand.plays and not hand.blocks)
                note = next((hand.note for hand in unready if hand.note), "starting the workers")
                yield self.progress(note, setup=True)
            else:
                self._playing = True
                yield self.progress()  # the run's clock starts
                await self._deal(workers)
            if self._over or self.left or any(hand.held for hand in self._hands):
                continue
            self._over = True
            for other, hand in enumerate(self._hands):
                if hand.plays:
                    await _send(workers, other, {"over": True})

    async def _receive(self, worker: int, message: Mapping[str, Any], workers: Workers) -> None:
        hand = self._hands[worker]
        if "note" in message:
            hand.note = message["note"]
        elif "ready" in message:
            hand.blocks = message["ready"]
        elif "need" in message:
            share = math.ceil(self.left / sum(other.plays for other in self._hands))
            await self._give(worker, min(message["need"], share), workers)
        elif "counts" in message:
            hand.counts, hand.begun = message["counts"], message["begun"]
            hand.keep(hand.held.intersection(message["kept"]))
            for name, tally in self._tallies.items():
                tally.add(dict(zip(message["kept"], message[name], strict=True)))
            hand.ended = "ended" in message
            hand.plays = not hand.ended

    async def _give_back(self, worker: int, workers: Workers) -> None:
        """Take back the games of a worker that was killed, but for those that count."""
        hand = self._hands[worker]
        if hand.ended:
            return
        hand.plays = False
        if hand.held:
            hand.keep(hand.held & await asyncio.to_thread(self._on_disk))
        hand.counts, hand.begun = {**hand.counts, "games": hand.kept}, 0.0
        self._ids, self.left = itertools.chain(sorted(hand.held), self._ids), self.left + len(hand.held)
        back, hand.held = len(hand.held), set()
        if self.left and not any(other.plays or other.ended for other in self._hands):  # ended: asked to stop
            out = hand.arguments["out"]
            kept = f"{self.done} of {self._total} games are kept in {out}: run again with --resume."
            raise WorkerDied(
                "every worker was killed before the games were done (SIGKILL; out of memory?). "
                f"{kept if out else 'Run again, with --out to keep games and with fewer --workers.'}"
            )
        if back:
            log.warning("worker %d was killed: the others play the %d games that it had", worker, back)
        if self._playing:
            await self._deal(workers)

    async def _deal(self, workers: Workers) -> None:
        """Games in equal shares, as many as fit, to those who have none coming."""
        idle = [worker for worker, hand in enumerate(self._hands) if hand.plays and (hand.dry or not hand.held)]
        for number, worker in enumerate(idle):
            share = math.ceil(self.left / (len(idle) - number))
            await self._give(worker, min(self._hands[worker].arguments["slots"], share), workers)

    async def _give(self, worker: int, games: int, workers: Workers) -> None:
        hand = self._hands[worker]
        if not hand.plays:  # it was asked to stop meanwhile
            return
        given = list(itertools.islice(self._ids, games))
        self.left -= len(given)
        hand.held.update(given)
        hand.dry = not self.left
        await _send(workers, worker, {"games": given, "more": not hand.dry})

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
            total=self._total,
            unit="games",
            before=self._before,
            begun=sum(hand.begun for hand in self._hands),
            counts={name: sum(hand.counts.get(name, 0) for hand in self._hands) for name in COUNTS},
            facts=facts | {name: fact for one in self._tallies.values() for name, fact in one.facts().items()},
            note=note,
            setup=setup,
        )


async def _send(workers: Workers, worker: int, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(GpuinferError):  # it is gone, and `follow` will hear of it
        await workers.send(worker, message)
