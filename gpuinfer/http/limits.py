"""What a server takes from strangers: every size and every wait has a bound."""

from __future__ import annotations

from dataclasses import dataclass, replace

REFUSALS = 1024
OWN = 16  # descriptors for anything but connections
SPARE = 64  # connections beyond the limit that are still heard, so that probes come through
CROWDED_S = 2.0  # for one of these to ask


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Sizes in bytes, times in seconds."""

    head_bytes: int = 32 << 10  # a request's line and headers
    line_bytes: int = 16 << 10  # one line of them
    headers: int = 100
    body_bytes: int = 64 << 20
    bodies_bytes: int = 1 << 30  # all bodies of all connections together, as far as they have come
    connections: int = 8192
    refusals: int = REFUSALS  # connections beyond those that are told so; still more are closed at once
    head_s: float = 10.0  # from a head's first byte to its last, and from the connection to its first request
    body_s: float = 60.0  # from a body's first byte to its last
    idle_s: float = 75.0  # between two requests of one connection
    write_s: float = 60.0  # a client that reads nothing is cut after it

    def within(self, descriptors: int) -> HttpLimits:
        """No more connections than so many descriptors allow."""
        connections, refusals = fitting(self.connections, descriptors)
        return replace(self, connections=connections, refusals=refusals)


def fitting(connections: int, descriptors: int, each: int = 1) -> tuple[int, int]:
    """How many connections can be had at once, each with so many descriptors, and how many more can be refused.

    A quarter is kept back for refusals: a process without a descriptor left cannot say no, and the system resets who
    connects.
    """
    if connections * each + REFUSALS + OWN <= descriptors:
        return connections, REFUSALS
    refusals = min(REFUSALS, descriptors // 4)
    return max(1, min(connections, (descriptors - refusals - OWN) // each)), refusals


def heard(refusals: int) -> int:
    """How many connections beyond the limit may still ask, where so many can be refused."""
    return min(SPARE, refusals // 2)


def fewer(wanted: int, connections: int) -> str:
    """What to say where only so many fit."""
    return (
        f"{connections:,} connections at once in place of {wanted:,}, since this process may open few files. "
        "Raise the limit: ulimit -n 65536."
    )
