"""Rollouts over many machines: the coordinator keeps the record, nodes play groups.

Groups are written as they come back, which is in any order, as one machine writes them as they end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gpuinfer.division import Interval, NumberedDivision, RangeFeed, WorkRange, intervals_of
from gpuinfer.errors import WorkError
from gpuinfer.rollouts.concurrency import ConcurrencyController, GroupFeed
from gpuinfer.rollouts.files import Writer, encode_group
from gpuinfer.rollouts.record import Group

log = logging.getLogger(__name__)

FINISH_S = 5.0  # for groups that are under way when a node is to stop


class _Numbered(msgspec.Struct):
    number: int


_number_of = msgspec.json.Decoder(_Numbered).decode


def pack_groups(records: Sequence[Group]) -> bytes:
    """The bytes of a range: a line for each group. Raises `WorkError` for what no form of file holds."""
    return b"".join(encode_group(group) for group in records)


class RolloutsDivision(NumberedDivision):
    """The coordinator's side. `settings_of` reads all that decides a record, for `Backend.arithmetic`; `open_writer`
    claims the record's folder for them.
    """

    unit = "groups"

    def __init__(
        self,
        groups: int,
        settings_of: Callable[[str], Mapping[str, Any]],
        open_writer: Callable[[Mapping[str, Any]], Writer] | None,
        out: Path | None,
    ) -> None:
        super().__init__(groups)
        self._settings_of, self._open_writer, self._out = settings_of, open_writer, out
        self._settings: Mapping[str, Any] = {}
        self._writer: Writer | None = None

    @property
    def settings(self) -> Mapping[str, Any]:
        return self._settings

    @property
    def folder(self) -> Path | None:
        return self._out

    def open(self) -> Sequence[Interval]:
        self._settings = self._settings_of(self.arithmetic)
        if self._open_writer is None:
            return ()
        self._writer = self._open_writer(self._settings)
        kept = intervals_of(number for number in self._writer.done if number < self.total)
        self.leave_out(kept)
        return kept

    async def keep(self, work: WorkRange, records: bytes | Path) -> None:
        if isinstance(records, Path):
            path, records = records, await asyncio.to_thread(records.read_bytes)
            path.unlink()
        lines = records.splitlines(keepends=True)
        try:
            numbers = [_number_of(line).number for line in lines]
        except msgspec.DecodeError as error:
            raise WorkError(f"a node sent groups that cannot be read ({error}). Let all run one version.") from error
        if numbers != list(range(work.start, work.stop)):
            raise WorkError(
                f"a node sent other groups than {work.start} to {work.stop - 1}. Let all machines run one version."
            )
        if self._writer is not None:
            for number, line in zip(numbers, lines, strict=True):
                await self._writer.add_line(number, line)

    async def flush(self) -> None:
        if self._writer is not None:
            await self._writer.flush()

    async def close(self, complete: bool) -> None:
        if self._writer is None:
            return
        await self._writer.close()
        if not complete:
            log.warning("stopped; what was played is in %s. Run it again with --resume to go on.", self._out)


class FeedKeeper:
    """Groups that a node has played go to its feed."""

    def __init__(self, feed: RangeFeed) -> None:
        self._feed = feed
        self.done = frozenset[int]()

    async def add(self, group: Group) -> None:
        self._feed.done(group.number, group)
        await self._feed.room()

    async def flush(self) -> None:
        return


class RangeGroupFeed(GroupFeed):
    """Groups of a node: one is taken once it can be begun, until there are no more or `stopping` is set."""

    def __init__(
        self, feed: RangeFeed, controller: ConcurrencyController, limit: int | None, stopping: asyncio.Event
    ) -> None:
        super().__init__((), controller, limit)
        self._feed, self._stopping = feed, stopping

    async def numbers(self) -> AsyncIterator[int]:
        stop = asyncio.create_task(self._stopping.wait())
        try:
            while True:
                await self.room()
                taking = asyncio.create_task(self._feed.take(1))
                try:
                    await asyncio.wait({taking, stop}, return_when=asyncio.FIRST_COMPLETED)
                    work = taking.result() if taking.done() else None
                finally:
                    taking.cancel()
                if work is None:
                    return
                yield work.start
        finally:
            stop.cancel()


async def set_late(stopping: asyncio.Event, late: asyncio.Event) -> None:
    """Set `late` when `stopping` has been set for `FINISH_S`."""
    await stopping.wait()
    await asyncio.sleep(FINISH_S)
    late.set()
