"""Self-play that is divided over nodes, on the side of the coordinator: the folder of records and what is counted."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpuinfer.division import Interval, NumberedDivision, WorkRange, intervals_of
from gpuinfer.errors import WorkError
from gpuinfer.models.merged_records import MergedRecords
from gpuinfer.models.positions import RANGES, PositionsFolder, Symmetries
from gpuinfer.models.record_shards import UNREADABLE, mapped_arrays, unpack_shard
from gpuinfer.workloads.selfplay.game_records import CountedOfGames

LEAST_GAMES = 4  # of a range: each is a file and a message


class SelfPlayDivision(NumberedDivision):
    """Games. The shards of ranges are merged as they come (`models/merged_records.py`)."""

    unit = "games"
    least = LEAST_GAMES

    def __init__(
        self,
        games: int,
        settings: Callable[[], Mapping[str, Any]],
        counted: Sequence[CountedOfGames],
        out: Path | None,
        resume: bool,
        symmetries: Symmetries | None,
    ) -> None:
        """`settings`: all that decides how a game goes; it reads files. `out`: None keeps no records."""
        super().__init__(games)
        self._settings_of, self._settings = settings, dict[str, Any]()
        self._counted, self._resume, self._symmetries = counted, resume, symmetries
        self._folder = PositionsFolder(out) if out is not None else None
        self._merged: MergedRecords | None = None
        self._kept = 0  # games

    @property
    def settings(self) -> Mapping[str, Any]:
        return self._settings

    @property
    def folder(self) -> Path | None:
        return None if self._folder is None else self._folder.path

    def open(self) -> Sequence[Interval]:
        self._settings = dict(self._settings_of())
        if self._folder is None:
            return ()
        kept = intervals_of(self._folder.open(self._settings, self._resume))
        self.leave_out(kept)
        if self._symmetries is not None:
            self._folder.declare(self._symmetries)
        for counted in self._counted:
            counted.add_recorded(self._folder)
        shutil.rmtree(self._folder.path / RANGES, ignore_errors=True)  # an earlier run's, of which nothing counts
        self._kept = sum(stop - start for start, stop in kept)
        self._merged = MergedRecords(self._folder, self.first)
        self._merged.merge()
        return kept

    async def keep(self, work: WorkRange, records: bytes | Path) -> None:
        await asyncio.to_thread(self._keep, work, records)
        self._kept += len(work)

    def _keep(self, work: WorkRange, records: bytes | Path) -> None:
        if self._folder is None or self._merged is None:
            if records:
                self._count(_read(work, records))
            return
        self._count(_read(work, records))
        self._merged.add(self._folder.set_apart(records), check=False)
        self._merged.merge()

    def _count(self, games: Mapping[str, np.ndarray]) -> None:
        for counted in self._counted:
            counted.add(games)

    async def close(self, complete: bool) -> None:
        if self._folder is not None:
            await asyncio.to_thread(self._close, self._folder)

    def _close(self, folder: PositionsFolder) -> None:
        try:
            if self._merged is not None:
                self._merged.close()
            shutil.rmtree(folder.path / RANGES, ignore_errors=True)
        finally:
            folder.close(self._kept)

    def facts(self) -> Mapping[str, float]:
        return {name: fact for counted in self._counted for name, fact in counted.tally.facts().items()}


def _read(work: WorkRange, records: bytes | Path) -> Mapping[str, np.ndarray]:
    """The arrays of a range, which is compared with its checksums. Raises `WorkError`."""
    try:
        games = mapped_arrays(records) if isinstance(records, Path) else unpack_shard(records)
        if games["finished"].tolist() != list(range(work.start, work.stop)):
            raise ValueError("they are of other games")
    except UNREADABLE as error:
        raise WorkError(
            f"the records of games {work.start} to {work.stop - 1} came damaged ({error}). What was kept before is "
            "whole: look at that node's disk and memory, then run again with --resume."
        ) from error
    return games
