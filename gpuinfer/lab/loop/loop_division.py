"""The games of all iterations of a loop as one divided run: which may be played, with which weights, and their records.

Unit (i - 1) * games + k is game k of iteration i. It may be played once weights are there that are at most
`max_staleness` iterations older than those of iteration i - 1: with 0, an iteration's games are all of its weights.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuinfer.division import Division, Interval, WorkRange
from gpuinfer.errors import UsageError
from gpuinfer.host.files import put_whole
from gpuinfer.lab.loop.loop_runner import LoopPlan, done_report
from gpuinfer.models.record_shards import read_shard

LEAST_GAMES = 4  # of a range


def version_of(iteration: int) -> str:
    """The version of the weights that an iteration has come to; 0: the first generation's."""
    return f"{iteration:06d}"


def iteration_of(version: str) -> int:
    """Raises `UsageError` for what is no version."""
    if not version.isdecimal():
        raise UsageError(f"'{version}' is no version of a loop's weights. Let both ends run one version of gpuinfer.")
    return int(version)


@dataclass
class IterationGames:
    """The games of one iteration. `gaps`: those that have not been read, ascending."""

    gaps: list[Interval]
    kept: int
    records: Division | None = None  # while its folder is open
    began: float | None = None  # when the first game was leased


class LoopDivision(Division):
    """`records_of` gives the division that keeps the records of an iteration in its folder; `settings`: what decides a
    game, but for weights. `published`: the newest iteration whose weights are there. `on_played` is called on the event
    loop with each iteration whose games are all kept.
    """

    unit = "games"
    least = LEAST_GAMES

    def __init__(
        self,
        plan: LoopPlan,
        records_of: Callable[[int], Division],
        settings: Callable[[], Mapping[str, Any]],
        max_staleness: int,
        on_played: Callable[[int], None],
    ) -> None:
        self._plan, self._records_of, self._settings_of = plan, records_of, settings
        self._max_staleness, self._on_played = max_staleness, on_played
        self._settings: Mapping[str, Any] = {}
        self._iterations: dict[int, IterationGames] = {}
        self.published = 0

    @property
    def total(self) -> int:
        return self._plan.iterations * self._plan.games

    @property
    def settings(self) -> Mapping[str, Any]:
        return self._settings

    @property
    def open_until(self) -> int:
        return min(self.total, (self.published + 1 + self._max_staleness) * self._plan.games)

    def weights(self, version: str) -> Path:
        return self._plan.weights(self._plan.playing(iteration_of(version)))

    def open(self) -> Sequence[Interval]:
        self._settings = dict(self._settings_of())
        kept = list[Interval]()
        for iteration in range(1, self._plan.iterations + 1):
            start, stop = (iteration - 1) * self._plan.games, iteration * self._plan.games
            if done_report(self._report(iteration)) is not None:
                found: Sequence[Interval] = [(start, stop)]
                self._iterations[iteration] = IterationGames([], stop - start)
            else:
                games = self._iterations[iteration] = IterationGames([(start, stop)], 0)
                found = ()
                if self._plan.of(iteration).joinpath("games").is_dir():
                    found = self._open_records(iteration, games).open()
                    games.gaps = _without((start, stop), found)
                    games.kept = sum(end - begin for begin, end in found)
            kept += found
        return kept

    def _open_records(self, iteration: int, games: IterationGames) -> Division:
        self._plan.of(iteration).mkdir(parents=True, exist_ok=True)
        games.records = self._records_of(iteration)
        return games.records

    def _report(self, iteration: int) -> Path:
        return self._plan.of(iteration) / "games.json"

    async def read(self, most: int) -> WorkRange | None:
        left = next((one for one, games in self._iterations.items() if games.gaps), None)
        if left is None:
            return None
        games = self._iterations[left]
        start, stop = games.gaps[0]
        if start >= self.open_until:
            return WorkRange(start, start)
        games.began = games.began or time.monotonic()
        end = min(stop, start + most)
        games.gaps[:1] = [(end, stop)] if end < stop else []
        return WorkRange(start, end, version=version_of(min(self.published, left - 1)))

    async def keep(self, work: WorkRange, records: bytes | Path) -> None:
        iteration = work.start // self._plan.games + 1
        games = self._iterations[iteration]
        if games.records is None:
            await asyncio.to_thread(self._open_records(iteration, games).open)
        assert games.records is not None
        await games.records.keep(work, records)
        games.kept += len(work)
        if games.kept == self._plan.games:
            await self._finish(iteration, games)

    async def finish_kept(self) -> None:
        """Report iterations of which a run that ended too early has kept all games."""
        for iteration, games in self._iterations.items():
            if games.records is not None and games.kept == self._plan.games:
                await self._finish(iteration, games)

    async def _finish(self, iteration: int, games: IterationGames) -> None:
        records, games.records = games.records, None
        if records is not None:
            await records.close(True)
        seconds = time.monotonic() - games.began if games.began is not None else 0.0
        await asyncio.to_thread(self._write_report, iteration, seconds, dict(records.facts()) if records else {})
        self._on_played(iteration)

    def _write_report(self, iteration: int, seconds: float, facts: Mapping[str, float]) -> None:
        behind = staleness_of(self._plan, iteration)
        report = {
            "schema": "gpuinfer.loop-games/1",
            "status": "done",
            "setup_s": 0.0,
            "wall_s": seconds,
            "progress": {"done": self._plan.games},
            "throughput": {"games_per_min": 60 * self._plan.games / seconds if seconds else None},
            "facts": dict(facts),
            "staleness": {str(versions): count for versions, count in sorted(behind.items())},
            "environment": None,
        }
        put_whole(self._report(iteration), lambda file: file.write(json.dumps(report, indent=2).encode()))

    async def flush(self) -> None:
        for games in self._iterations.values():
            if games.records is not None:
                await games.records.flush()

    async def close(self, complete: bool) -> None:
        for games in self._iterations.values():
            records, games.records = games.records, None
            if records is not None:
                await records.close(False)


def staleness_of(plan: LoopPlan, iteration: int) -> Counter[int]:
    """Games of an iteration, by how many iterations their weights were older than the newest possible."""
    found: Counter[int] = Counter()
    for shard in sorted((plan.of(iteration) / "games").glob("*.npz")):
        for version in read_shard(shard, ["version"])["version"]:
            found[iteration - 1 - iteration_of(str(version))] += 1
    return found


def _without(whole: Interval, found: Sequence[Interval]) -> list[Interval]:
    """The parts of an interval that are not among these, which ascend."""
    at, end = whole
    gaps = list[Interval]()
    for start, stop in found:
        if start > at:
            gaps.append((at, start))
        at = max(at, stop)
    return [*gaps, (at, end)] if at < end else gaps
