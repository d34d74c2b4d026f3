"""A workload that writes its numbers down, each in a line: as a third party could divide one of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from gpuinfer import api
from gpuinfer.api import Infer, Progress, Workload
from gpuinfer.division import Interval, NumberedDivision, RangeFeed, WorkRange
from gpuinfer.errors import WorkError

ENTRY_POINTS = "[gpuinfer.workloads]\nnumbers = numbers_workload:Numbers\n"
METADATA = "Metadata-Version: 2.1\nName: numbers-workload\nVersion: 0.1\n"


def install(folder: Path) -> Path:
    """Put this package into the folder; returns what goes on the path."""
    info = folder / "numbers_workload-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "numbers_workload.py").write_text(Path(__file__).read_text())
    return folder


class NumbersDivision(NumberedDivision):
    """A part of the file for each range; all of it once it is complete. `full_at`: parts that the disk has room for."""

    unit = "numbers"

    def __init__(
        self, total: int, out: Path, shared: bool = True, full_at: int | None = None, keep_s: float = 0.0
    ) -> None:
        super().__init__(total)
        self._keep_s = keep_s
        self.out, self._shared, self._full_at = out, shared, full_at
        self.kept: list[Interval] = []
        self.ways: list[str] = []  # how each came

    @property
    def folder(self) -> Path | None:
        return self.out if self._shared else None

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"multiplied_by": 1}

    def open(self) -> Sequence[Interval]:
        self.out.mkdir(exist_ok=True)
        found = sorted((int(first), int(last)) for first, last in (one.stem.split("-") for one in self.parts()))
        self.leave_out(found)
        self.kept = [*found]
        return found

    def parts(self) -> list[Path]:
        return sorted(self.out.glob("*.part"))

    async def keep(self, work: WorkRange, records: bytes | Path) -> None:
        if len(self.kept) == self._full_at:
            raise WorkError("the disk is full. Free some space, then run again with --resume.")
        await asyncio.sleep(self._keep_s)
        place = self.out / f"{work.start:09d}-{work.stop:09d}.part"
        self.ways.append("wire" if isinstance(records, bytes) else "folder")
        part = place.with_suffix(".tmp")
        if isinstance(records, bytes):
            part.write_bytes(records)
        else:
            os.rename(records, part)
        os.rename(part, place)
        self.kept.append((work.start, work.stop))

    async def close(self, complete: bool) -> None:
        if complete:
            (self.out / "all.txt").write_bytes(b"".join(one.read_bytes() for one in self.parts()))


class Numbers(Workload):
    """Writes numbers down."""

    class Options(api.Options):
        total: int = Field(1000, description="how many")
        seconds: float = Field(0.01, description="that each takes")
        parallel: int = Field(8, description="at once")
        multiplied_by: int = Field(1, description="what a node writes")
        fails_on: str = Field("", description="a node whose number is here fails")
        out: Path = Field(Path("numbers"), description="folder")
        resume: bool = Field(False, description="go on")
        keep_s: float = Field(0.0, description="that the folder needs for a range")
        shared: bool = Field(True, description="whether nodes may write to the folder")

    goes_on_by, writes_to = ("resume",), ("out",)

    @property
    def asks(self) -> bool:
        return False

    def division(self) -> NumbersDivision:
        own = self.options
        return NumbersDivision(own.total, own.out, own.shared, keep_s=own.keep_s)

    def deciding(self, arithmetic: str) -> Mapping[str, Any]:
        return {"multiplied_by": self.options.multiplied_by}

    async def run(self, infer: Infer) -> AsyncIterator[Progress]:
        yield Progress(self.options.total, self.options.total, "numbers")

    async def run_ranges(self, infer: Infer, feed: RangeFeed) -> AsyncIterator[Progress]:
        done = 0

        async def write_down() -> None:
            nonlocal done
            while (work := await feed.take(1)) is not None:
                await asyncio.sleep(self.options.seconds)
                feed.done(work.start, b"%d\n" % work.start)
                done += 1
                await feed.room()

        tasks = {asyncio.create_task(write_down()) for _ in range(self.options.parallel)}
        yield Progress(0, None, "numbers")
        while tasks and not infer.stopping.is_set():
            ended, tasks = await asyncio.wait(tasks, timeout=0.1)
            for one in ended:
                one.result()
            yield Progress(done, None, "numbers", counts={"numbers": done})
        for one in tasks:
            one.cancel()
        yield Progress(done, None, "numbers", counts={"numbers": done})
