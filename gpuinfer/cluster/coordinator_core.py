"""What a coordinator decides: who gets which range, how long, and who is lost. Without a clock and without I/O.

Two drivers stand on it: the coordinator (`cluster.coordinator`) and the simulator's virtual clock (`lab.simulate`). A
driver reports what happened, and when; the core decides. A unit that was read from the Division is at each moment kept,
held by one node or by two, being kept, or pending: nothing is ever lost.

*How large a range is.* As much as the node finishes in `target_s`, by the rate that was measured; a first range is
small. Near the end a node gets a share of what is left, in proportion to its rate and divided by `guided` (guided
self-scheduling: Polychronopoulos and Kuck 1987; weighted factoring: Hummel et al. 1996), so that all end at one time.
More is leased as soon as what a node has not begun would not last it until the exchange after the next. But a node
whose workload begins all that it gets at once has never enough, and what is begun cannot be released: so no node has
more under way than its share of all that is unfinished, as soon as the run's end is known.

*What when nothing is left.* Nodes that would take longer than all together are requested to release what they have not
begun (work stealing, in two steps: only the node knows what it has not begun). What a silent or late node has begun is
leased to an idle one as well (backup tasks: Dean and Ghemawat 2004): whole ranges, since a node sends the records of
whole ones. The first that come are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from gpuinfer.cluster.ledger import IntervalSet, RangeSet
from gpuinfer.cluster.node_state import LostNode, NodeFigures, NodeState, Presence, describe_node
from gpuinfer.cluster.range_policy import Grant, RangePolicy
from gpuinfer.cluster.run_counts import Counts, RangeCounts
from gpuinfer.division import Interval, WorkRange

REMEMBERED = 10_000  # nodes that are gone, for the report


class CoordinatorCore:
    """The units of one run. Not thread-safe. `now` is in seconds and never goes back.

    A node that is unknown, because it has left or is lost, is granted nothing; records that it brings are welcome
    as long as there are none. `total`: of units, None while it is not known; `kept`: by an earlier run.
    """

    def __init__(self, policy: RangePolicy | None = None, *, total: int | None, kept: Sequence[Interval] = ()) -> None:
        self.policy = policy or RangePolicy()
        self._total = total
        self._ended = False
        self._open_until: int | None = None
        self._kept = IntervalSet(kept)
        self._seen = IntervalSet(kept)  # kept, or read from the Division
        self._keeping = IntervalSet()
        self._copied = IntervalSet()  # held by two nodes
        self._pending = RangeSet()
        self._unheld = RangeSet()  # being kept, of nodes that hold it no more: pending if that fails
        self._reading = 0
        self._item_units = self._item_bytes = 0  # of all units that were read and have items
        self._record_units = self._record_bytes = 0  # of all whose records came over the wire
        self._nodes: dict[int, NodeState] = {}
        self._gone: dict[int, NodeState] = {}
        self._rates = 0.0  # of all nodes that have one, together
        self._rated = 0  # how many have
        self._parallel = 0  # of those together
        self._checked: float | None = None  # the last `expire`
        self._balanced = float("-inf")  # when it was last looked who has too much
        self._summed, self._summed_at = 0, float("-inf")  # of `_unfinished`
        self._late: list[int] = []  # nodes whose ranges are to be copied, as of `_balanced`
        self._duplicates = 0
        self._returned = self._stolen = self._copies = 0  # ranges

    # Nodes

    def join(self, node: int, now: float, *, name: str, parallel: int = 1) -> None:
        """A node that has nothing. `parallel`: units that it works on at once: it needs as many at hand."""
        self.leave(node, now)
        self._nodes[node] = NodeState(node, name, max(1, parallel), now, now, now)

    def leave(self, node: int, now: float) -> None:
        """In order, or found dead: what it holds is pending again. Records under way may still be `kept`."""
        self._remove(node, "left")

    def _remove(self, node: int, presence: Presence) -> int:
        """How many units it held."""
        state = self._nodes.pop(node, None)
        if state is None:
            return 0
        self._count_rate(state, -1)
        self._reading -= state.reading
        held = state.holds.units
        state.taken_ranges += len(state.holds)
        self._returned += len(state.holds)
        for work in list(state.holds):
            self._give_back(state, work.start, work.stop)
        state.presence, state.on_hand = presence, 0
        while len(self._gone) >= REMEMBERED:
            self._gone.pop(next(iter(self._gone)))
        self._gone[node] = state
        return held

    def knows(self, node: int) -> bool:
        """Whether it has joined and is not gone."""
        return node in self._nodes

    def heard(self, node: int, now: float, done: int, on_hand: int, parallel: int | None = None) -> None:
        """`done`: units finished since it joined. `on_hand`: those leased to it that it has not begun. `parallel`: as
        in `join`, where that has changed.
        """
        if (state := self._nodes.get(node)) is not None:
            self._count_rate(state, -1)
            state.parallel = max(1, parallel or state.parallel)
            state.observe(now, done, on_hand)
            self._count_rate(state, +1)

    def answering(self, node: int, now: float) -> None:
        """It waits for the answer to an exchange, such as while a disk is slow: that is no silence of its own."""
        if (state := self._nodes.get(node)) is not None:
            state.answering_at = now

    def _count_rate(self, state: NodeState, sign: int) -> None:
        if per_s := state.rate.per_s:
            self._rates += sign * per_s
            self._rated += sign
            self._parallel += sign * state.parallel
            if not self._rated:
                self._rates = 0.0  # without the rounding errors of the sum

    def expire(self, now: float) -> list[LostNode]:
        """Nodes that are lost or hung: their ranges are pending again. To be called once a second or so.

        After a longer pause the process itself was suspended, and the time counts against no node.
        """
        policy = self.policy
        paused = 0.0 if self._checked is None else now - self._checked
        self._checked = now
        if paused > policy.lost_s / 3:
            for state in self._nodes.values():
                state.heard_at = min(now, state.heard_at + paused)
                state.progress_at = min(now, state.progress_at + paused)
        found = []
        for state in list(self._nodes.values()):
            silent, quiet = now - state.silent_since, now - state.progress_at
            if silent > policy.lost_s:
                found.append(self._lose(state, "lost", f"no word from it for {silent:.0f} s"))
            elif not state.holds:
                continue
            elif not state.rate.per_s and quiet > policy.first_unit_s:
                found.append(self._lose(state, "hung", f"it has not finished one unit in {quiet:.0f} s"))
            elif state.rate.per_s and quiet > max(policy.hung_least_s, policy.hung_times * state.unit_s):
                usual = f"though one took {state.unit_s:.3g} s before"
                found.append(self._lose(state, "hung", f"no unit finished for {quiet:.0f} s, {usual}"))
        return found

    def _lose(self, state: NodeState, presence: Presence, reason: str) -> LostNode:
        since = state.progress_at if presence == "hung" else state.silent_since
        return LostNode(state.number, state.name, presence, reason, self._remove(state.number, presence), since)

    # Ranges

    def grant(self, node: int, now: float) -> Grant:
        """What it is granted now, at the end of an exchange, after `heard` and `released`.

        Its `fresh` units count as read until its next `grant`. Fewer may be leased.
        """
        state = self._nodes.get(node)
        if state is None:
            return Grant()
        self._reading -= state.reading
        state.reading = 0
        wanted = self._wanted(state, now)
        if not wanted:
            release, state.to_release = min(state.to_release, state.on_hand), 0
            state.releasing += release
            return Grant(release=release)
        state.to_release = 0
        ranges = self._pending.take(wanted, self.policy.block)
        short = wanted - sum(map(len, ranges))
        unread = self._unread()
        fresh = short if unread is None else min(short, unread)
        if not ranges and not fresh:
            state.starved = True
            ranges = self._balance(state, now)
        for work in ranges:
            state.hold(work, now)
        state.reading = fresh
        self._reading += fresh
        return Grant(ranges, fresh)

    def lease(self, node: int, work: WorkRange, now: float) -> None:
        """A range from the Division, which may be empty, is with this node. Pending, if the node is gone by now.

        Raises `ValueError` if one of its units was read before, or kept by an earlier run.
        """
        if self._seen.overlap(work.start, work.stop):
            raise ValueError(f"units {work.start} to {work.stop - 1}: the Division has read some of them twice")
        if not len(work):
            return
        self._seen.add(work.start, work.stop)
        self._item_units += len(work.items)
        self._item_bytes += sum(map(len, work.items))
        state = self._nodes.get(node)
        if state is None:
            self._pending.add(work)
            return
        read = min(state.reading, len(work))
        state.reading -= read
        self._reading -= read
        state.hold(work, now)

    def released(self, node: int, start: int, stop: int) -> None:
        """A node gives these units back, which it has not begun."""
        if (state := self._nodes.get(node)) is not None:
            units = self._give_back(state, start, stop)
            state.leased -= units
            state.taken_ranges += units > 0
            self._stolen += units > 0

    def _give_back(self, state: NodeState, start: int, stop: int) -> int:
        """It holds these units no more: those that no other node holds are pending. How many it had held."""
        found = state.cut(start, stop)
        for work in found:
            alone = self._copied.gaps(work.start, work.stop)
            self._copied.remove(work.start, work.stop)
            for begin, end in alone:
                for one, other in self._keeping.within(begin, end):
                    self._unheld.add(work.part(one, other))
                for one, other in self._keeping.gaps(begin, end):
                    self._pending.add(work.part(one, other))
        return sum(map(len, found))

    def open_until(self, unit: int | None) -> None:
        """Units from this one on cannot be read yet, as `Division.open_until` says: ranges get smaller towards it."""
        self._open_until = unit

    def expect(self, total: int) -> None:
        """The run has so many units, some of which may not have been read yet."""
        if self._total is None:
            self._total = total

    def ended_input(self, total: int) -> None:
        """The Division has no more units; the run has so many."""
        self._total, self._ended = total, True

    # Records

    def may_keep(self, node: int, start: int, stop: int) -> bool:
        """Whether records of these units are to be kept; from then until `kept` or `not_kept` no others are.

        Not where one of the units has been kept, is being kept, or was never leased: those of the others that are
        `missing` may be sent again alone.
        """
        state = self._nodes.get(node)
        here = start < stop and self._seen.overlap(start, stop) == stop - start
        again = self._kept.overlap(start, stop) + self._keeping.overlap(start, stop)
        if here and not again:
            self._keeping.add(start, stop)
            for work in self._pending.cut(start, stop):
                self._unheld.add(work)
            return True
        self._duplicates += again
        if state is not None:
            state.duplicates += again
            for begin, end in self._keeping.within(start, stop):
                self._give_back(state, begin, end)
        return False

    def missing(self, start: int, stop: int) -> list[Interval]:
        """Those of these units whose records are neither kept nor being kept."""
        return [
            gap
            for begin, end in self._seen.within(start, stop)
            for between in self._kept.gaps(begin, end)
            for gap in self._keeping.gaps(*between)
        ]

    def kept(self, node: int, start: int, stop: int, now: float, size: int = 0) -> int:
        """The records of these units are on the disk. `size`: their bytes, where they came over the wire. How many of
        the units had not been kept before.
        """
        self._record_units += stop - start if size else 0
        self._record_bytes += size
        self._keeping.remove(start, stop)
        new = self._kept.add(start, stop)
        self._unheld.cut(start, stop)
        state = self._nodes.get(node)
        own = sum(map(len, state.cut(start, stop, now))) if state is not None else 0
        if own < stop - start or self._copied.overlap(start, stop):
            for other in self._nodes.values():
                other.cut(start, stop)
            self._copied.remove(start, stop)
        if state is not None:
            state.progress_at = now
        if (bringer := state or self._gone.get(node)) is not None:
            bringer.kept += new
        return new

    def not_kept(self, node: int, start: int, stop: int) -> None:
        """The records of these units did not come, or could not be kept: the reservation of `may_keep` ends.

        The node still holds them, and may send them again. If it does not, say `released`.
        """
        self._keeping.remove(start, stop)
        for work in self._unheld.cut(start, stop):
            self._pending.add(work)

    # What there is to see

    @property
    def over(self) -> bool:
        """Whether all units are kept."""
        return self._total is not None and self._kept.units >= self._total

    @property
    def kept_intervals(self) -> Iterator[Interval]:
        """The maximal intervals of the units that are kept, ascending."""
        return iter(self._kept)

    @property
    def counts(self) -> Counts:
        kept, keeping, pending = self._kept.units, self._keeping.units, self._pending.units
        leased = self._seen.units - kept - keeping - pending
        return Counts(self._total, kept, keeping, leased, pending, self._copied.units, self._duplicates)

    @property
    def nodes(self) -> list[NodeFigures]:
        """Of all nodes by number, those that are gone too."""
        return [
            describe_node(self._nodes.get(number) or self._gone[number]) for number in sorted(self._nodes | self._gone)
        ]

    @property
    def range_counts(self) -> RangeCounts:
        states = (*self._nodes.values(), *self._gone.values())
        kept, held_s = sum(state.ranges for state in states), sum(state.range_s for state in states)
        return RangeCounts(kept, held_s, self._returned, self._stolen, self._copies)

    # Sizes

    def _unread(self) -> int | None:
        """Units that the Division still has and that are not being read. None: unknown."""
        if self._ended:
            return 0
        if (until := self._open_until) is not None and (self._total is None or until < self._total):
            return max(0, until - self._seen.overlap(0, until) - self._reading)
        return None if self._total is None else max(0, self._total - self._seen.units - self._reading)

    def _speed(self, state: NodeState, now: float) -> float:
        """Units a second: as measured, else as others, and at most what a node that has finished none can have."""
        if per_s := state.rate.per_s:
            return per_s
        usual = self._rates / self._rated if self._rated else 1.0
        waited = now - state.progress_at if state.holds else 0.0
        return min(usual, max(1, state.under_way) / waited) if waited else usual

    def _wanted(self, state: NodeState, now: float) -> int:
        """Units that it should be granted, if there are as many. 0: it has enough until the exchange after the next."""
        policy, per_s = self.policy, state.rate.per_s
        enough = state.parallel + ceil(1.5 * policy.exchange_s * per_s)
        if state.on_hand >= enough:
            return 0
        size = max(2 * state.parallel if not per_s else round(policy.target_s * per_s), enough - state.on_hand)
        at_least = round(per_s * policy.exchange_s)  # what it does until the next exchange
        nodes = len(self._nodes)
        if self._item_bytes:  # a node holds three ranges, about: one is sent, one computed, one is not begun
            most_units = policy.held_bytes * self._item_units / self._item_bytes / nodes
            size = min(size, max(round(most_units / 3), at_least))
        if self._record_bytes:
            size = min(size, round(policy.record_bytes * self._record_units / self._record_bytes))
        unread = self._unread()
        if unread is not None:
            left = self._pending.units + unread
            usual = self._rates / self._rated if self._rated else 1.0
            here = self._rates + (nodes - self._rated) * usual
            expected = here * max(nodes, policy.nodes) / nodes
            part = self._speed(state, now) / expected
            size = min(size, max(ceil(left * part / policy.guided), at_least))
            # Of nodes that have not come yet, only the first grants keep the share.
            fair = self._unfinished(left, now) * part * (expected / here if per_s else 1.0)
            room = max(ceil(fair), at_least) - state.unfinished
            if room <= 0:
                state.starved = True
                return 0
            size = min(size, room)
        size = max(size, policy.least)
        return min(size + -size % policy.block, policy.most)

    def _unfinished(self, left: int, now: float) -> int:
        """Units of the run that no node has finished, by their last exchanges; `left` are with none. Grants change
        nothing of it, so that it is not added up for each.
        """
        if now - self._summed_at >= self.policy.exchange_s / 2:
            self._summed_at = now
            self._summed = left + sum(state.unfinished for state in self._nodes.values())
        return max(left, self._summed)

    # The end

    def _balance(self, idle: NodeState, now: float) -> list[WorkRange]:
        """There is nothing for this node: ask others to release some, or copy what is late."""
        policy = self.policy
        if now - self._balanced >= policy.exchange_s / 2:
            self._balanced = now
            self._plan_releases(now)
            self._late = [number for number, state in self._nodes.items() if self._is_late(state, now)]
        if not policy.backup or idle.on_hand or idle.number in self._late:
            return []
        while self._late:
            late = self._nodes.get(self._late[-1])
            if late is not None:
                for work in reversed(list(late.holds)):
                    if self._copied.overlap(work.start, work.stop) or self._keeping.overlap(work.start, work.stop):
                        continue
                    self._copied.add(work.start, work.stop)
                    late.taken_ranges += 1
                    self._copies += 1
                    return [work]
            self._late.pop()
        return []

    def _plan_releases(self, now: float) -> None:
        """Each node keeps as much as it finishes in the time that all need together for what no node has begun."""
        margin = self.policy.exchange_s  # until its next exchange
        here = [state for state in self._nodes.values() if now - state.silent_since <= self.policy.silent_s]
        speeds = [self._speed(state, now) for state in here]
        even_s = sum(state.ready for state in here) / sum(speeds) if here else 0.0
        for state, per_s in zip(here, speeds, strict=True):
            if state.ready > (even_s + margin) * per_s:
                state.to_release += state.ready - int(even_s * per_s)

    def _is_late(self, state: NodeState, now: float) -> bool:
        """Whether what it has begun should be leased to another node as well."""
        policy = self.policy
        if not state.holds:
            return False
        if now - state.silent_since > policy.silent_s:
            return True
        margin = 2 * policy.exchange_s
        if state.rate.per_s and now - state.progress_at > policy.backup_times * state.unit_s + margin:
            return True
        usual_s = self._parallel / self._rates if self._rated else float("inf")
        return state.under_way / self._speed(state, now) > policy.backup_times * usual_s + margin
