"""Whose turn at a device it is: how models beside one another share it by weights. Pure decisions, on nobody's clock.

Each model has a clock of its own, of the device time that it has had divided by its share, and the one whose clock is
behind goes first: start-time fair queueing (Goyal, Vin and Cheng 1996). A model that comes back after it wanted nothing
starts where the others are: nobody saves time up, and an idle model's share is the others'. A forward is charged what
the model's last ones took when it begins, and the difference when it ends. For a model that is behind, and that will
want its next turn in a moment, the device is kept for that moment (Iyer and Druschel 2001, "Anticipatory scheduling"):
else whoever is there at once, though ahead, would get every other turn, however short those of the other are.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

RECENT = 0.2  # weight of the latest forward in the means of what they take, and of the pauses between them
SURE_S = 0.010  # for one that has said that it goes on: a generator between two steps
GUESSED_S = 0.005  # for one that most often does, at most
LONG_S = 0.1  # what longer pauses count as, so that they are forgotten soon
WORTH = 0.5  # a pause that is longer than this part of a forward is not waited for


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
    away: deque[float] = field(default_factory=deque)  # since when, of forwards that have ended and not come back
    kept: deque[float] = field(default_factory=deque)  # until when for each forward that is expected, ascending
    kept_from: float | None = None  # since when somebody waits for its sake


@dataclass(eq=False, slots=True)
class Turn:
    """One forward. `width`: how much of the room it takes."""

    member: Member
    width: int
    asked_at: float
    began_at: float | None = None  # None: it waits
    charged: float = 0.0


class Turns:
    """Of one device. `room`: how much may run at once: cores on a CPU, forwards on CUDA.

    Tell it what happens, then ask who is `due`. Times are seconds on any one clock that does not go back.
    """

    def __init__(self, room: int) -> None:
        self.room = room
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
            self._begin(member.waiting.popleft(), now)

    def ask(self, member: Member, width: int, now: float) -> Turn:
        """It wants to run this forward."""
        self._come_back(member, now)
        turn = Turn(member, max(1, min(width, self.room)), now)
        member.waiting.append(turn)
        return turn

    def _come_back(self, member: Member, now: float) -> None:
        if member.away:
            pause_s = min(now - member.away.popleft(), LONG_S)
            known = math.isfinite(member.pause_s)
            member.pause_s = member.pause_s + RECENT * (pause_s - member.pause_s) if known else pause_s
        if self._is_expected(member, now):
            self._charge_keeping(member, now)
            member.kept.popleft()
        elif not (member.waiting or member.running):
            member.behind = max(member.behind, self._begun)

    def done(self, turn: Turn, now: float, *, again: bool = False) -> None:
        """This forward has ended. `again`: the model has said that it wants another at once."""
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
        if (within_s := self._expected_s(member, again)) > 0:
            member.kept.append(max(now + within_s, member.kept[-1] if member.kept else now))

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
        free = self._free if len(self.members) > 1 else math.inf  # alone, it has its own limits
        again_at = math.inf
        while (member := self._next(now, passed)) is not None:
            if member.waiting:
                turn = member.waiting[0]
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
