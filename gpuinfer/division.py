"""How one run is divided over many machines: the contract between a workload and `gpuinfer.cluster`.

A run has units, numbered from 0: games, rows of an input, groups of games. The process that was started by the user,
the coordinator, holds the run's `Division`: it reads the input, hands out ranges of units and keeps their records. Each
node runs `Workload.run_ranges` with a `RangeFeed`, from which it takes units and to which it gives their records.

What a unit's record holds depends on the run's seed and on the unit's number and items alone, never on the node or on
what else the node computes: ranges may be cut, repeated and reordered in any way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec

from gpuinfer.errors import UsageError

Interval = tuple[int, int]
"""Units from the first to before the second."""


class WorkRange(msgspec.Struct, frozen=True, array_like=True):
    """Units from `start` to before `stop`. `items`: one for each unit, what it is apart from its number, such as the
    row that is to be answered; empty where the number says all. `version`: of the weights that compute it, where they
    change during a run.
    """

    start: int
    stop: int
    items: tuple[bytes, ...] = ()
    version: str = ""

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> WorkRange:
        """The units from `start` to before `stop`, which are some of these."""
        items = self.items[start - self.start : stop - self.start]
        return WorkRange(start, stop, items, self.version)


class RangeFeed(ABC):
    """A node's side of a divided run: where it takes units and gives their records. Belongs to the event loop."""

    total: int | None = None  # units of the whole run; None while the coordinator does not know
    settings: Mapping[str, Any] = {}  # what the coordinator's `Division.settings` is

    @abstractmethod
    async def take(self, most: int) -> WorkRange | None:
        """Up to `most` units, at least one, all of one version: waits until there are some. None once there are no
        more for this node, or the run is to stop. A unit that was taken is not leased to another node unless this one
        is lost.
        """

    @abstractmethod
    def done(self, number: int, record: Any) -> None:
        """The record of a unit that was taken. Once all units of the range in which the coordinator gave it are done,
        `Workload.pack_records` makes bytes of their records, and these are sent.
        """

    @abstractmethod
    async def room(self) -> None:
        """Wait until records that were passed on have been sent, as far as so many wait that no more should come."""


class DivisionProgress(NamedTuple):
    """What a division knows of the run's progress in addition to the units of ranges that are kept."""

    before: int = 0  # units that an earlier run has done and that are in no range, as `open` did not return them
    done: int = 0  # units that the coordinator has done itself, such as rows that cannot be read; in no range either
    failed: int | None = None  # of all that this run has done, how many ended in an error; None: as the nodes count
    failure: str = ""  # what the first of them says


class Division(ABC):
    """The coordinator's side of a divided run. All methods but `open` are called after it, one at a time."""

    unit: ClassVar[str] = "rows"  # many of them, for people
    first: int = 0  # the lowest number of its units: of a part of a longer run it is set before `open`
    least: int = 1  # units that a range should have, where so many are left: fewer cost more than they bring
    arithmetic: str = ""  # `Backend.arithmetic` of the run's backend; set before `open`

    @property
    @abstractmethod
    def total(self) -> int | None:
        """Units of all ranges; None as long as the input's end has not been read."""

    @property
    def progress(self) -> DivisionProgress:
        """What counts beside the units of ranges. `total` covers none of these units."""
        return DivisionProgress()

    @property
    def settings(self) -> Mapping[str, Any]:
        """All that decides what a record is, as JSON: a node whose own are others (another version of the game's rules,
        other weights under the same name) is refused. The same as `Workload.deciding` says on the node.
        """
        return {}

    @property
    def folder(self) -> Path | None:
        """Where nodes that see it may write the bytes of ranges in files of their own (`.ranges` in it is theirs). None
        where all bytes come over the wire.
        """
        return None

    @property
    def open_until(self) -> int | None:
        """Units from this one on cannot be read yet, such as games of weights that are being trained; None: all can.
        Where it grows, `Coordinator.look_again` is called.
        """
        return None

    def weights(self, version: str) -> Path:
        """The file of the weights of this version, which ranges name. Raises `UsageError` where there are none."""
        raise UsageError(f"this run has no weights of version '{version}'. Let both ends run one version of gpuinfer.")

    @property
    def deadline_s(self) -> float:
        """Seconds that `close` may need, about: a run with a deadline stops so much earlier."""
        return 5.0

    @abstractmethod
    def open(self) -> Sequence[Interval]:
        """Claim input and output, in a thread. The units of which an earlier run has kept the records, ascending.

        Raises `UsageError` where they cannot be had, or the output belongs to a run of other settings.
        """

    def begin(self) -> None:  # noqa: B027
        """Start to read ahead, on the event loop, before the first `read`: a short input is divided evenly where its
        end is known by then.
        """

    @abstractmethod
    async def read(self, most: int) -> WorkRange | None:
        """The next units that are not kept, at most so many; None at the input's end. An empty range where none has
        come yet, or where too much waits for units that are leased: `read` waits for neither, as `keep` could not be
        called meanwhile.
        """

    @abstractmethod
    async def keep(self, work: WorkRange, records: bytes | Path) -> None:
        """Records of units of which none has been kept, as `Workload.pack_records` made them: on the disk when this
        returns, or passed to a thread that syncs in groups (then on the disk when `flush` returns). A file is this
        object's from now on: it moves or removes it.

        Raises `WorkError` when they cannot be written.
        """

    async def flush(self) -> None:  # noqa: B027
        """All that was kept is on the disk when this returns."""

    @abstractmethod
    async def close(self, complete: bool) -> None:
        """`complete`: all units are kept. Else another run will go on with what is there."""

    def facts(self) -> Mapping[str, float]:
        """For the report, next to what nodes count."""
        return {}


class NumberedDivision(Division):
    """Units that are nothing but numbers. `total` is fixed; `kept` is set by `open`."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._gaps: list[Interval] = [(0, total)] if total else []

    @property
    def total(self) -> int:
        return self._total

    def leave_out(self, kept: Iterable[Interval]) -> None:
        """Read no units of these intervals, which ascend. Raises `UsageError` for units past the total."""
        gaps, at = list[Interval](), 0
        for start, stop in kept:
            if stop > self._total:
                raise UsageError(
                    f"the output holds {self.unit} up to number {stop - 1} already, more than the {self._total} that "
                    f"are wanted. Ask for {stop} or more."
                )
            if start > at:
                gaps.append((at, start))
            at = max(at, stop)
        if at < self._total:
            gaps.append((at, self._total))
        self._gaps = gaps[::-1]

    async def read(self, most: int) -> WorkRange | None:
        if not self._gaps:
            return None
        start, stop = self._gaps.pop()
        if stop - start > most:
            self._gaps.append((start + most, stop))
            stop = start + most
        return WorkRange(start, stop)


def intervals_of(numbers: Iterable[int]) -> list[Interval]:
    """The maximal intervals of these numbers, which may come in any order; each once or more."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number <= found[-1][1]:
            found[-1][1] = max(found[-1][1], number + 1)
        else:
            found.append([number, number + 1])
    return [(start, stop) for start, stop in found]
