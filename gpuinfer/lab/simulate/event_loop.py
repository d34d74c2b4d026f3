"""The event loop of a simulation: arrivals and ends of batches in the order of their times, a route to a replica for
each request, and a dispatch after each instant. The routing policies are those of the real router.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from gpuinfer.api import Limits, Request, Strategy
from gpuinfer.backends.service_model import ServiceModel
from gpuinfer.config.blame import WarnOnce
from gpuinfer.engine.arrivals import Arrivals, ClosedLoop, Offer
from gpuinfer.engine.core import Journal
from gpuinfer.errors import UsageError
from gpuinfer.fleet.routing_policies import DEFAULT_POLICY
from gpuinfer.lab.simulate.outcome import SimulationOutcome
from gpuinfer.lab.simulate.simulated_replica import Running, SimulatedReplica
from gpuinfer.lab.simulate.simulated_router import RoutingSetup, SimulatedRouter, as_request
from gpuinfer.stats import ClassCount, Lane, Snapshot, merge_snapshots


class ArrivalFeed(Protocol):
    """`next_at` is when the next request arrives, inf when there is none; `taken` how many have been."""

    next_at: float
    taken: int

    def take(self) -> Offer:
        """The next request. Only when there is one."""
        ...


class OpenFeed:
    """At most `most` requests, none after `until` seconds."""

    __slots__ = ("_asks", "_most", "_next", "_until", "next_at", "taken")

    def __init__(self, arrivals: Arrivals, dice: random.Random, most: float, until: float) -> None:
        self._asks, self._most, self._until = arrivals.asks(dice), most, until
        self._next: Offer | None = None
        self.taken, self.next_at = 0, math.inf
        self._look()

    def take(self) -> Offer:
        ask = self._next
        assert ask is not None
        self.taken += 1
        self._look()
        return ask

    def _look(self) -> None:
        self._next = next(self._asks, None) if self.taken < self._most else None
        self.next_at = math.inf if self._next is None or self._next.at > self._until else self._next.at


class ClosedFeed:
    """The same of clients that ask again once they are answered; `clients` are those that ask at all."""

    __slots__ = (
        *("_dice", "_draw", "_due", "_left", "_load", "_numbers", "_thinks_until", "_until"),
        *("clients", "next_at", "taken"),
    )

    def __init__(self, load: ClosedLoop, dice: random.Random, most: float, until: float) -> None:
        self._load, self._dice, self._until, self._left = load, dice, until, most
        self._draw = load.mix.draw(dice)
        self._due: list[tuple[float, int, Hashable]] = []  # a heap: when, a number for ties, the client
        self._numbers = itertools.count()
        self.taken, self.next_at = 0, math.inf
        self._thinks_until: dict[int, float] = {}  # by thread, where several clients share one
        self.clients = [
            ask.client for ask in load.asks(dice) if self._plan(ask.client, self._in_turn(ask.client, 0.0, ask.at))
        ]

    def take(self) -> Offer:
        at, _, client = heapq.heappop(self._due)
        self.taken += 1
        self.next_at = self._due[0][0] if self._due else math.inf
        ask = self._draw(at)
        return Offer(at, ask.rows, ask.priority, ask.timeout, client)

    def answered(self, client: Hashable, now: float, least_s: float = 0.0) -> bool:
        """The client has its answer, and asks again unless enough has been asked: then False, and it leaves.

        It thinks for at least `least_s` seconds.
        """
        return self._plan(client, self._in_turn(client, now, max(least_s, self._load.think_s(self._dice))))

    def _in_turn(self, client: Hashable, now: float, think_s: float) -> float:
        """When the client has thought, which may begin once the others of its thread have."""
        if self._load.blocks == 1 or not isinstance(client, int):
            return now + think_s
        thread = client // self._load.blocks
        ready = max(now, self._thinks_until.get(thread, 0.0)) + think_s
        self._thinks_until[thread] = ready
        return ready

    def asks_more(self, now: float) -> bool:
        """Whether a client that is answered now asks again."""
        return self._left >= 1 and now <= self._until

    def _plan(self, client: Hashable, at: float) -> bool:
        if not self.asks_more(at):
            return False
        self._left -= 1
        heapq.heappush(self._due, (at, next(self._numbers), client))
        self.next_at = self._due[0][0]
        return True


WARM_UP = 0.05
LITTLE = 0.5  # of the rows served by the last arrival: less, and the run is too short to leave out its end

Drift = Sequence[tuple[float, float]]
"""(seconds, factor), rising: from each time on batches take so many times as long as the model says."""


def simulate(
    arrivals: Arrivals,
    service: ServiceModel,
    strategy: Callable[[], Strategy],
    limits: Limits,
    *,
    replicas: int = 1,
    routing: str | RoutingSetup = DEFAULT_POLICY,
    seed: int = 0,
    requests: int | None = None,
    duration: float | None = None,
    warmup: float = WARM_UP,
    max_queue_rows: int | None = None,
    drift: Drift = (),
    recorder: Callable[[], Journal] | None = None,
) -> SimulationOutcome:
    """Simulate until so many requests, or so many seconds of them, have come, and all of them are settled.

    `routing` is a policy's name, or all of how requests come to replicas. `strategy` and `recorder` are called for each
    replica. `warmup` is the share of the requests (or of the seconds)
    that is not counted. Clients of a closed loop join, as those of a run do, where one replica serves them all. The
    same arguments give the same outcome. Raises `UsageError`, and what a strategy raises as `StrategyError`.
    """
    simulation = Simulation(arrivals, service, limits, seed, requests, duration, warmup, drift)
    chosen = RoutingSetup(routing) if isinstance(routing, str) else routing
    simulation.open(strategy, replicas, chosen, max_queue_rows, recorder)
    simulation.run()
    return simulation.outcome()


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment, and what had been done by then since counting began."""

    now: float
    taken: int
    rows_taken: int
    rows: int = 0
    requests: int = 0
    busy_s: float = 0.0
    lanes_s: float = 0.0


