"""An answer → orders, and what was wrong with it. Nothing that a model says is an error."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuinfer_diplomacy.asked import BEGIN, END
from gpuinfer_diplomacy.board import Position

MOST_LINES = 1000  # that are looked at: no power ever has 50 units
_BETWEEN = re.compile(r"[\n,;]")
_AROUND = " .*•"


@dataclass(frozen=True, slots=True)
class Said:
    orders: tuple[str, ...]  # legal, one for each unit at most, and no more builds or disbands than are due
    illegal: int = 0
    repeated: int = 0  # a second order for the same unit, or a build or disband that is not due
    unfinished: bool = False  # the answer ended before its orders did: what stands after the last whole line is ignored
    none: bool = False  # no orders were begun at all


def said(text: str, position: Position, power: str, begin: str) -> Said:
    """`text` may be anything. Case, spaces and bullets do not matter; commas and semicolons part orders as lines do."""
    _, begun, after = text.partition(begin or BEGIN)
    if not begun:
        if begin:
            return Said((), none=True)
        after = text
    listed, ended, _ = after.partition(END)
    lines = _BETWEEN.split(listed)[:MOST_LINES]
    if not ended:
        lines.pop()
    return _sorted_out([_plain(line) for line in lines], position, power, unfinished=not ended)


def _plain(line: str) -> str:
    plain = " ".join(line.upper().split()).strip(_AROUND)
    return plain.removeprefix("- ")


def _sorted_out(lines: list[str], position: Position, power: str, *, unfinished: bool) -> Said:
    place_of = {order: place for place, orders in position.legal[power].items() for order in orders}
    most = abs(position.adjustments[power]) if position.kind == "A" else len(place_of)
    orders: dict[str, str] = {}
    illegal = repeated = 0
    for line in filter(None, lines):
        place = place_of.get(line)
        if place is None:
            illegal += 1
        elif place in orders or len(orders) == most:
            repeated += 1
        else:
            orders[place] = line
    return Said(tuple(orders.values()), illegal, repeated, unfinished)
