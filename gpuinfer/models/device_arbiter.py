"""Models that share a device: where their threads wait for it, and whose turn it is.

On a CPU a forward has all cores in its turn, or models run at once, each on a share of them; on CUDA one forward has
the device, or a few run at once on streams of their own. Which is faster is measured while they run
(`sharing_experiment`). Turns follow start-time fair queueing (Goyal, Vin and Cheng 1996): each model has a clock of the
device time that it has had divided by its share, and the one whose clock is behind goes first. For a model that is
behind, and that will want its next turn in a moment, the device is kept for that moment (Iyer and Druschel 2001,
"Anticipatory scheduling").
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from gpuinfer.api import Setup
from gpuinfer.host import machine
from gpuinfer.models.sharing_experiment import KEPT, PairStatistics, SharingExperiment, SharingWay

RECENT = 0.2  # weight of the latest forward in the means of what they take, and of the pauses between them
SURE_S = 0.010  # for one that has said that it goes on: a generator between two steps
GUESSED_S = 0.005  # for one that most often does, at most
LONG_S = 0.1  # what longer pauses count as, so that they are forgotten soon
WORTH = 0.5  # a pause that is longer than this part of a forward is not waited for
ROUNDING = 1e-9
PRESENT_S = 0.1  # since its last forward: so long a model counts among those that have work, at least
PRESENT = 3  # times what a forward takes: so long too, as on a busy machine all takes longer
OFTEN = 0.25  # so often a model comes back soon which is waited for with its share of the room: text pauses for prompts


@dataclass(eq=False, slots=True)
class SharingModel:
    """One model. `had_s`: device time, in seconds of all of the device's room."""

    share: float
    behind: float = 0.0  # its own clock; the lower, the sooner it is its turn
    had_s: float = 0.0
    waited_s: float = 0.0  # forwards, for their turns
    waiting: deque[DeviceTurn] = field(default_factory=deque)
    running: int = 0
    usual_s: float = 0.0  # of a forward
    usual_width: int = 1
    pause_s: float = math.inf  # between two of its forwards
    soon: float = 0.0  # how often it comes back within the time of a forward: a mean of 0 and 1
    away: deque[float] = field(default_factory=deque)  # since when, of forwards that have ended and not come back
    kept: deque[float] = field(default_factory=deque)  # until when for each forward that is expected, ascending
    kept_from: float | None = None  # since when somebody waits for its sake
    ended_at: float = -math.inf  # its last forward

    def present(self, now: float) -> bool:
        """Whether it has work, or had some a moment ago and most often comes back at once. Cores are not kept for one
        whose forwards are few.
        """
        if self.waiting or self.running:
            return True
        return self.soon > OFTEN and now - self.ended_at <= max(PRESENT_S, PRESENT * self.usual_s)


@dataclass(eq=False, slots=True)
class DeviceTurn:
    """One forward. `widths`: how much of the room it takes in its turn, the least that it can do with, and how much it
    takes alone. `width`: what it has got.
    """

    member: SharingModel
    widths: tuple[int, int, int]
    asked_at: float
    width: int = 0
    began_at: float | None = None  # None: it waits
    charged: float = 0.0

    @property
    def of_all(self) -> bool:
        """Whether it has more of the room than it takes alone: others, who have work, wait for its end."""
        return self.width > self.widths[2]


