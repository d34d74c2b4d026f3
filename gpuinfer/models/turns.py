"""Whose turn at a device it is: how models beside one another share it by weights. Pure decisions, on nobody's clock.

Each model has a clock of its own, of the device time that it has had divided by its share, and the one whose clock is
behind goes first: start-time fair queueing (Goyal, Vin and Cheng 1996). A model that comes back after it wanted nothing
starts where the others are: nobody saves time up, and an idle model's share is the others'. A forward is charged what
the model's last ones took when it begins, and the difference when it ends. For a model that is behind, and that will
want its next turn in a moment, the device is kept for that moment (Iyer and Druschel 2001, "Anticipatory scheduling"):
else whoever is there at once, though ahead, would get every other turn, however short those of the other are.

Where several have work, each forward has all of the device when it is its turn, or they run at once, each on the
model's share of it: whichever `looks` has found to be faster.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuinfer.models.looks import KEPT, Judged, Looks, Way

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
class Member:
    """One model. `had_s`: device time, in seconds of all of the device's room."""

    share: float
    behind: float = 0.0  # its own clock; the lower, the sooner it is its turn
    had_s: float = 0.0
    waited_s: float = 0.0  # forwards, for their turns
    waiting: deque[Turn] = field(default_factory=deque)
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
class Turn:
    """One forward. `widths`: how much of the room it takes in its turn, the least that it can do with, and how much it
    takes alone. `width`: what it has got.
    """

    member: Member
    widths: tuple[int, int, int]
    asked_at: float
    width: int = 0
    began_at: float | None = None  # None: it waits
    charged: float = 0.0

    @property
    def of_all(self) -> bool:
        """Whether it has more of the room than it takes alone: others, who have work, wait for its end."""
        return self.width > self.widths[2]


class Turns:
    """Of one device. `room`: how much may run at once: cores on a CPU, forwards on CUDA.

    Tell it what happens, then ask who is `due`. Times are seconds on any one clock that does not go back.
    """

    def __init__(self, room: int, looks: Looks | None = None, way: Way = Way.TURNS) -> None:
        """`looks` say how models share it; without them they share it in this way."""
        self.room = room
        self._looks, self._way = looks, way
        self.at_once_s = self.together_s = 0.0  # in which several had work; of it, those in which they ran at once
        self._told_at = -math.inf
        self.members: list[Member] = []
        self._free = room
        self._begun = 0.0  # the clock of whoever began last: where those start who come back

    def join(self, share: float) -> Member:
        """A model with this share of the device."""
        self.members.append(Member(share, behind=self._begun))
        return self.members[-1]

    def leave(self, member: Member, now: float) -> None:
        """It is waited for no more. Those of its turns that wait begin now, whoever computes."""
        self.members.remove(member)
        while member.waiting:
            turn = member.waiting.popleft()
            turn.width = turn.widths[0]
            self._begin(turn, now)

    @property
    def way(self) -> Way:
        """How those that have work share it now."""
        return self._way if self._looks is None else self._looks.way

    def judged(self, member: Member) -> Judged:
        """What this model got done in one way and the other."""
        return Judged() if self._looks is None else self._looks.judged.get(id(member), Judged())

    def ask(self, member: Member, width: int, now: float, *, least: int = 1, alone: int | None = None) -> Turn:
        """It wants to run this forward, with so much of the room in its turn, `least` in any case, and `alone` (None:
        as in its turn) while no other model has work.
        """
        self._come_back(member, now)
        widths = (width, min(least, width), width if alone is None else alone)
        turn = Turn(member, tuple(max(1, min(one, self.room)) for one in widths), now)  # type: ignore[arg-type]
        member.waiting.append(turn)
        return turn

    def _come_back(self, member: Member, now: float) -> None:
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

    def done(self, turn: Turn, now: float, *, again: bool = False, work: float = 1.0) -> None:
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

    def _look(self, turn: Turn, now: float, work: float) -> None:
        shares = self._present(now)
        if len(shares) > 1:
            since_s = min(now - self._told_at, PRESENT_S)
            self.together_s += since_s
            self.at_once_s += since_s * (self.way is not Way.TURNS)
        self._told_at = now
        if self._looks is not None and turn.began_at is not None:
            before = self.way
            likely = None if self._can_be_shared(shares) else Way.TURNS
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

    def _width(self, turn: Turn, now: float) -> int:
        """What it takes now."""
        in_turn, least, alone = turn.widths
        shares = self._present(now)
        if len(shares) < 2 or self.way is Way.FREELY:
            return alone
        if self.way is Way.SHARES:
            return max(least, min(alone, int(self.room * shares[id(turn.member)] + ROUNDING)))
        return in_turn

    def has_passed_on(self, turn: Turn) -> bool:
        """Whether the room that this turn had is others' by now."""
        return self._free < turn.width and self.way is not Way.FREELY

    @staticmethod
    def _expected_s(member: Member, again: bool) -> float:
        if again:
            return SURE_S
        if member.pause_s <= min(GUESSED_S / 2, WORTH * member.usual_s):
            return 2 * member.pause_s
        return 0.0

    def due(self, now: float) -> tuple[list[Turn], float]:
        """The turns that begin now, and when to ask again if nothing happens before: for whom the device is kept may
        not come.
        """
        begun: list[Turn] = []
        passed: set[Member] = set()
        alone = len(self.members) < 2 or self.way is Way.FREELY
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

    def _next(self, now: float, passed: set[Member]) -> Member | None:
        """Whose turn it is: of those who wait, and those who are waited for while others wait."""
        if not any(one.waiting for one in self.members):
            return None
        there = [one for one in self.members if one not in passed and (one.waiting or self._is_expected(one, now))]
        return min(there, key=lambda one: one.behind, default=None)

    def _is_expected(self, member: Member, now: float) -> bool:
        while member.kept and now > member.kept[0]:  # it has not come in time
            self._charge_keeping(member, member.kept.popleft())
        return bool(member.kept)

    def _begin(self, turn: Turn, now: float) -> None:
        member = turn.member
        turn.began_at = now
        member.waited_s += now - turn.asked_at
        self._free -= turn.width
        self._begun = max(self._begun, member.behind)
        turn.charged = member.usual_s * turn.width / (self.room * member.share)
        member.behind += turn.charged
        member.running += 1

    def _charge_keeping(self, member: Member, until: float) -> None:
        """The time for which others waited for its sake is its own."""
        if member.kept_from is not None:
            part = max(0.0, until - member.kept_from) * member.usual_width / self.room
            member.behind += part / member.share
            member.kept_from = None
