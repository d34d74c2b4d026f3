"""What the supervisor and its router processes exchange: the configuration at the start, and the roster of members."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

from gpuinfer.fleet.router.request_trace import TraceSampling
from gpuinfer.http.parser import REFUSALS

CONTROL_KEY_HEADER = "X-Gpuinfer-Control-Key"  # proves to the control application that the router speaks, and no client


class RouterConfig(Struct, frozen=True):
    """Sizes in bytes, times in seconds.

    Requests for /v1/* and `http_message.OF_MODELS` go to replicas, but for those that change weights (`CHANGES`);
    these and all others to the control application on the Unix socket `control`:
    with the client's own Authorization, and with `control_key` under `CONTROL_KEY_HEADER`.
    """

    host: str
    port: int  # 0: a free one
    control: str
    control_key: str
    processes: int = 1
    policy: str = "least-loaded"
    policy_options: dict[str, Any] = field(default_factory=dict)
    api_keys: tuple[str, ...] = ()  # lines of a key file; none: all routes of models are open
    hosts: tuple[str, ...] = ()  # names that a Host or Origin may have, without ports; none: any
    origins: tuple[str, ...] = ()  # of other servers' pages that may ask; "*": all
    tls: tuple[str, str] | None = None  # files of a certificate and its key
    log: Literal["plain", "json"] | None = None  # requests, on standard error
    tracing: TraceSampling | None = None  # which requests are traced; None: none
    hands_over_log: bool = False  # log records, to the supervisor, which exports them

    queue: Literal["replica", "global"] = "replica"  # where requests wait: at the replica chosen, or here for room
    max_inputs: int | None = None  # requests under way at one replica; None: no bound, with a global queue its room
    queue_limit: int = 4096  # requests that wait here, at most

    timeout_s: float = 300.0  # to the first byte of an answer, and between two pieces of it
    connect_s: float = 2.0
    wait_s: float = 15.0  # of a request for a replica, while none can take it but one may soon
    slow_start_s: float = 10.0
    retry_budget: float = 0.2  # of all requests, as many may be repeated because of an answer that says to try again
    attempts: int = 8  # of one request, whatever happens

    breaker_failures: int = 3  # in a row open a replica's breaker
    breaker_share: float = 0.5  # of the latest `breaker_window` answers that were errors opens it, too
    breaker_window: int = 20
    breaker_open_s: float = 1.0  # before one request is let through to try it; doubles with each that fails
    breaker_longest_s: float = 15.0

    head_bytes: int = 32 << 10
    body_bytes: int = 64 << 20
    bodies_bytes: int = 1 << 30  # all that one process keeps of requests
    connections: int = 8192  # of clients, to one process
    refusals: int = REFUSALS  # connections beyond those that are told so; still more are closed at once
    head_s: float = 10.0
    body_s: float = 60.0  # between two pieces of it
    idle_s: float = 75.0
    write_s: float = 60.0  # of a client that takes nothing
    write_bytes: int = 256 << 10  # written and not yet taken by a client: above it no more is read from its replica
    kept_bytes: int = 4 << 20  # of a stream, to take it up elsewhere; one that is longer cannot be
    whole_bytes: int = 256 << 10  # an answer of a known length up to this one goes out only when it is whole


State = Literal["starting", "up", "draining", "down"]


class FleetMember(Struct, frozen=True):
    """One replica. Whatever takes the place of one that is gone may keep its id, but no other one gets it."""

    id: int
    host: str
    port: int
    state: State  # only those up get new requests; what is under way at one that drains comes to its end
    ours: bool = True  # `gpuinfer serve --behind-router`: a stream that breaks off there can be taken up elsewhere
    speed: float = 1.0  # beside the others': one of 2.0 gets twice the requests
    since: float = 0.0  # `time.time()` when it came up: it is given more little by little (`slow_start_s`)
    key: str | None = None  # its bearer token
    room: int | None = None  # rows that it computes at once, where it says so


class Roster(Struct, frozen=True):
    """All members at once. A version counts up, so that an older roster never replaces a newer one."""

    version: int
    members: tuple[FleetMember, ...]
