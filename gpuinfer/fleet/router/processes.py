"""The router as its owner sees it: some processes, told who is in the fleet, and started anew when one dies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gpuinfer.fleet.roster import Roster
from gpuinfer.fleet.router.config import RouterConfig

Breaker = Literal["closed", "half-open", "open"]


@dataclass(frozen=True, slots=True)
class MemberCounters:
    """What became of one member's requests, in all router processes together."""

    requests: int = 0  # attempts that were sent there
    errors: int = 0  # of these, failures of its own: refused, reset, timed out, broken, or answered with 500 and above
    in_flight: int = 0
    retried: int = 0  # went elsewhere after it
    resumed: int = 0  # streams that broke off there and went on elsewhere
    breaker: Breaker = "closed"


@dataclass(frozen=True, slots=True)
class RouterCounters:
    """What became of clients' requests, in all router processes together."""

    connections: int = 0  # open now
    requests: int = 0
    unrouted: int = 0  # answered 503, since no replica could take them
    timeouts: int = 0
    client_gone: int = 0
    broken_off: int = 0  # answers that had begun and could not be brought to their end
    restarts: int = 0  # of router processes


class Routers:
    """Router processes on one port.

    `on_event` is called on the loop with `{"event": "failed", "member": id, "kind": "refused" | "reset" | "timeout" |
    "broken"}` when a replica failed a request. Everything here is called on the event loop that ran `start`.
    """

    def __init__(self, config: RouterConfig, on_event: Callable[[Mapping[str, Any]], None]) -> None:
        self.config = config

    async def start(self) -> int:
        """Start them, and return the port. Raises `UsageError` when it is in use, `WorkError` when none comes up."""
        raise NotImplementedError

    def update(self, roster: Roster) -> None:
        """Tell all of them, those that start later too. An older version than the last one changes nothing."""
        raise NotImplementedError

    def counters(self) -> Mapping[int, MemberCounters]:
        """By member id, of all that were ever in a roster and are not long gone."""
        raise NotImplementedError

    def totals(self) -> RouterCounters:
        raise NotImplementedError

    async def drain(self, within_s: float) -> bool:
        """Take no new connections, answer what is under way. Whether all of it was answered in time."""
        raise NotImplementedError

    async def close(self) -> None:
        """End the processes, whatever they do."""
        raise NotImplementedError