class FairScheduler:
    """Of one device. `room`: how much may run at once: cores on a CPU, forwards on CUDA.

    Tell it what happens, then ask who is `due`. Times are seconds on any one clock that does not go back.
    """

    def __init__(self, room: int, looks: SharingExperiment | None = None, way: SharingWay = SharingWay.TURNS) -> None:
        """`looks` say how models share it; without them they share it in this way."""
        self.room = room
        self._looks, self._way = looks, way
        self.at_once_s = self.together_s = 0.0  # in which several had work; of it, those in which they ran at once
        self._told_at = -math.inf
        self.members: list[SharingModel] = []
        self._free = room
        self._begun = 0.0  # the clock of whoever began last: where those start who come back

    def join(self, share: float) -> SharingModel:
        """A model with this share of the device."""
        self.members.append(SharingModel(share, behind=self._begun))
        return self.members[-1]

    def leave(self, member: SharingModel, now: float) -> None:
        """It is waited for no more. Those of its turns that wait begin now, whoever computes."""
        self.members.remove(member)
        while member.waiting:
            turn = member.waiting.popleft()
            turn.width = turn.widths[0]
            self._begin(turn, now)

    @property
    def way(self) -> SharingWay:
        """How those that have work share it now."""
        return self._way if self._looks is None else self._looks.way

    def judged(self, member: SharingModel) -> PairStatistics:
        """What this model got done in one way and the other."""
        return PairStatistics() if self._looks is None else self._looks.judged.get(id(member), PairStatistics())

    def ask(
        self, member: SharingModel, width: int, now: float, *, least: int = 1, alone: int | None = None
    ) -> DeviceTurn:
        """It wants to run this forward, with so much of the room in its turn, `least` in any case, and `alone` (None:
        as in its turn) while no other model has work.
        """
        self._come_back(member, now)
        widths = (width, min(least, width), width if alone is None else alone)
        turn = DeviceTurn(member, tuple(max(1, min(one, self.room)) for one in widths), now)  # type: ignore[arg-type]
        member.waiting.append(turn)
        return turn

    def _come_back(self, member: SharingModel, now: float) -> None:
        if member.away:
            pause_s = min(now - member.away.popleft(), LONG_S)
            soon = float(pause_s <= max(member.usual_s, GUESSED_S))
            known = math.isfinite(member.pause_s)
            member.soon = member.soon + RECENT * (soon - member.soon) if known else soon
            member.pause_s = member.pause_s + RECENT * (pause_s - member.pause_s) if known else pause_s
        if self._is_expected(member, now):
            self._charge_keeping(member, now)
            member.kept.popleft()
        elif not (member.waiting or member.running):
            member.behind = max(member.behind, self._begun)

    def done(self, turn: DeviceTurn, now: float, *, again: bool = False, work: float = 1.0) -> None:
        """This forward has ended, which has done so much `work`, in whatever the model counts its own by. `again`: the
        model has said that it wants another at once.
        """
        member = turn.member
        began_at = now if turn.began_at is None else turn.began_at
        seconds = now - began_at
        member.running -= 1
        self._free += turn.width
        part = seconds * turn.width / self.room
        member.had_s += part
        member.behind += part / member.share - turn.charged
        member.usual_s += RECENT * (seconds - member.usual_s) if member.usual_s else seconds
        member.usual_width = turn.width
        member.away.append(now)
        member.ended_at = now
        self._look(turn, now, work)
        if (within_s := self._expected_s(member, again)) > 0:
            member.kept.append(max(now + within_s, member.kept[-1] if member.kept else now))

    def _look(self, turn: DeviceTurn, now: float, work: float) -> None:
        shares = self._present(now)
        if len(shares) > 1:
            since_s = min(now - self._told_at, PRESENT_S)
            self.together_s += since_s
            self.at_once_s += since_s * (self.way is not SharingWay.TURNS)
        self._told_at = now
        if self._looks is not None and turn.began_at is not None:
            before = self.way
            likely = None if self._can_be_shared(shares) else SharingWay.TURNS
            self._looks.ended(id(turn.member), turn.began_at, now, work, shares, likely)
            if self.way is not before:  # at once each has what it can use: nobody owes anybody anything
                latest = max(one.behind for one in self.members)
                for one in self.members:
                    one.behind = latest

    def _present(self, now: float) -> Mapping[int, float]:
        """The parts that are due to those that have work."""
        there = [one for one in self.members if one.present(now)]
        total = math.fsum(one.share for one in there)
        return {id(one): one.share / total for one in there}

    def _can_be_shared(self, shares: Mapping[int, float]) -> bool:
        """Whether at once each has what is due to it: shares may be no whole parts of the room. Where there are more
        than can run at once they wait for one another, by their shares.
        """
        parts = {one: max(1, int(self.room * share + ROUNDING)) for one, share in shares.items()}
        over = sum(parts.values()) > self.room
        return over or all(part >= KEPT * self.room * shares[one] for one, part in parts.items())

    def _width(self, turn: DeviceTurn, now: float) -> int:
        """What it takes now."""
        in_turn, least, alone = turn.widths
        shares = self._present(now)
        if len(shares) < 2 or self.way is SharingWay.FREELY:
            return alone
        if self.way is SharingWay.SHARES:
            return max(least, min(alone, int(self.room * shares[id(turn.member)] + ROUNDING)))
        return in_turn

    def has_passed_on(self, turn: DeviceTurn) -> bool:
        """Whether the room that this turn had is others' by now."""
        return self._free < turn.width and self.way is not SharingWay.FREELY

    @staticmethod
    def _expected_s(member: SharingModel, again: bool) -> float:
        if again:
            return SURE_S
        if member.pause_s <= min(GUESSED_S / 2, WORTH * member.usual_s):
            return 2 * member.pause_s
        return 0.0

    def due(self, now: float) -> tuple[list[DeviceTurn], float]:
        """The turns that begin now, and when to ask again if nothing happens before: for whom the device is kept may
        not come.
        """
        begun: list[DeviceTurn] = []
        passed: set[SharingModel] = set()
        alone = len(self.members) < 2 or self.way is SharingWay.FREELY
        free = math.inf if alone else self._free  # alone, it has its own limits
        again_at = math.inf
        while (member := self._next(now, passed)) is not None:
            if member.waiting:
                turn = member.waiting[0]
                turn.width = self._width(turn, now)
                if turn.width > free:  # nobody goes before it: that could go on for ever
                    break
                member.waiting.popleft()
                self._begin(turn, now)
                begun.append(turn)
                free -= turn.width
            else:
                passed.add(member)
                free -= member.usual_width * len(member.kept)
                again_at = min(again_at, member.kept[0])
                member.kept_from = now if member.kept_from is None else member.kept_from
        return begun, again_at

    def _next(self, now: float, passed: set[SharingModel]) -> SharingModel | None:
        """Whose turn it is: of those who wait, and those who are waited for while others wait."""
        if not any(one.waiting for one in self.members):
            return None
        there = [one for one in self.members if one not in passed and (one.waiting or self._is_expected(one, now))]
        return min(there, key=lambda one: one.behind, default=None)

    def _is_expected(self, member: SharingModel, now: float) -> bool:
        while member.kept and now > member.kept[0]:  # it has not come in time
            self._charge_keeping(member, member.kept.popleft())
        return bool(member.kept)

    def _begin(self, turn: DeviceTurn, now: float) -> None:
        member = turn.member
        turn.began_at = now
        member.waited_s += now - turn.asked_at
        self._free -= turn.width
        self._begun = max(self._begun, member.behind)
        turn.charged = member.usual_s * turn.width / (self.room * member.share)
        member.behind += turn.charged
        member.running += 1

    def _charge_keeping(self, member: SharingModel, until: float) -> None:
        """The time for which others waited for its sake is its own."""
        if member.kept_from is not None:
            part = max(0.0, until - member.kept_from) * member.usual_width / self.room
            member.behind += part / member.share
            member.kept_from = None


