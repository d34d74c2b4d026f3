"""Orders as text: the constraint that admits legal sets of orders alone, and what an answer orders."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import comb

from gpuinfer.generation import Constraint, Listed
from gpuinfer_diplomacy.board import Position

BEGIN, END = "<orders>", "</orders>"
BETWEEN = ", "  # orders that are given together, on one line
MOST_SETS = 2000  # of disbands that go together
MOST_LINES = 1000  # of an answer that are read: no power ever has 50 units


def constraint(position: Position, power: str, begin: str) -> Constraint:
    """One order for each unit at most; of builds and disbands as many as are due at most.

    An empty `begin`: the list begins with the answer.
    """
    return Constraint(listed=Listed(items=tuple(items(position, power)), begin=begin, end=END))


def items(position: Position, power: str) -> Iterator[tuple[str, str]]:
    """(unit, text). An answer may hold one item of each unit. Where fewer orders are due than there are places to give
    one, as with one build and three free centres, each item is a whole set of orders, and all are of one unit.
    """
    legal = position.legal[power]
    due = abs(position.adjustments[power])
    if position.kind != "A" or len(legal) <= due:
        for place, orders in legal.items():
            yield from ((place, order) for order in orders)
    else:
        yield from (("adjustment", text) for text in _sets(list(legal.values()), due, position.adjustments[power] > 0))


def _sets(places: Sequence[Sequence[str]], due: int, building: bool) -> Iterator[str]:
    """Up to `due` builds, or exactly as many disbands. Where there are more than `MOST_SETS` sets of disbands, smaller
    sets stand for them: the rules of the game say which units go besides.
    """
    most = due
    while not building and most > 1 and comb(len(places), most) > MOST_SETS:
        most -= 1
    for size in range(1 if building else most, most + 1):
        for chosen in combinations(places, size):
            yield from (BETWEEN.join(orders) for orders in product(*chosen))


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """What an answer orders, and what was wrong with it."""

    orders: tuple[str, ...]  # legal, one for each unit at most, and no more builds or disbands than are due
    illegal: int = 0
    repeated: int = 0  # a second order for the same unit, or a build or disband that is not due
    unfinished: bool = False  # the answer ended before its orders did: only whole lines are read
    none: bool = False  # the answer never began its orders


def read_answer(text: str, position: Position, power: str, begin: str) -> ReadAnswer:
    """`text` may be anything: no answer is an error. Case, spaces and bullets do not matter; commas and semicolons
    separate orders as lines do.
    """
    _, begun, after = text.partition(begin or BEGIN)
    if not begun:
        if begin:
            return ReadAnswer((), none=True)
        after = text
    listed, ended, _ = after.partition(END)
    lines = re.split(r"[\n,;]", listed)[:MOST_LINES]
    if not ended:
        lines.pop()
    place_of = {order: place for place, orders in position.legal[power].items() for order in orders}
    most = abs(position.adjustments[power]) if position.kind == "A" else len(place_of)
    orders: dict[str, str] = {}
    illegal = repeated = 0
    for line in lines:
        order = " ".join(line.upper().split()).strip(" .*•").removeprefix("- ")
        place = place_of.get(order)
        if not order:
            continue
        if place is None:
            illegal += 1
        elif place in orders or len(orders) == most:
            repeated += 1
        else:
            orders[place] = order
    return ReadAnswer(tuple(orders.values()), illegal, repeated, unfinished=not ended)
