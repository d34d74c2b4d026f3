"""A divided run on a virtual clock: the real `CoordinatorCore`, with nodes, a network and a disk that are made up.

    outcome = simulate_cluster(ClusterScenario(nodes=1000, units=10_000_000, rate=100.0))
    outcome.efficiency, outcome.idle_end_s, outcome.core_s / outcome.exchanges

Nodes may die, hang, fall silent, lose messages and come back; the coordinator may be killed, and resumed from what is
kept.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpuinfer.cluster.coordinator_core import CoordinatorCore
from gpuinfer.cluster.ledger import IntervalSet
from gpuinfer.cluster.range_policy import RangePolicy
from gpuinfer.division import Interval, WorkRange
from gpuinfer.errors import WorkError
from gpuinfer.lab.simulate.simulated_node import SimulatedNode

SHORTEST_S = 0.05  # between two exchanges of a node that has nothing
EXPIRE_S = 1.0  # between two searches for lost nodes
RETRY_S = 1.0  # after a message that was lost


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong. Events come at random, so many a second of a node's life on average; shares are of messages."""

    deaths: float = 0.0  # its process ends; another one joins after `restart_s`
    hangs: float = 0.0  # its workload stops for `hang_s`, or for good
    hang_s: float = math.inf
    silences: float = 0.0  # its process is suspended for `silence_s`
    silence_s: float = 10.0
    restart_s: float = 5.0
    lost_requests: float = 0.0  # share of exchanges that do not reach the coordinator
    lost_replies: float = 0.0  # share of replies that do not reach the node
    replayed: bool = True  # a node that repeats an exchange gets the same reply again
    lost_uploads: float = 0.0  # share of uploads that break off while they are written
    lost_receipts: float = 0.0  # share of uploads that are kept, of which the node does not hear
    doubled_uploads: float = 0.0  # share of uploads that are sent twice at once
    late_releases: float = 0.0  # share of releases that a node makes five exchanges later
    coordinator_ends: tuple[float, ...] = ()  # when it is killed: it is resumed at once, and knows what is on the disk
    until: float = math.inf  # after which nothing goes wrong any more


@dataclass(frozen=True, slots=True)
class ClusterScenario:
    units: int
    nodes: int
    rate: float  # units a second of a node, on average
    spread: float = 0.0  # of the nodes' rates: standard deviation of their logarithm
    parallel: int = 1  # units that a node works on at once
    join_s: float = 0.0  # over which the nodes join
    slow: int = 0  # nodes that are `slowness` times as slow
    slowness: float = 10.0
    item_bytes: int = 0  # of a unit, on its way to a node
    record_bytes: int = 0  # of a unit's record, on its way back
    link_bytes_per_s: float = math.inf  # of the coordinator's network, each way
    exchange_cost_s: float = 0.0  # of the coordinator's processor
    range_cost_s: float = 0.0  # to keep a range
    byte_cost_s: float = 0.0  # and for each byte of its records
    known: bool = True  # whether the total is known before the input's end
    seed: int = 0
    faults: Faults = field(default_factory=Faults)
    limit_s: float = 1e7  # of virtual time, before the run counts as stuck


@dataclass(slots=True)
class ClusterOutcome:
    """What came of it. Seconds are virtual, but for `core_s`."""

    seconds: float = 0.0
    capacity: float = 0.0  # units that all nodes could have computed while they were there
    computed: int = 0  # units that they did compute
    idle_end_s: list[float] = field(default_factory=list)  # of each node that was there: from its last unit to the end
    exchanges: int = 0
    ranges: int = 0  # uploads that were kept
    duplicates: int = 0  # units of which records came when there were some already
    lost_nodes: int = 0
    resumed: int = 0
    processor_s: float = 0.0  # of the coordinator, by the costs of the scenario
    way_there_s: float = 0.0  # in which its network is busy with items
    way_back_s: float = 0.0  # and with records
    core_s: float = 0.0  # real seconds of a processor in `CoordinatorCore`
    most_held: int = 0  # units with nodes or pending at once: the coordinator remembers their items
    most_intervals: int = 0  # gaps in what is kept
    kept: list[Interval] = field(default_factory=list)

    @property
    def efficiency(self) -> float:
        """Units of the run to those that its nodes could have computed meanwhile."""
        units = sum(stop - start for start, stop in self.kept)
        return units / self.capacity if self.capacity else 1.0