AT_ONCE = 2  # forwards on a CUDA device: the copies of one behind the kernels of the other
STATION = "turn"  # of the time ledger: ready to compute, while others do

Enter = Callable[[str], None]


class DeviceArbiter:
    """One device, or several that are used as one. Every model that computes there has a `Place`."""

    def __init__(
        self,
        room: int,
        *,
        of_cores: bool = True,
        looks: SharingExperiment | None = None,
        way: SharingWay = SharingWay.TURNS,
    ) -> None:
        """`room`: cores, or forwards that may run at once. `looks` and `way`: see `Turns`."""
        self.of_cores = of_cores
        self._turns = FairScheduler(room, looks, way)
        self._changed = threading.Condition()
        self._again_at = float("inf")

    def join(self, share: float = 1.0, *, fixed: bool = False) -> DeviceSlot:
        """A model beside those that are there, with this share of the device among them. From any thread.

        `fixed`: a forward has as many cores as it wants, and never fewer.
        """
        with self._changed:
            return DeviceSlot(self, self._turns.join(share), fixed=fixed)

    def _settle(self) -> None:
        """Let those go whose turn it is. With the lock."""
        begun, again_at = self._turns.due(time.perf_counter())
        if begun or again_at < self._again_at:
            self._changed.notify_all()
        self._again_at = again_at

    def _wait(self, turn: DeviceTurn) -> None:
        """With the lock, until this turn has begun."""
        while turn.began_at is None:
            left_s = self._again_at - time.perf_counter()
            if left_s <= 0:
                self._settle()
            else:
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))