class Simulation:
    """One simulation. `now` is its clock, in seconds."""

    def __init__(
        self,
        arrivals: Arrivals,
        service: ServiceModel,
        limits: Limits,
        seed: int,
        requests: int | None,
        duration: float | None,
        warmup: float,
        drift: Drift,
    ) -> None:
        if duration is None and requests is None:
            duration = arrivals.duration
        if requests is None:
            requests = arrivals.count
        if requests is None and duration is None:
            raise UsageError("this load never ends. Give a number of requests, or a duration.")
        if (requests is not None and requests < 1) or (duration is not None and not 0 < duration < math.inf):
            raise UsageError("nothing would be simulated. Give 1 request or more, or a duration above 0.")
        if not 0 <= warmup < 1:
            raise UsageError(f"a warm-up of {warmup:g} leaves nothing to count. Give a share from 0 to below 1.")
        self.now = 0.0
        self._arrivals, self._service, self._limits, self._seed, self._drift = arrivals, service, limits, seed, drift
        most, until = requests or math.inf, duration or math.inf
        dice = self._dice("arrivals")
        self._closed = ClosedFeed(arrivals, dice, most, until) if isinstance(arrivals, ClosedLoop) else None
        self._feed = self._closed or OpenFeed(arrivals, dice, most, until)
        self._warm_taken = math.ceil(warmup * requests) if warmup and requests is not None else math.inf
        self._warm_at = warmup * duration if warmup and duration is not None else math.inf
        self._events: list[tuple[float, int, SimulatedReplica | None, Running | None]] = []  # a heap
        self._numbers = itertools.count()
        self._rows_taken = 0
        self._ebbs = False  # no more comes, or a client has left
        self._began = Mark(0.0, 0, 0)
        self._full: Mark | None = None  # the end of the time in which the load was whole

    def _dice(self, *what: object) -> random.Random:
        """Each thing has dice of its own, so that the same load meets every strategy."""
        return random.Random("/".join(map(str, (self._seed, *what))))

    def open(
        self,
        strategy: Callable[[], Strategy],
        replicas: int,
        routing: RoutingSetup,
        max_queue_rows: int | None,
        recorder: Callable[[], Journal] | None,
    ) -> None:
        """Start the replicas, and let the clients join."""
        if replicas < 1:
            raise UsageError(f"{replicas} replicas serve no request. Give 1 or more.")
        self._joined = self._closed is not None and replicas == 1
        self.replicas: list[SimulatedReplica] = []
        warn = WarnOnce()
        for number in range(replicas):
            dice = self._dice("service", number)
            prefix = f"replica {number} " if replicas > 1 else ""
            replica = SimulatedReplica(
                strategy(),
                self._limits,
                max_queue_rows,
                [Lane(f"{prefix}forward {lane}", clock=lambda: self.now) for lane in range(self._limits.in_flight)],
                partial(self._service_s, dice),
                partial(self._service.fails, dice),
                self._service.turn,
                self._schedule,
                self._left if self._closed is not None else None,
                recorder() if recorder is not None else None,
                warn,
            )
            self.replicas.append(replica)
        if self._joined and self._closed is not None:
            for client in self._closed.clients:
                self.replicas[0].core.join(client, 0.0)
        limits, dice = self._limits, self._dice("routing")
        self._router = SimulatedRouter(routing, self.replicas, limits, dice, self._turned_away, self._ring_router)

    def _service_s(self, dice: random.Random, rows: int, now: float) -> float:
        seconds = self._service.draw(rows, dice)
        for since, factor in reversed(self._drift):
            if now >= since:
                return seconds * factor
        return seconds

    def _schedule(self, when: float, replica: SimulatedReplica, running: Running | None) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), replica, running))

    def _ring_router(self, when: float) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), None, None))

    def _turned_away(self, ask: Offer, why: str, now: float) -> None:
        """The router has refused a request, or one has expired in its queue."""
        if self._closed is not None:
            self._left(as_request(ask, now), now, why == "expired")

    def _left(self, request: Request, now: float, queued: bool) -> None:
        """A client has its answer, or was turned away: then it comes back no sooner than something has been served."""
        assert self._closed is not None
        least_s = 0.0 if queued else self._service.seconds(1)
        if not self._closed.answered(request.client, now, least_s):
            self._ebbs = True
            if self._joined:
                self.replicas[0].core.leave(request.client)

    def run(self) -> None:
        """Until everything has come and everything is settled."""
        feed, events, router, open_loop = self._feed, self._events, self._router, self._closed is None
        warm_taken, warm_at = self._warm_taken, self._warm_at
        touched: list[SimulatedReplica] = []
        while True:
            now = feed.next_at
            if events and events[0][0] < now:
                now = events[0][0]
            if now == math.inf:
                if not self._drain():
                    return
                continue
            self.now = now
            while True:  # what happens at this instant may make more happen at this instant
                while feed.next_at <= now:
                    ask = feed.take()
                    self._rows_taken += ask.rows
                    if (sent_to := router.arrive(ask, now)) is not None:
                        touched.append(sent_to)
                if not events or events[0][0] > now:
                    break
                _, _, replica, running = heapq.heappop(events)
                if replica is None:
                    router.expire(now)
                    continue
                if running is None:
                    replica.ring(now)
                else:
                    replica.end(running, now)
                    touched += router.send_waiting(now)
                touched.append(replica)
            if feed.taken >= warm_taken or now >= warm_at:
                for replica in self.replicas:  # what is counted begins here
                    replica.count_from_here()
                router.count_from_here()
                self._began = replace(self._mark(), rows=0, requests=0, busy_s=0.0, lanes_s=0.0)
                warm_taken = warm_at = math.inf
            if self._full is None and (self._ebbs or (open_loop and feed.next_at == math.inf)):
                self._full = self._mark()
            for replica in touched:
                if replica.woken:
                    replica.dispatch(now)
            touched.clear()

    def _drain(self) -> bool:
        """Nothing happens by itself any more: serve what waits, as an engine does that closes. Whether any did.

        Raises `StrategyError` where a run would not come so far: clients that are to ask again wait for their answers,
        or there was no cut at all.
        """
        for replica in self.replicas:
            asks_again = self._closed is not None and self._closed.asks_more(self.now)
            if replica.core.queue.rows and (asks_again or not replica.core.batches):
                raise replica.uncut()
            replica.dispatch(self.now, draining=True)
        return bool(self._events)

    def _mark(self) -> Mark:
        seen = merge_snapshots(replica.snapshot() for replica in self.replicas)
        busy_s = sum(spent for lane in seen.lanes for station, spent in lane["stations"].items() if station != "idle")
        lanes_s = sum(spent for lane in seen.lanes for spent in lane["stations"].values())
        return Mark(self.now, self._feed.taken, self._rows_taken, seen.rows, seen.requests, busy_s, lanes_s)

    def outcome(self) -> SimulationOutcome:
        """What has been counted. After `run`."""
        snapshots, router = [replica.snapshot() for replica in self.replicas], self._router
        began, ended, full = self._began, self._mark(), self._full or self._mark()
        until = full if full.now > began.now and full.rows >= LITTLE * ended.rows else ended
        seconds = until.now - began.now
        limits = self._limits
        capacity = self._service.capacity(limits.max_rows) * limits.in_flight * len(self.replicas)
        notices, offered = [notice for one in snapshots for notice in one.notices], self._arrivals.rows_per_s
        notices += router.notices
        if offered is not None and offered > capacity:
            notices.append(
                f"offered {offered:,.0f} rows/s > capacity {capacity:,.0f} rows/s: the queue grows, and so do "
                f"these times, the longer it lasts and until it is full. Offer less, or add replicas."
            )
        return SimulationOutcome(
            snapshot=_with_refusals(merge_snapshots(snapshots), router),
            router_wait=router.waited.to_wire(),
            replicas=snapshots,
            seconds=seconds,
            offered_requests=self._feed.taken - began.taken,
            offered_rows_per_s=_rate(full.rows_taken - began.rows_taken, full.now - began.now)
            or self._arrivals.rows_per_s
            or 0.0,
            served_rows_per_s=_rate(until.rows, seconds),
            served_requests_per_s=_rate(until.requests, seconds),
            utilisation=_rate(until.busy_s, until.lanes_s),
            capacity_rows_per_s=capacity,
            notices=tuple(dict.fromkeys(notices)),
        )


def _with_refusals(seen: Snapshot, router: SimulatedRouter) -> Snapshot:
    """The counters of all replicas, with what the router itself has turned away."""
    errors = dict(Counter(seen.errors) + router.errors)
    classes = {name: dict(wire) for name, wire in seen.classes.items()}
    for (name, kind), count in router.classes.items():
        wire = classes.setdefault(name, ClassCount().to_wire())
        wire["errors"] = {**wire["errors"], kind: wire["errors"].get(kind, 0) + count}
    return replace(seen, errors=errors, classes=classes)


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
