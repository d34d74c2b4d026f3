"""Who is in the fleet: what the supervisor tells the router each time that something about it changes."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

State = Literal["starting", "up", "draining", "down"]


class Member(Struct, frozen=True):
    """One replica. Whatever takes the place of one that is gone may keep its id, but no other one gets it."""

    id: int
    host: str
    port: int
    state: State  # only those up get new requests; what is under way at one that drains comes to its end
    ours: bool = True  # `gpuinfer serve --behind-router`: a stream that breaks off there can be taken up elsewhere
    speed: float = 1.0  # beside the others': one of 2.0 gets twice the requests
    since: float = 0.0  # `time.time()` when it came up: it is given more little by little (`slow_start_s`)
    key: str | None = None  # its bearer token


class Roster(Struct, frozen=True):
    """All members at once. A version counts up, so that an older roster never replaces a newer one."""

    version: int
    members: tuple[Member, ...]