class DeviceSlot:
    """One model's way through a gate: `begin` before each forward, `end` after it, from any number of threads."""

    def __init__(self, gate: DeviceArbiter, member: SharingModel, *, fixed: bool = False) -> None:
        self._gate, self._member, self._fixed = gate, member, fixed
        self._open = True

    def begin(self, cores: int, enter: Enter) -> DeviceTurn | None:
        """Wait for the turn of a forward on so many cores, or on fewer: `cores_of` tells how many it has got. None for
        a model that is being closed.

        `enter` is told the station of the time ledger while it waits.
        """
        gate = self._gate
        with gate._changed:
            if not self._open:
                return None
            now = time.perf_counter()
            if gate.of_cores:
                turn = gate._turns.ask(self._member, cores, now, least=cores if self._fixed else 1)
            else:
                turn = gate._turns.ask(self._member, gate._turns.room, now, alone=1)
            gate._settle()
            if turn.began_at is None:
                enter(STATION)
                gate._wait(turn)
            return turn

    def cores_of(self, turn: DeviceTurn | None, wanted: int) -> int:
        """How many cores a forward has that wanted so many."""
        return wanted if turn is None or not self._gate.of_cores else min(wanted, turn.width)

    def has_all(self, turn: DeviceTurn | None) -> bool:
        """Whether a CUDA device is this forward's alone until it ends, and another model's then: what it has launched
        must be done.
        """
        return turn is not None and turn.of_all

    def end(self, turn: DeviceTurn | None, *, again: bool = False, work: float = 1.0) -> bool:
        """The forward is over, and has done so much `work` (rows, tokens: always the same). `again`: the next one comes
        at once, so that its turn may be kept for it. Whether other models have its part of the device meanwhile.
        """
        if turn is None:
            return False
        gate = self._gate
        with gate._changed:
            gate._turns.done(turn, time.perf_counter(), again=again and self._open, work=work)
            gate._settle()
            return gate._turns.has_passed_on(turn)

    @contextmanager
    def turn(self, cores: int, enter: Enter, *, work: float = 1.0) -> Iterator[int]:
        """`begin` and `end` around one forward; yields how many cores it has got."""
        turn = self.begin(cores, enter)
        try:
            yield self.cores_of(turn, cores)
        finally:
            self.end(turn, work=work)

    def leave(self) -> None:
        """The model is being closed: nobody waits for it any more, and it for nobody."""
        gate = self._gate
        with gate._changed:
            if self._open:
                self._open = False
                gate._turns.leave(self._member, time.perf_counter())
                gate._settle()
                gate._changed.notify_all()

    def told(self) -> Mapping[str, float]:
        """Sums: what it has had of the device, in seconds of all of it, and for how long its forwards waited for that;
        for how long several models had work, and ran at once; what pairs of looks found (`looks.Judged`).
        """
        turns = self._gate._turns
        judged = turns.judged(self._member)
        return {
            "had_s": self._member.had_s,
            "waited_s": self._member.waited_s,
            "together_s": turns.together_s,
            "at_once_s": turns.at_once_s,
            "pairs": judged.pairs,
            "pair_logs": judged.logs,
            "pair_squares": judged.squares,
        }


class UnsharedSlot(DeviceSlot):
    """Of a model that waits for nobody: its forwards run beside those of others, at once."""

    def __init__(self) -> None:
        pass

    def begin(self, cores: int, enter: Enter) -> DeviceTurn | None:
        """At once."""
        return None

    def end(self, turn: DeviceTurn | None, *, again: bool = False, work: float = 1.0) -> bool:
        """Nobody has waited for it."""
        return False

    def cores_of(self, turn: DeviceTurn | None, wanted: int) -> int:
        """As many as it wants."""
        return wanted

    def leave(self) -> None:
        """From nowhere."""

    def told(self) -> Mapping[str, float]:
        """Nothing is known."""
        return {}


def arbiter_of(setup: Setup, *, free: bool = False) -> DeviceArbiter:
    """Of the devices that a run names, used as one: on a CPU as wide as this process's share of the cores.

    `free`: models compute at once, each as if it were alone, but for looks at what turns would bring.
    """
    if machine.wants_cuda(setup.devices):
        count = sum(machine.cuda_devices() if name in ("cuda", "all") else 1 for name in setup.devices)
        return _arbiter(AT_ONCE * count, SharingWay.SHARES, free=free, of_cores=False, looking=count == 1)
    room = max(1, machine.cores() // setup.processes)
    return _arbiter(room, SharingWay.TURNS, free=free, of_cores=True, looking=room > 1, likely=SharingWay.SHARES)


def _arbiter(
    room: int, way: SharingWay, *, free: bool, of_cores: bool, looking: bool, likely: SharingWay = SharingWay.TURNS
) -> DeviceArbiter:
    """`way`: where no looks are taken, as they could not differ, or would hold a device up for another's sake. `likely`
    is the faster one in most cases: a forward seldom gets twice as fast on twice as many cores.
    """
    if free:
        return DeviceArbiter(
            room,
            of_cores=of_cores,
            looks=SharingExperiment(SharingWay.TURNS, SharingWay.FREELY, SharingWay.FREELY) if looking else None,
            way=SharingWay.FREELY,
        )
    looks = SharingExperiment(SharingWay.TURNS, SharingWay.SHARES, likely=likely) if looking else None
    return DeviceArbiter(room, of_cores=of_cores, looks=looks, way=way)
