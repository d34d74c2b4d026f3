"""Counters that never fall, of replicas that come and go."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from gpuinfer.stats import DONE_BY_A_DEVICE, LANES, Snapshot, merge


class Lives:
    """What the replicas of a fleet have counted together, those included that have died or were removed.

    A replica counts from nothing again when it is started anew; each such life has a name of its own, such as its id
    and process id. The latest snapshot of a life stands for it. A life that has ended keeps its counts, and loses its
    levels: rows that wait, slots, memory. Lanes of one name are one lane.
    """

    def __init__(self) -> None:
        self._now: dict[Hashable, Snapshot] = {}
        self._past = Snapshot()

    def saw(self, life: Hashable, snapshot: Snapshot) -> None:
        """The latest that is known of a life."""
        self._now[life] = snapshot

    def ended(self, life: Hashable) -> None:
        """It will count no more. One that was never seen has nothing to leave."""
        if (last := self._now.pop(life, None)) is not None:
            self._past = _together([self._past, _left(last)])

    def only(self, lives: set[Hashable]) -> None:
        """All lives but these have ended."""
        for life in self._now.keys() - lives:
            self.ended(life)

    def total(self) -> Snapshot:
        """All of them as one."""
        return _together([*self._now.values(), self._past])


def _left(last: Snapshot) -> Snapshot:
    device = {what: last.device[what] for what in DONE_BY_A_DEVICE if what in last.device}
    models = {name: {**line, "waiting": 0} for name, line in last.models.items()}
    return replace(last, waiting=0, slots=0, rss_peak_mb=0.0, device=device, models=models)


def _together(parts: list[Snapshot]) -> Snapshot:
    lanes = LANES.in_turn([part.lanes for part in parts]) if LANES.in_turn is not None else ()
    return replace(merge(parts), lanes=lanes)
