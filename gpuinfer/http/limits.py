"""What a server takes from strangers: every size and every wait has a bound."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Sizes in bytes, times in seconds."""

    head_bytes: int = 32 << 10  # a request's line and headers
    line_bytes: int = 16 << 10  # one line of them
    headers: int = 100
    body_bytes: int = 64 << 20
    bodies_bytes: int = 1 << 30  # all bodies of all connections together, as far as they have come
    connections: int = 8192
    head_s: float = 10.0  # from a head's first byte to its last, and from the connection to its first request
    body_s: float = 60.0  # from a body's first byte to its last
    idle_s: float = 75.0  # between two requests of one connection
    write_s: float = 60.0  # a client that reads nothing is cut after it
