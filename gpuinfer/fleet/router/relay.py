"""The decisions of one router process: which replica gets a request, and what follows a failure; its retry budget, and
one timer for all connections. Retries are a share of all requests, so that they never flood the replicas.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gpuinfer.api import RoutedRequest
from gpuinfer.fleet.router.connection_pool import ConnectionPool
from gpuinfer.fleet.router.event_stream import ByteBudget
from gpuinfer.fleet.router.http_message import affinity_of
from gpuinfer.fleet.router.protocol import RouterConfig
from gpuinfer.fleet.router.proxied_request import ProxiedRequest
from gpuinfer.fleet.router.replica_table import HALF_OPEN, ReplicaTable, RoutedReplica
from gpuinfer.fleet.router.request_queue import QueueTicket, RequestQueue, back_in_front
from gpuinfer.fleet.router.shared_counters import MemberCell, ProcessCell, SharedCounters
from gpuinfer.fleet.routing_policies import PolicyGuard, make_policy
from gpuinfer.http.network import DisconnectWatcher

if TYPE_CHECKING:
    from gpuinfer.fleet.router.client_connection import RouterClientConnection

TICK_S = 0.125
SLOTS = 8  # each connection's timeouts are checked once in SLOTS ticks


class TickTimer:
    """One timer for all connections. `now` is `time.monotonic()` at the last tick: precise enough for timeouts."""

    def __init__(self, loop: asyncio.AbstractEventLoop, every_tick: Callable[[float], None]) -> None:
        self._loop, self._every_tick = loop, every_tick
        self._slots: list[set[RouterClientConnection]] = [set() for _ in range(SLOTS)]
        self._at = self._next = 0
        self._timer: asyncio.TimerHandle | None = None
        self.now = time.monotonic()

    def start(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def add(self, connection: RouterClientConnection) -> int:
        """Check this connection from now on; returns the slot for `remove`."""
        self._next = (self._next + 1) % SLOTS
        self._slots[self._next].add(connection)
        return self._next

    def remove(self, connection: RouterClientConnection, slot: int) -> None:
        self._slots[slot].discard(connection)

    def _tick(self) -> None:
        self.start()
        self.now = time.monotonic()
        self._every_tick(self.now)
        self._at = (self._at + 1) % SLOTS
        for connection in list(self._slots[self._at]):
            connection.check_timeout(self.now)


RETRIES_AT_FIRST, RETRIES_AT_MOST = 5.0, 100.0
LOSSES = 5  # replicas that may die while they have one request, which could be the cause
DRAINING_S = 2.0  # until the roster shows that a replica drains
REPORT_S = 0.1  # between two reports of one member's failures
TIDY_S = 5.0  # between two searches for idle connections
ANY = RoutedRequest()
MOST_FAULTS = 16  # distinct faults of a policy that are reported
RATE_SHARE = 0.02  # of a tick, in the moving average
LONGEST_RETRY_S = 60
QUEUE_FULL = "all replicas have as many requests as they may, and no more may wait here. Ask again later."


class Relay:
    """Chooses a replica for each request, another one when that fails, and lets requests wait while none is up, or none
    has room.
    """

    def __init__(
        self,
        config: RouterConfig,
        counters: SharedCounters,
        row: int,
        loop: asyncio.AbstractEventLoop,
        report: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.config = config
        self.closing = False
        self.whole_bytes = config.whole_bytes
        self.clock = time.monotonic
        self.now, self.wall = time.monotonic(), time.time()  # at the last tick
        self.kept_bytes = config.kept_bytes
        self.budget = ByteBudget(config.bodies_bytes)
        self.timer = TickTimer(loop, self._tick)
        self.disconnects = DisconnectWatcher(loop)
        self.members = ReplicaTable(config, counters, row, loop, self._wake)
        self.control = ConnectionPool(partial(loop.create_unix_connection, path=config.control), config.connect_s, loop)
        self.active = 0  # requests under way
        self._loop, self._report = loop, report
        self._shared = counters.processes > 1
        policy = make_policy(config.policy, random.getrandbits(63), **config.policy_options)
        self._needs_affinity = policy.needs_affinity
        self._policy = PolicyGuard(policy, self._policy_failed)
        self._policy_faults: set[str] = set()  # that were reported
        self._retries = RETRIES_AT_FIRST if config.retry_budget > 0 else 0.0  # each request earns a share of one
        self._global = config.queue == "global"
        self._bounded = self._global or config.max_inputs is not None
        self._queue: RequestQueue[ProxiedRequest] = RequestQueue(config.queue_limit)
        self._sent_rate = 0.0  # requests that leave the queue in a second, a moving average
        self._sent_now = 0  # since the last tick
        self._cells, self._totals = counters.cells, counters.total_at(row, ProcessCell.CONNECTIONS)
        self._requests = self._totals + int(ProcessCell.REQUESTS)
        self._woken = False
        self._tidy_at = self.now + TIDY_S

    def count(self, total: ProcessCell, by: int = 1) -> None:
        self._cells[self._totals + total] += by

    # Requests

    def send(self, request: ProxiedRequest) -> None:
        """Send a new request to a replica."""
        self.active += 1
        self._cells[self._requests] += 1
        if self._retries < RETRIES_AT_MOST:
            self._retries += self.config.retry_budget
        self._choose(request)

    def over(self, request: ProxiedRequest) -> None:
        """A request is over, whatever its outcome."""
        self.active -= 1
        if (ticket := request.ticket) is not None and ticket.queued:
            self._take_out(ticket)
        self._leave(request)

    def _leave(self, request: ProxiedRequest) -> None:
        replica, request.replica = request.replica, None
        if replica is None:
            return
        replica.leave()
        if request.trace is not None:
            request.trace.left()
        breaker = replica.breaker
        if breaker.state == HALF_OPEN and request.probes and breaker.probing:
            breaker.probing = False  # the one request of a half-open breaker has ended without an answer
            self.members.changed(replica)
        if self._queue.keys:
            self._wake()

    # Which replica

    def place(self, request: ProxiedRequest) -> None:
        """Send a request to another replica, or let it wait for one, or give it up."""
        self._leave(request)
        self._choose(request)

    def _choose(self, request: ProxiedRequest) -> None:
        if request.losses >= LOSSES or request.attempt >= self.config.attempts:
            failed = f"{request.attempt} replicas failed while they had this request. Try it by itself."
            request.give_up(502, failed)
            return
        usable = self.members.usable
        loads: Sequence[RoutedReplica] = usable
        if request.tried:
            loads = [one for one in usable if one.member not in request.tried]
        if not loads and (self.closing or not self.members.any_expected()):
            self._refuse_unrouted(request)
            return
        bounded = self._bounded and request.method == b"POST"  # others are questions about the models
        if bounded:
            loads = () if self._global and self._queue.keys else self._with_room(loads)
        if not loads or not self._send_to(request, loads, bounded):
            self._wait(request)

    def _with_room(self, loads: Sequence[RoutedReplica]) -> Sequence[RoutedReplica]:
        if self._shared:
            for one in loads:
                one.count_others()
        return [one for one in loads if one.in_flight < one.room]

    def _send_to(self, request: ProxiedRequest, loads: Sequence[RoutedReplica], bounded: bool) -> bool:
        """Send a request to one of these. False: other processes have taken the room that there was."""
        if self._shared and not bounded:  # else `_with_room` has just done it
            for one in loads:
                one.count_others()
        loads = tuple(loads)  # policies see it, and may not change it
        routed = RoutedRequest(1.0, affinity_of(request.head, request.body)) if self._needs_affinity else ANY
        replica, reason = self._policy.choose(loads, routed)
        if bounded and self._shared:
            while not replica.enter_within_room():
                if not (loads := tuple([one for one in loads if one is not replica])):
                    return False
                replica, reason = self._policy.choose(loads, routed)
        else:
            replica.enter()
        request.replica, request.reason = replica, reason
        request.attempt += 1
        request.probes = replica.breaker.state == HALF_OPEN
        if request.probes:
            replica.breaker.probing = True
            self.members.refresh()
        if request.trace is not None:
            request.trace.attempt(replica, request.reason, request.resumes)
        request.start(replica.pool)
        return True

    def _policy_failed(self, fault: str) -> None:
        """The policy has made no choice: count it, and report what is wrong once."""
        self.count(ProcessCell.POLICY_FAULTS)
        if fault not in self._policy_faults and len(self._policy_faults) < MOST_FAULTS:
            self._policy_faults.add(fault)
            self._report({"event": "policy", "fault": fault})

    # The queue: requests for which no replica has room, and those for which there is none just now

    def _wait(self, request: ProxiedRequest) -> None:
        """Let a request wait in the queue, or refuse it. One that a replica has had waits in front."""
        queue, ticket = self._queue, request.ticket
        had = request.attempt > 0 or request.member is not None
        if ticket is None:
            priority, deadline = request.urgency()
            request.ticket = ticket = QueueTicket(queue.place(priority, deadline), deadline)
        if had:
            ticket.key = back_in_front(ticket.key)
        full = self.members.usable and not self._global and not had  # no queue: what finds no room is refused
        turned_away = request if full else queue.push(request, ticket.key)
        if turned_away is not request:
            ticket.queued, ticket.since, ticket.stranded_at = True, self.clock(), 0.0
        if turned_away is not None:
            if turned_away.ticket is not None:
                turned_away.ticket.queued = False
            if self.members.usable:
                self.count(ProcessCell.QUEUE_FULL)
                turned_away.give_up(429, QUEUE_FULL, self._retry_s(), "QueueFull")
            else:
                self._refuse_unrouted(turned_away)
        self._show_queue()
        if self._global and queue.keys and not queue.keys[0].fresh:
            self._wake()  # the first may wait for one replica alone, and there may be room at another

    def _refuse_unrouted(self, request: ProxiedRequest) -> None:
        self.count(ProcessCell.UNROUTED)
        request.give_up(503, "no replica is up. Try again.", retry_s=2)

    def _retry_s(self) -> int:
        """When there may be room in the queue: once all that wait now have been sent, at the present rate."""
        rate = self._sent_rate
        return max(1, min(LONGEST_RETRY_S, math.ceil(len(self._queue) / rate))) if rate > 0 else 1

    def _take_out(self, ticket: QueueTicket) -> ProxiedRequest:
        request = self._queue.remove(ticket.key)
        ticket.queued = False
        self._show_queue()
        return request

    def _show_queue(self) -> None:
        self._cells[self._totals + ProcessCell.QUEUED] = len(self._queue)

    def _wake(self) -> None:
        """A replica may take requests again."""
        if self._queue and not self._woken:
            self._woken = True
            self._loop.call_soon(self._send_waiting)

    def _send_waiting(self) -> None:
        """Send as many of those that wait, in their order, as replicas have room for."""
        self._woken = False
        passed = 0  # requests in front, which wait for a replica that they have not been at
        while passed < len(self._queue):
            request, usable = self._queue.at(passed), self.members.usable
            if (ticket := request.ticket) is None:
                raise RuntimeError("a request waits in the queue without a ticket.")
            if ticket.deadline <= (now := self.clock()):
                self._expire(request)
                continue
            loads = self._with_room(usable) if self._bounded else usable
            if not loads:
                return
            if request.tried:
                if all(one.member in request.tried for one in usable):
                    request.tried = ()  # those that it has been at count again when there are no others
                loads = [one for one in loads if one.member not in request.tried]
                if not loads:
                    passed += 1
                    continue
            self._take_out(ticket)
            if not self._send_to(request, loads, self._bounded):
                self._wait(request)
                return
            self._sent_now += 1
            self.count(ProcessCell.QUEUE_TAKEN)
            self.count(ProcessCell.QUEUE_WAIT_US, int(1e6 * (now - ticket.since)))

    def _expire(self, request: ProxiedRequest) -> None:
        self.count(ProcessCell.QUEUE_EXPIRED)
        request.give_up(408, "its deadline passed while it waited for a replica. Give it more time.", 0, "Expired")

    def _look_at_waiting(self, now: float) -> None:
        """At each tick: end what has waited for too long."""
        self._sent_rate += RATE_SHARE * (self._sent_now / TICK_S - self._sent_rate)
        self._sent_now = 0
        if not self._queue:
            return
        stranded = not self.members.usable
        for request in self._queue:
            if (ticket := request.ticket) is None:
                continue
            if ticket.deadline <= now:
                self._expire(request)
            elif not stranded:
                ticket.stranded_at = 0.0
            elif not ticket.stranded_at:
                ticket.stranded_at = now
            elif self.closing or not self.members.any_expected() or now - ticket.stranded_at >= self.config.wait_s:
                self._refuse_unrouted(request)
        self._wake()

    # Outcomes

    def answered(self, request: ProxiedRequest, status: int) -> None:
        """A replica has answered with this status."""
        replica = request.replica
        if replica is None:
            return
        if request.trace is not None:
            request.trace.answered(status)
        breaker = replica.breaker
        if status < 500 and breaker.healthy:
            return
        if status >= 500 and status != 503:
            replica.add(MemberCell.ERRORS)
        if breaker.state == HALF_OPEN:
            request.probes = False
        if breaker.answered(status, self.clock()):
            self.members.changed(replica)

    def may_try_again(self, request: ProxiedRequest, status: int) -> bool:
        """Whether a request that was answered with 429, 502 or 503 is sent to another replica, for one retry."""
        replica = request.replica
        if (
            replica is None
            or self.closing
            or request.attempt >= self.config.attempts
            or (status == 429 and request.retried)
        ):
            return False
        tried = (*request.tried, replica.member)
        others = [one for one in self.members.usable if one.member not in tried]
        if status == 429:
            others = [one for one in others if one.in_flight / one.speed < replica.in_flight / replica.speed]
        if not others or self._retries < 1:
            return False
        self._retries -= 1
        request.tried = tried
        request.retried += f"; retried={status}"
        if request.trace is not None:
            request.trace.failed(str(status))
        replica.add(MemberCell.RETRIED)
        return True

    def refused_draining(self, request: ProxiedRequest) -> None:
        """A replica that drains has refused a request: no failure, and no retry is paid. It gets no further request,
        since a replica that refuses at once would look like the least loaded of all.
        """
        replica = request.replica
        if replica is None:
            return
        replica.add(MemberCell.RETRIED)
        if request.trace is not None:
            request.trace.failed("draining")
        request.tried = (*request.tried, replica.member)
        request.probes = False
        if not replica.draining_until:
            replica.draining_until = self.clock() + DRAINING_S
            self._report({"event": "failed", "member": replica.member, "kind": "draining"})
            self.members.refresh()

    def failed(self, request: ProxiedRequest, kind: str) -> None:
        """A replica has failed a request; `kind` as `ProxiedRequest.lost` has it."""
        replica = request.replica
        if replica is None:
            return
        replica.add(MemberCell.ERRORS)
        replica.add(MemberCell.RESUMED if request.resumes else MemberCell.RETRIED)
        if request.trace is not None:
            request.trace.failed(kind)
        request.tried = (*request.tried, replica.member)
        if kind in ("reset", "broken"):
            request.losses += 1
        now = self.clock()
        if now - replica.reported_at > REPORT_S:
            replica.reported_at = now
            self._report({"event": "failed", "member": replica.member, "kind": kind})
        request.probes = False
        if replica.breaker.failed(now):
            self.members.changed(replica)

    # Timer

    def _tick(self, now: float) -> None:
        self.now, self.wall = now, time.time()
        self.members.tick(now)
        if now > self._tidy_at:
            self._tidy_at = now + TIDY_S
            self.members.tidy(now)
            self.control.tidy(now)
        self._look_at_waiting(now)

    def close(self) -> None:
        self.timer.stop()
        self.disconnects.close()
        self.members.close()
        self.control.close()
