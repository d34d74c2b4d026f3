"""What has become of the units and ranges of a run so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counts:
    """Units, by what has become of them."""

    total: int | None  # None while the input's end has not been read
    kept: int
    keeping: int  # whose records are being written
    leased: int  # with nodes, each counted once
    pending: int  # released, and with no node
    copied: int  # with two nodes
    duplicates: int  # units of which records came when there were some already


@dataclass(frozen=True, slots=True)
class RangeCounts:
    """Ranges, by what has become of them."""

    kept: int  # of which all records are kept
    held_s: float  # from the lease of each of these until it was kept, together
    returned: int  # that came back from nodes that left or were lost
    stolen: int  # of which a node released units for others
    copied: int  # leased to a second node as well