@dataclass(eq=False, slots=True)
class _Connection:
    """A node and its side of the wire."""

    node: SimulatedNode
    released: list[Interval] = field(default_factory=list)
    pause_s: float = SHORTEST_S
    stops: int = 0  # reasons for which its workload stands still
    silences: int = 0  # for which its process does
    reply: tuple[list[WorkRange], int] | None = None  # that was lost, and will be replayed
    finish_at: float = math.inf  # the event for the end of its first range


class ClusterSimulation:
    """One run, which `run` drives to its end."""

    def __init__(self, scenario: ClusterScenario, policy: RangePolicy | None = None) -> None:
        self.scenario = scenario
        self.policy = policy or RangePolicy(nodes=scenario.nodes)
        self.outcome = ClusterOutcome()
        self._disk = IntervalSet()
        self._random = random.Random(scenario.seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._numbers = itertools.count()
        self._connections: dict[int, _Connection] = {}
        self._now = self._processor_free = self._way_there_free = self._way_back_free = 0.0
        self._item = bytes(scenario.item_bytes)  # of every unit
        self._life = 0  # of the coordinator: what was sent to an earlier one is lost
        self._open_coordinator()

    def _open_coordinator(self) -> None:
        """It knows what is on the disk, and reads the input from its beginning."""
        total = self.scenario.units
        self._core = CoordinatorCore(self.policy, total=total if self.scenario.known else None, kept=list(self._disk))
        self._unread = self._disk.gaps(0, total)[::-1]
        if not self._unread:
            self._core.ended_input(total)

    def run(self) -> ClusterOutcome:
        """Raises `WorkError` when the run does not come to its end, or a unit is kept twice."""
        scenario, faults, outcome = self.scenario, self.scenario.faults, self.outcome
        for index in range(scenario.nodes):
            rate = scenario.rate * math.exp(self._random.gauss(-(scenario.spread**2) / 2, scenario.spread))
            rate /= scenario.slowness if index < scenario.slow else 1.0
            self._at(self._random.uniform(0, scenario.join_s), self._join, rate)
        for when in faults.coordinator_ends:
            self._at(when, self._kill_coordinator)
        self._at(EXPIRE_S, self._expire)
        while not self._core.over:
            self._now, _, call, arguments = heapq.heappop(self._events)
            if self._now > scenario.limit_s:
                raise WorkError(f"not over after {scenario.limit_s:g} s: {self._core.counts}")
            call(*arguments)
        for connection in list(self._connections.values()):
            node = connection.node
            outcome.idle_end_s.append(max(0.0, self._now - max(node.busy_until, node.joined)))
            self._end(connection)
        outcome.seconds, outcome.kept = self._now, list(self._disk)
        outcome.duplicates += self._core.counts.duplicates
        return outcome

    # Events

    def _at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (when, next(self._order), call, arguments))

    def _happens(self, share: float) -> bool:
        return share > 0 and self._now < self.scenario.faults.until and self._random.random() < share

    def _expire(self) -> None:
        self.outcome.lost_nodes += len(self._timed(self._core.expire, self._now))
        counts = self._core.counts
        self.outcome.most_held = max(self.outcome.most_held, counts.leased + counts.pending + counts.keeping)
        self.outcome.most_intervals = max(self.outcome.most_intervals, len(self._disk))
        self._at(self._now + EXPIRE_S, self._expire)

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        began = time.thread_time()
        result = call(*arguments)
        self.outcome.core_s += time.thread_time() - began
        return result

    def _kill_coordinator(self) -> None:
        if self._now < self.scenario.faults.until:
            self.outcome.duplicates += self._core.counts.duplicates
            self.outcome.resumed += 1
            self._life += 1
            self._open_coordinator()

    def _processed(self, seconds: float) -> float:
        """When the coordinator's processor, which does one thing after the other, has done what takes so long."""
        self.outcome.processor_s += seconds
        self._processor_free = max(self._now, self._processor_free) + seconds
        return self._processor_free

    # A node's life

    def _join(self, rate: float) -> None:
        node = SimulatedNode(next(self._numbers), rate, self.scenario.parallel, self._now)
        connection = self._connections[node.number] = _Connection(node)
        self._core.join(node.number, self._now, name=f"node {node.number}", parallel=node.parallel)
        self._exchange(connection)
        faults = self.scenario.faults
        for often, call in ((faults.deaths, self._die), (faults.hangs, self._hang), (faults.silences, self._silence)):
            if often:
                self._at(self._now + self._random.expovariate(often), call, connection)

    def _end(self, connection: _Connection) -> None:
        node = connection.node
        if node.alive:
            node.alive = False
            self.outcome.capacity += node.rate * (self._now - node.joined)
            self.outcome.computed += node.done(self._now)
            del self._connections[node.number]

    def _replace(self, connection: _Connection) -> None:
        """It ends, and its launcher starts another one."""
        if connection.node.alive:
            self._end(connection)
            self._at(self._now + self.scenario.faults.restart_s, self._join, connection.node.rate)

    def _die(self, connection: _Connection) -> None:
        if connection.node.alive and self._now < self.scenario.faults.until:
            self._replace(connection)
            if self._random.random() < 0.5:  # its launcher notices; else nothing does
                self._core.leave(connection.node.number, self._now)

    def _hang(self, connection: _Connection) -> None:
        faults = self.scenario.faults
        if connection.node.alive and self._now < faults.until:
            self._stop(connection, faults.hang_s)
            self._at(self._now + self._random.expovariate(faults.hangs), self._hang, connection)

    def _silence(self, connection: _Connection) -> None:
        faults = self.scenario.faults
        if connection.node.alive and self._now < faults.until:
            connection.silences += 1
            self._stop(connection, faults.silence_s, silent=True)
            self._at(self._now + self._random.expovariate(faults.silences), self._silence, connection)

    def _stop(self, connection: _Connection, seconds: float, silent: bool = False) -> None:
        connection.stops += 1
        connection.node.stop(self._now)
        if seconds < math.inf:
            self._at(self._now + seconds, self._go_on, connection, silent)

    def _go_on(self, connection: _Connection, silent: bool) -> None:
        connection.stops -= 1
        connection.silences -= silent
        if not connection.stops:
            connection.node.go_on(self._now)
            self._await_finish(connection)

    # Exchanges

    def _exchange(self, connection: _Connection) -> None:
        node, faults = connection.node, self.scenario.faults
        if not node.alive:
            return
        if connection.silences or self._happens(faults.lost_requests):
            self._at(self._now + RETRY_S, self._exchange, connection)
            return
        state = (node.done(self._now), node.on_hand(self._now), list(connection.released))
        self._at(self._processed(self.scenario.exchange_cost_s), self._answer, connection, self._life, *state)

    def _answer(self, connection: _Connection, life: int, done: int, on_hand: int, released: list[Interval]) -> None:
        node, core, now = connection.node, self._core, self._now
        self.outcome.exchanges += 1
        if life != self._life or not core.knows(node.number):
            self._replace(connection)
            return
        if connection.reply is None:
            self._timed(core.heard, node.number, now, done, on_hand)
            for start, stop in released:
                self._timed(core.released, node.number, start, stop)
            grant = self._timed(core.grant, node.number, now)
            reply = [*grant.ranges, *self._read(node.number, grant.fresh)], grant.release
        else:
            reply = connection.reply
        if self._happens(self.scenario.faults.lost_replies):
            connection.reply = reply if self.scenario.faults.replayed else None
            self._at(now + RETRY_S, self._exchange, connection)
            return
        seconds = sum(map(len, reply[0])) * self.scenario.item_bytes / self.scenario.link_bytes_per_s
        self.outcome.way_there_s += seconds
        self._way_there_free = max(now, self._way_there_free) + seconds
        self._at(self._way_there_free, self._receive, connection, reply, len(released))

    def _read(self, node: int, units: int) -> list[WorkRange]:
        """The next units of the input that are not kept, leased to this node."""
        found = list[WorkRange]()
        wanted = units
        while wanted > 0 and self._unread:
            start, stop = self._unread.pop()
            if stop - start > wanted:
                self._unread.append((start + wanted, stop))
                stop = start + wanted
            wanted -= stop - start
            found.append(WorkRange(start, stop, (self._item,) * (stop - start) if self._item else ()))
            self._timed(self._core.lease, node, found[-1], self._now)
        if units and not self._unread:
            self._core.ended_input(self.scenario.units)
        return found

    def _receive(self, connection: _Connection, reply: tuple[list[WorkRange], int], answered: int) -> None:
        node = connection.node
        if not node.alive:
            return
        if connection.silences:
            self._at(self._now + RETRY_S, self._receive, connection, reply, answered)
            return
        ranges, release = reply
        connection.reply = None
        del connection.released[:answered]
        for work in ranges:
            node.add(work, self._now)
        if release and self._happens(self.scenario.faults.late_releases):
            self._at(self._now + 5 * self.policy.exchange_s, self._release, connection, release)
        elif release:
            self._release(connection, release)
        self._await_finish(connection)
        dry_s = node.dry_in(self._now)
        if ranges or dry_s:
            connection.pause_s = SHORTEST_S
        else:
            connection.pause_s = min(2 * connection.pause_s, self.policy.exchange_s)
        if dry_s and not connection.released:
            pause_s = min(self.policy.exchange_s, max(SHORTEST_S, dry_s))
        else:
            pause_s = connection.pause_s
        self._at(self._now + pause_s, self._exchange, connection)

    def _release(self, connection: _Connection, units: int) -> None:
        connection.released += connection.node.release(units, self._now)
        self._await_finish(connection)

    # Records

    def _await_finish(self, connection: _Connection) -> None:
        at = connection.node.next_finish(self._now)
        if at is not None and at < connection.finish_at:
            connection.finish_at = at
            self._at(at, self._finish, connection)

    def _finish(self, connection: _Connection) -> None:
        connection.finish_at = math.inf
        if connection.node.alive:
            for start, stop in connection.node.finish(self._now):
                self._send(connection, start, stop)
            self._await_finish(connection)

    def _send(self, connection: _Connection, start: int, stop: int) -> None:
        if not connection.node.alive:
            return
        for _ in range(1 + self._happens(self.scenario.faults.doubled_uploads)):
            seconds = (stop - start) * self.scenario.record_bytes / self.scenario.link_bytes_per_s
            self.outcome.way_back_s += seconds
            self._way_back_free = max(self._now, self._way_back_free) + seconds
            self._at(self._way_back_free, self._arrive, connection, self._life, start, stop)

    def _arrive(self, connection: _Connection, life: int, start: int, stop: int) -> None:
        node, core = connection.node, self._core
        if life != self._life or (not node.alive and self._random.random() < 0.5):
            return  # to a coordinator that is no more, or broken off
        if self._timed(core.may_keep, node.number, start, stop):
            size = (stop - start) * self.scenario.record_bytes
            written = self._processed(self.scenario.range_cost_s + size * self.scenario.byte_cost_s)
            self._at(written, self._written, connection, life, start, stop)
        else:
            for begin, end in core.missing(start, stop):
                self._at(self._now + SHORTEST_S, self._send, connection, begin, end)

    def _written(self, connection: _Connection, life: int, start: int, stop: int) -> None:
        number, faults = connection.node.number, self.scenario.faults
        if life != self._life:
            return  # half written: the coordinator that is resumed cuts it off
        if self._happens(faults.lost_uploads):
            self._core.not_kept(number, start, stop)
            self._at(self._now + RETRY_S, self._send, connection, start, stop)
            return
        size = (stop - start) * self.scenario.record_bytes
        self._timed(self._core.kept, number, start, stop, self._now, size)
        if self._disk.add(start, stop) < stop - start:
            raise WorkError(f"some of the units {start} to {stop - 1} were kept twice")
        self.outcome.ranges += 1
        if self._happens(faults.lost_receipts):
            self._at(self._now + RETRY_S, self._send, connection, start, stop)


def simulate_cluster(scenario: ClusterScenario, policy: RangePolicy | None = None) -> ClusterOutcome:
    """Raises `WorkError` when the run does not come to its end, or a unit is kept twice."""
    return ClusterSimulation(scenario, policy).run()
