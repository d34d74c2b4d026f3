"""What each class is owed: credits in rows, so that shares hold over time although no block is split.

Deficit counters as in M. Shreedhar and G. Varghese, "Efficient fair queueing using deficit round robin", 1995; that a
class may also run into debt, and pays it back later, is their surplus variant (H. Adiseshu, G. Parulkar, G. Varghese,
"A reliable and scalable striping protocol", 1996). Lists hold one entry for each class, highest first.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

GROUPS_KEPT = 64  # whoever was served longest ago is forgotten, with its credits, once there are more groups


def hand_on(rows: Sequence[float], most: Sequence[float]) -> list[float]:
    """What exceeds a class's `most` goes to the next lower class that can use it, then to the next higher one."""
    result = list(rows)
    for number, limit in enumerate(most):
        surplus = result[number] - limit
        if surplus <= 0:
            continue
        result[number] = limit
        for other in (*range(number + 1, len(result)), *range(number - 1, -1, -1)):
            taken = min(surplus, most[other] - result[other])
            if taken > 0:
                result[other] += taken
                surplus -= taken
    return result


class Credits:
    """How many rows each class is owed (or owes, below 0), separately for each group of requests.

    Credits and debts of a group add up to nothing. Nobody saves credit while it has nothing waiting: it then flows on.
    A debt stays, and is paid from what its class does not use of its share.
    """

    __slots__ = ("_of", "_shares")

    def __init__(self, shares: Sequence[float]) -> None:
        """`shares` are parts of 1. What they leave is for the highest class that waits."""
        self._shares = list(shares)
        self._of: dict[Hashable, list[float]] = {}

    def of(self, group: Hashable) -> Sequence[float]:
        return self._of.get(group) or [0.0] * len(self._shares)

    def due(self, group: Hashable, rows: float, waiting: Sequence[int]) -> list[float]:
        """How many rows of a batch of so many are for each class, when no block were indivisible.

        Its share and its credit, but no more than it has `waiting`. They add up to `rows`, if as many wait.
        """
        entitled = [credit + share * rows for credit, share in zip(self.of(group), self._shares, strict=True)]
        first = next((number for number, some in enumerate(waiting) if some), 0)
        entitled[first] += rows * (1 - sum(self._shares))
        return hand_on(entitled, waiting)

    def settle(self, group: Hashable, served: Sequence[int], waiting: Sequence[int], debt: float) -> None:
        """A batch of these rows was cut; `waiting` says what waited before. Nobody comes to owe more than `debt`.

        Who would owe more, because its small blocks fit where no others do, has had what nobody else could use.
        """
        due = self.due(group, sum(served), waiting)
        self._of.pop(group, None)
        if tuple(served) != tuple(waiting):
            credits = [rows - got for rows, got in zip(due, served, strict=True)]
            self._of[group] = _bounded(credits, debt)
        if len(self._of) > GROUPS_KEPT:
            del self._of[next(iter(self._of))]


def _bounded(credits: list[float], debt: float) -> list[float]:
    forgiven = sum(max(0.0, -debt - credit) for credit in credits)
    if not forgiven:
        return credits
    owed = sum(credit for credit in credits if credit > 0)
    return [credit * (1 - forgiven / owed) if credit > 0 else max(credit, -debt) for credit in credits]
