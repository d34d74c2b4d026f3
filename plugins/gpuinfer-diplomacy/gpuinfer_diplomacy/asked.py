"""Legal orders → what an answer must match, so that whatever it says is a legal set of orders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from math import comb

from gpuinfer.generation import Constraint, Listed
from gpuinfer_diplomacy.board import Position

BEGIN, END = "<orders>", "</orders>"
BETWEEN = ", "  # orders that are given together, on one line
MOST_SETS = 2000  # of disbands that go together


def asked(position: Position, power: str, begin: str) -> Constraint:
    """One order for each unit at most; of builds and disbands as many as are due at most.

    An empty `begin`: the list begins with the answer.
    """
    return Constraint(listed=Listed(items=tuple(items(position, power)), begin=begin, end=END))


def items(position: Position, power: str) -> Iterator[tuple[str, str]]:
    """(unit, text). No two items of one unit can be said: where fewer orders are due than there are places to give one,
    as with one build and three free centres, each item is a whole set of orders, and all are of one unit.
    """
    legal = position.legal[power]
    due = abs(position.adjustments[power])
    if position.kind != "A" or len(legal) <= due:
        for place, orders in legal.items():
            yield from ((place, order) for order in orders)
    else:
        yield from (("adjustment", text) for text in _sets(list(legal.values()), due, position.adjustments[power] > 0))


def _sets(places: Sequence[Sequence[str]], due: int, building: bool) -> Iterator[str]:
    """Up to `due` builds, or exactly as many disbands. Of very many sets smaller ones stand for them: the rules say
    which units go besides.
    """
    most = due if building else next(size for size in range(due, 0, -1) if size == 1 or _few(len(places), size))
    for size in range(1 if building else most, most + 1):
        for chosen in combinations(places, size):
            yield from (BETWEEN.join(orders) for orders in product(*chosen))


def _few(places: int, size: int) -> bool:
    return comb(places, size) <= MOST_SETS
