"""Which member has which slot on the board."""

from __future__ import annotations

from gpuinfer.fleet.roster import Member, Roster
from gpuinfer.fleet.router.board import SLOTS, Board
from gpuinfer.fleet.router.child import Seat


class Seats:
    """A member that has left keeps its slot, and with it its counters, until all others are taken."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self.taken: dict[int, int] = {}  # member id → slot; who has left longest ago first among those who have left

    def seated(self, roster: Roster) -> list[Seat]:
        """All of a roster; those for whom there is no slot are left out."""
        present = {member.id for member in roster.members}
        return [Seat(member, slot) for member in roster.members if (slot := self._slot(member, present)) is not None]

    def _slot(self, member: Member, present: set[int]) -> int | None:
        if member.id in self.taken:
            return self.taken[member.id]
        if len(self.taken) < SLOTS:
            slot = len(self.taken)
        else:
            gone = next((one for one in self.taken if one not in present), None)
            if gone is None:
                return None
            slot = self.taken.pop(gone)
            self._board.clear(slot)
        self.taken[member.id] = slot
        return slot
