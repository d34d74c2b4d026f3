"""What a policy sees, and what it says. A policy reads no clock and does no I/O: router and simulator run the same."""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple


class Load:
    """One replica as it stands now. Whoever asks the policy keeps the numbers up to date.

    `in_flight`: rows, or tokens, that it has now; `speed`: relative to the others, above 0; a slow start lowers it.
    `member` is its number in the fleet, and stays its own.
    """

    __slots__ = ("in_flight", "mark", "member", "speed")

    def __init__(self, member: int, in_flight: float = 0, speed: float = 1.0) -> None:
        self.member, self.in_flight, self.speed = member, in_flight, speed
        self.mark = hashed(b"%d" % member) | 1  # what `sticky` knows it by, in every process and on every machine

    def __repr__(self) -> str:
        return f"Load({self.member}, in_flight={self.in_flight:g}, speed={self.speed:g})"


@dataclass(slots=True)
class Asking:
    """A request. `affinity` is what its like share: a session, a user, or a hash of how the prompt begins."""

    rows: float = 1.0
    affinity: bytes | None = None


class Choice(NamedTuple):
    """`why` is short, such as `least-loaded 3<5`: answers carry it in a header, printable ASCII."""

    load: Load
    why: str


class Policy(ABC):
    """Chooses. A few microseconds each time: it stands in the way of every request."""

    needs_affinity: bool = False  # whether it is worth finding out
    needs_load: bool = True  # whether it looks at `in_flight` at all
    OPTIONS: ClassVar[Mapping[str, float]] = {}  # with their defaults; none may be below 0

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    @abstractmethod
    def choose(self, loads: Sequence[Load], asking: Asking) -> Choice:
        """One of `loads`, which are never empty, in any order, and need not be those of the time before."""


def hashed(what: bytes) -> int:
    """64 bits that are the same in every process."""
    return int.from_bytes(hashlib.blake2b(what, digest_size=8).digest(), "little")
