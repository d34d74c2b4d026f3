"""How the units of a run are divided among its nodes, when a node is late, hung or lost, and what it is granted."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuinfer.division import WorkRange


@dataclass(frozen=True, slots=True)
class RangePolicy:
    """How a run is divided. Times in seconds."""

    target_s: float = 10.0  # of a node's work that a range should last
    least: int = 1  # units that a range should have
    most: int = 1_000_000  # units that a node gets at once
    held_bytes: float = 400e6  # of items that nodes have: ranges last for less where these would be more
    record_bytes: float = 32e6  # of a range's records, at most, as far as those of earlier ranges tell
    block: int = 1  # ranges are cut at multiples of it, where that leaves any
    exchange_s: float = 1.0  # between two exchanges of a node
    guided: float = 2.0  # near the end a range is a node's share of what is left, divided by this
    nodes: int = 1  # how many there will be: the first to join leave some for the others
    backup: bool = True  # near the end idle nodes get copies of what silent and late nodes have begun
    backup_times: float = 2.0  # late: no unit for so many times as long as one takes
    silent_s: float = 5.0  # without a word, after which a node's ranges are leased to idle ones as well
    lost_s: float = 30.0  # without a word, after which a node counts as lost
    hung_times: float = 20.0  # hung: no unit for so many times as long as one takes,
    hung_least_s: float = 300.0  # and for so long at least
    first_unit_s: float = 1800.0  # so long may a node's first unit take


@dataclass(frozen=True, slots=True)
class Grant:
    """What a node is granted in an exchange."""

    ranges: list[WorkRange] = field(default_factory=list)  # leased to it already: released by others, or copies
    fresh: int = 0  # units to be read from the Division and leased to it
    release: int = 0  # units that it should give back, of those that it has not begun
