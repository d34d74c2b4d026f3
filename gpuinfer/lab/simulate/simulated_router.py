"""The router on a virtual clock: a replica for each request by the real routing policies, and the real queue of those
for which no replica has room.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from gpuinfer.api import Limits, ReplicaLoad, Request, RoutedRequest
from gpuinfer.engine.arrivals import Offer
from gpuinfer.errors import UsageError
from gpuinfer.fleet.router.request_queue import QueueKey, RequestQueue
from gpuinfer.fleet.routing_policies import DEFAULT_POLICY, PolicyGuard, make_policy
from gpuinfer.lab.simulate.simulated_replica import SimulatedReplica
from gpuinfer.stats import Histogram

QueueKind = Literal["replica", "global"]
QUEUE_LIMIT = 4096


class RoutingSetup(NamedTuple):
    """How requests come to replicas, as the flags of `gpuinfer serve` say it."""

    policy: str = DEFAULT_POLICY
    queue: QueueKind = "replica"
    max_inputs: int | None = None  # requests under way at one replica; None: no bound, with a global queue its room
    queue_limit: int = QUEUE_LIMIT
    options: Mapping[str, Any] = MappingProxyType({})  # of the policy, as `check_policy_options` returns them

    def room(self, limits: Limits) -> float:
        """Requests of one row that a replica of these limits may have under way."""
        if self.max_inputs is not None:
            return self.max_inputs
        if self.queue == "replica":
            return math.inf
        return limits.slots if limits.slots is not None else limits.max_rows * limits.in_flight


class SimulatedRouter:
    """Sends requests to replicas, at once or when there is room.

    `turned_away` is called with each request that no replica has served, and why: "rejected" or "expired". `ring_at`
    asks for a call of `expire` at a time.
    """

    def __init__(
        self,
        setup: RoutingSetup,
        replicas: Sequence[SimulatedReplica],
        limits: Limits,
        dice: random.Random,
        turned_away: Callable[[Offer, str, float], None],
        ring_at: Callable[[float], None],
    ) -> None:
        """Raises `UnknownName` for no policy."""
        policy = make_policy(setup.policy, dice.getrandbits(63), **setup.options)
        self.notices: list[str] = []
        self.waited = Histogram()  # of those that were sent, also at once where requests are bounded
        self.errors: Counter[str] = Counter()
        self.classes: Counter[tuple[str, str]] = Counter()  # of the same, by class and kind
        self._policy = PolicyGuard(policy, self._policy_failed)
        self._global, self._room = setup.queue == "global", setup.room(limits)
        if self._room < 1:
            raise UsageError(f"replicas with room for {self._room:g} requests serve none. Give 1 or more.")
        self._replicas = replicas
        self._loads = [ReplicaLoad(number, room=self._room) for number in range(len(replicas))]
        self._queue: RequestQueue[Offer] = RequestQueue(setup.queue_limit)
        self._keys: dict[int, QueueKey] = {}  # of those that wait, by their identity
        self._turned_away, self._ring_at = turned_away, ring_at
        self._needs_load, self._keyed = policy.needs_load, policy.needs_affinity
        self._bounded = self._room < math.inf
        self._plain = len(replicas) == 1 and not self._bounded
        self._affinities: dict[Hashable, bytes | None] = {None: None}

    def arrive(self, ask: Offer, now: float) -> SimulatedReplica | None:
        """The replica that has it now; None: it waits, or was refused."""
        if self._plain:
            self._replicas[0].arrive(ask, now)
            return self._replicas[0]
        loads = self._with_room()
        if (self._global and self._queue) or not loads:
            self._wait(ask, now)
            return None
        return self._send(ask, loads, now)

    def send_waiting(self, now: float) -> list[SimulatedReplica]:
        """Send what waits as far as there is room. Returns the replicas that have got something."""
        found = []
        while self._queue:
            ask = self._queue.at(0)
            if ask.at + ask.timeout <= now:
                self._take_out(ask)
                self._refuse(ask, "expired", now)
            elif loads := self._with_room():
                self._take_out(ask)
                found.append(self._send(ask, loads, now))
            else:
                break
        return found

    def expire(self, now: float) -> None:
        """Refuse the requests that have expired. To be called at the times passed to `ring_at`."""
        for ask in self._queue:
            if ask.at + ask.timeout <= now:
                self._take_out(ask)
                self._refuse(ask, "expired", now)

    def count_from_here(self) -> None:
        """Forget what has been counted so far."""
        self.waited, self.errors, self.classes = Histogram(), Counter(), Counter()

    def _with_room(self) -> list[ReplicaLoad]:
        if self._needs_load or self._bounded:
            for load, replica in zip(self._loads, self._replicas, strict=True):
                load.in_flight = replica.under_way
        return [load for load in self._loads if load.in_flight < load.room] if self._bounded else self._loads

    def _send(self, ask: Offer, loads: Sequence[ReplicaLoad], now: float) -> SimulatedReplica:
        if self._keyed and ask.client not in self._affinities:
            self._affinities[ask.client] = str(ask.client).encode()
        request = RoutedRequest(ask.rows, self._affinities[ask.client] if self._keyed else None)
        replica = self._replicas[self._policy.choose(loads, request)[0].member]
        if self._bounded:
            self.waited.add(now - ask.at)
        replica.arrive(ask, now)
        return replica

    def _wait(self, ask: Offer, now: float) -> None:
        if not self._global:
            self._refuse(ask, "rejected", now)
            return
        deadline = ask.at + ask.timeout
        key = self._queue.place(ask.priority, deadline)
        turned_away = self._queue.push(ask, key)
        if turned_away is not ask:
            self._keys[id(ask)] = key
            if deadline < math.inf:
                self._ring_at(deadline)
        if turned_away is not None:
            self._keys.pop(id(turned_away), None)
            self._refuse(turned_away, "rejected", now)

    def _take_out(self, ask: Offer) -> None:
        self._queue.remove(self._keys.pop(id(ask)))

    def _refuse(self, ask: Offer, why: str, now: float) -> None:
        self.errors[why] += 1
        self.classes[ask.priority.name.lower(), why] += 1
        self._turned_away(ask, why, now)

    def _policy_failed(self, fault: str) -> None:
        if fault not in self.notices:
            self.notices.append(fault)


def as_request(ask: Offer, now: float) -> Request:
    """What a client is answered for, where no replica has had its request."""
    return Request(None, ask.rows, now, ask.priority, ask.at + ask.timeout, ask.group, ask.client)
