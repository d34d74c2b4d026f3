"""Room in a full queue: each class has its own, and may use what nobody else needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpuinfer.api import QueueView, Request

CHUNK = 256  # requests looked at in one go


def give_up(queue: QueueView, arriving: Request, shares: Sequence[float]) -> list[Request]:
    """Whom to turn away so that `arriving` fits; nobody when it has no better right to the room.

    The room of a class is its part, of 1, of all the rows that may wait. Only classes that use more than theirs give
    way, the lowest first, and of each the newest requests: to any class that stays within its own room, and else to
    higher classes only.
    """
    rooms = [share * (queue.rows + arriving.rows) for share in shares]
    within = queue.class_rows[arriving.priority] + arriving.rows <= rooms[arriving.priority]
    missing = arriving.rows
    chosen: list[Request] = []
    for number in range(len(rooms) - 1, -1, -1):
        if number == arriving.priority or (number < arriving.priority and not within):
            continue
        over = queue.class_rows[number] - rooms[number]
        if over <= 0:
            continue
        for request in _newest_of(queue.waiting, number):
            chosen.append(request)
            missing -= request.rows
            over -= request.rows
            if missing <= 0:
                return chosen
            if over <= 0:
                break
    return []


def _newest_of(waiting: Sequence[Request], number: int) -> Iterator[Request]:
    """The waiting requests of this class, newest first."""
    for end in range(len(waiting), 0, -CHUNK):
        for request in reversed(waiting[max(0, end - CHUNK) : end]):
            if request.priority == number:
                yield request
