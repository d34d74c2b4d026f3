"""The board in few words: each of them is read by seven powers in every phase.

What all powers are shown alike comes first, and what is a power's own last: a model that keeps what it has computed of
a prompt's beginning computes the board once for all seven.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpuinfer_diplomacy.asked import BEGIN, BETWEEN, END
from gpuinfer_diplomacy.board import Position, Resolved

RULES = (
    "You lead a power in Diplomacy. Who owns most centres wins. Order each of your units once: "
    "A PAR - BUR moves, A PAR H holds, A PAR S A MAR - BUR supports, F ENG C A LON - BRE convoys. "
)
SEASONS = {"S": "Spring", "F": "Fall", "W": "Winter"}
KINDS = {"M": "moves", "R": "retreats", "A": "builds and disbands"}


def rules(begin: str) -> str:
    """What is the same in all phases."""
    before = "a line of thoughts" if begin == "\n" else begin or BEGIN
    return f"{RULES}Write {before}, then the orders, one a line, then {END}."


def board(position: Position, last: Resolved | None) -> str:
    """The same for all powers."""
    return "\n".join((_title(position.phase), *_powers(position), *(_resolved(last) if last else ())))


def _title(phase: str) -> str:
    return f"{SEASONS.get(phase[0], phase[0])} {phase[1:5]}, {KINDS[phase[-1]]}"


def _powers(position: Position) -> Iterator[str]:
    for power, centers in position.centers.items():
        units = ", ".join(position.units[power])
        if centers or units:
            yield f"{power} owns {' '.join(centers) or 'nothing'}; has {units or 'no units'}"


def _resolved(last: Resolved) -> Iterator[str]:
    orders = [_went(order, last.results) for given in last.orders.values() for order in given]
    if orders:
        yield f"Before: {'; '.join(orders)}"


def _went(order: str, results: Mapping[str, str]) -> str:
    result = results.get(" ".join(order.split()[:2]))
    return f"{order} ({result})" if result else order


def own(position: Position, power: str, *, detail: str, begin: str) -> str:
    """What one power is asked, and of which units."""
    return "\n".join((f"You are {power}.", *_asked(position, power, detail), *(() if begin else (BEGIN,))))


def _asked(position: Position, power: str, detail: str) -> Iterator[str]:
    legal, due = position.legal[power], position.adjustments[power]
    if position.kind == "A":
        yield f"Build up to {due}:" if due > 0 else f"Disband {-due}:"
        yield BETWEEN.join(order for orders in legal.values() for order in orders)
    elif position.kind == "R" or detail == "orders":
        yield from (BETWEEN.join(orders) for orders in legal.values())
    elif detail == "moves":
        yield from (_moves(orders) for orders in legal.values())


def _moves(orders: Sequence[str]) -> str:
    """Such as "A PAR - BRE BUR GAS PIC": where a unit can go, not counting convoys."""
    words = [order.split() for order in orders]
    unit = " ".join(words[0][:2])
    return f"{unit} - {' '.join(word[3] for word in words if len(word) == 4 and word[2] == '-')}"
