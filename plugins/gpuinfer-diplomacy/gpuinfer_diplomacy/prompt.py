"""The board in few words: seven powers read it in every phase.

What is the same for all powers comes first, and a power's own units last: a model that keeps what it has computed of a
prompt's beginning computes the board once for all seven.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpuinfer_diplomacy.board import Position, Resolved
from gpuinfer_diplomacy.orders import BEGIN, BETWEEN, END

RULES = (
    "You lead a power in Diplomacy. Who owns most centres wins. Order each of your units once: "
    "A PAR - BUR moves, A PAR H holds, A PAR S A MAR - BUR supports, F ENG C A LON - BRE convoys. "
)
SEASONS = {"S": "Spring", "F": "Fall", "W": "Winter"}
KINDS = {"M": "moves", "R": "retreats", "A": "builds and disbands"}


def rules(begin: str) -> str:
    """The system message, which is the same in all phases."""
    before = "a line of thoughts" if begin == "\n" else begin or BEGIN
    return f"{RULES}Write {before}, then the orders, one a line, then {END}."


def board(position: Position, last: Resolved | None) -> str:
    """The board, and the orders of the phase before, as all powers see them."""
    phase = position.phase
    lines = [f"{SEASONS.get(phase[0], phase[0])} {phase[1:5]}, {KINDS[phase[-1]]}"]
    for power, centers in position.centers.items():
        units = ", ".join(position.units[power])
        if centers or units:
            lines.append(f"{power} owns {' '.join(centers) or 'nothing'}; has {units or 'no units'}")
    orders = []
    for order in (order for ordered in last.orders.values() for order in ordered) if last else ():
        result = last.results.get(" ".join(order.split()[:2])) if last else None
        orders.append(f"{order} ({result})" if result else order)
    if orders:
        lines.append(f"Before: {'; '.join(orders)}")
    return "\n".join(lines)


def turn(position: Position, power: str, *, detail: str, begin: str) -> str:
    """What one power is to order, and for which of its units."""
    return "\n".join((f"You are {power}.", *_choices(position, power, detail), *(() if begin else (BEGIN,))))


def _choices(position: Position, power: str, detail: str) -> Iterator[str]:
    legal, due = position.legal[power], position.adjustments[power]
    if position.kind == "A":
        yield f"Build up to {due}:" if due > 0 else f"Disband {-due}:"
        yield BETWEEN.join(order for orders in legal.values() for order in orders)
    elif position.kind == "R" or detail == "orders":
        yield from (BETWEEN.join(orders) for orders in legal.values())
    elif detail == "moves":  # such as "A PAR - BRE BUR GAS PIC": where a unit can go, not counting convoys
        for orders in legal.values():
            words = [order.split() for order in orders]
            moves = " ".join(word[3] for word in words if len(word) == 4 and word[2] == "-")
            yield f"{' '.join(words[0][:2])} - {moves}"
