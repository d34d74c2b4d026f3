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

    __slots__ = ("_aged", "_fresh", "_head", "_order", "taken")

    def __init__(self, aged: Sequence[Request], fresh: Sequence[Request], clients: FairClients, dated: bool) -> None:
        """Both are given oldest first."""
        self.taken = 0  # rows
        self._aged, self._fresh = aged, fresh
        self._order: Iterator[Request] = itertools.chain(aged, clients.order(fresh, dated) if fresh else ())
        self._head = next(self._order, None)

    @property
    def head_rows(self) -> int:
        """Of the next request; 0 when there is none."""
        return self._head.rows if self._head is not None else 0

    @property
    def oldest(self) -> Request:
        return self._aged[0] if self._aged else self._fresh[0]

    def count(self) -> int:
        """All its rows."""
        return sum(request.rows for request in itertools.chain(self._aged, self._fresh))

    def take(self) -> Request:
        """The next request. Raises `LookupError` when there is none."""
        if self._head is None:
            raise LookupError("this line is empty")
        request, self._head = self._head, next(self._order, None)
        self.taken += request.rows
        return request


class Filling:
    """Rows up to `room`, requests up to `most`. A request that does not fit holds up its own line only."""

    __slots__ = ("_left", "chosen", "room", "rows")

    def __init__(self, room: int, most: float = math.inf) -> None:
        self.room = room
        self.rows = 0
        self.chosen: list[Request] = []
        self._left = most

    def fill(self, line: Line, rows: float, limit: int) -> None:
        """Take from a line, up to `rows` of it in all, while the batch stays within `limit`."""
        while 0 < line.head_rows <= min(limit - self.rows, rows + SLIGHTLY - line.taken) and self._left >= 1:
            self._take(line)

    def top_up(self, lines: Sequence[Line], due: Sequence[float], limit: int, *, stop: bool) -> None:
        """Use what is left, though no class is due all of a block: whoever is due most takes its next one.

        With `stop` whoever is due most and does not fit ends it: what comes free is for that one.
        """
        while self._left >= 1:
            fits = [
                n for n, line in enumerate(lines) if line.head_rows and (stop or line.head_rows + self.rows <= limit)
            ]
            if not fits:
                return
            first = lines[max(fits, key=lambda number: due[number] - lines[number].taken)]
            if first.head_rows + self.rows > limit:
                return
            self._take(first)

    def _take(self, line: Line) -> None:
        request = line.take()
        self.chosen.append(request)
        self.rows += request.rows
        self._left -= 1
