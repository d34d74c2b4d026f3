"""A feed of ranges for tests of workloads: what a node is given, without a coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpuinfer.division import RangeFeed, WorkRange


class ListFeed(RangeFeed):
    """Gives these ranges in turn; `sent` has the bytes of each whose units are all done, by (start, stop)."""

    def __init__(
        self,
        ranges: Sequence[WorkRange],
        pack: Callable[[Sequence[Any]], bytes],
        settings: Mapping[str, Any] | None = None,
        total: int | None = None,
    ) -> None:
        self.total, self.settings = total, settings or {}
        self.records: dict[int, Any] = {}
        self.sent: dict[tuple[int, int], bytes] = {}
        self._ranges, self._left, self._pack = list(ranges), list(ranges), pack

    async def take(self, most: int) -> WorkRange | None:
        await asyncio.sleep(0)
        if not self._left:
            return None
        first = self._left.pop(0)
        if len(first) > most:
            self._left.insert(0, first.part(first.start + most, first.stop))
            first = first.part(first.start, first.start + most)
        return first

    def done(self, number: int, record: Any) -> None:
        assert number not in self.records, f"unit {number} is done twice"
        self.records[number] = record
        for one in self._ranges:
            if one.start <= number < one.stop and all(unit in self.records for unit in range(one.start, one.stop)):
                self.sent[one.start, one.stop] = self._pack([self.records[unit] for unit in range(one.start, one.stop)])

    async def room(self) -> None:
        await asyncio.sleep(0)
