"""A batch while it is filled, and the lines that it is filled from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from gpuinfer.api import Request
from gpuinfer.strategies.fairness import FairClients

SLIGHTLY = 1e-6  # rows: no more than what rounding does to a share


class Line:
    """The requests of one class in the order in which they are served: the aged ones, oldest first, then the others."""

    __slots__ = ("_aged", "_fresh", "head", "order", "taken")

    def __init__(self, aged: Sequence[Request], fresh: Sequence[Request], clients: FairClients, dated: bool) -> None:
        """Both are given oldest first."""
        self.taken = 0  # rows
        self._aged, self._fresh = aged, fresh
        self.order: Iterator[Request] = itertools.chain(aged, clients.order(fresh, dated) if fresh else ())
        self.head = next(self.order, None)  # the next request; the others are still in `order`

    @property
    def head_rows(self) -> int:
        """Of the next request; 0 when there is none."""
        return self.head.rows if self.head is not None else 0

    @property
    def oldest(self) -> Request:
        return self._aged[0] if self._aged else self._fresh[0]

    def count(self) -> int:
        """All its rows."""
        return sum(request.rows for request in itertools.chain(self._aged, self._fresh))


class Filling:
    """Rows up to `room`, requests up to `most`. A request that does not fit holds up its own line only."""

    __slots__ = ("chosen", "left", "room", "rows")

    def __init__(self, room: int, most: float = math.inf) -> None:
        self.room = room
        self.rows = 0
        self.chosen: list[Request] = []
        self.left = most

    def take_width(self, lines: Sequence[Line], most: int) -> None:
        """Have room for the next request of each line, up to `most` rows. A block may well be wider than the batches
        that are large enough: those behind it would wait until nobody else comes.
        """
        self.room = max(self.room, min(most, max(line.head_rows for line in lines)))

    def fill(self, line: Line, rows: float, limit: int) -> None:
        """Take from a line, up to `rows` of it in all, while the batch stays within `limit`."""
        room, taken = min(limit - self.rows, rows + SLIGHTLY - line.taken), 0
        head, order, left = line.head, line.order, self.left
        while head is not None and taken + head.rows <= room and left >= 1:
            self.chosen.append(head)
            taken += head.rows
            left -= 1
            head = next(order, None)
        line.head, self.left = head, left
        line.taken += taken
        self.rows += taken

    def top_up(self, lines: Sequence[Line], due: Sequence[float], limit: int, *, stop: bool) -> None:
        """Use what is left, though no class is due all of a block: whoever is due most takes its next one.

        With `stop` whoever is due most and does not fit ends it: what comes free is for that one.
        """
        while self.left >= 1:
            fits = [
                n for n, line in enumerate(lines) if line.head_rows and (stop or line.head_rows + self.rows <= limit)
            ]
            if not fits:
                return
            first = lines[max(fits, key=lambda number: due[number] - lines[number].taken)]
            if first.head_rows + self.rows > limit:
                return
            self.fill(first, first.taken + first.head_rows, limit)
