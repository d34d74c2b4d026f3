"""The strength of each generation that has played, drawn in the terminal: a line a match, its interval from end to end.

```
Elo            −100      0                                   +290
iteration 2              ┊  ├───●────┤
iteration 4              ┊              ├─────●──────┤
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpuinfer.loop.story import Document
from gpuinfer.report.strength import signed

WIDTH = 48  # columns
ZERO, BEGIN, LINE, MEAN, END = "┊├─●┤"
BEYOND = "◀", "▶"  # an end that is not known: no number of Elo is that far


def drawn(told: Document) -> Iterator[tuple[str, str]]:
    """Lines with their names; none before there was a match."""
    matches = {one["iteration"]: one["strength"] for one in told["iterations"] if one["strength"]}
    known = [0.0, *(elo for one in matches.values() for elo in (one["elo"], *one["elo_ci95"]) if elo is not None)]
    low, high = min(known), max(known)
    if low == high:  # all matches drawn, or none whose interval has an end
        low, high = -1.0, 1.0
    if matches:
        yield "Elo", _scale(low, high)
    for iteration, strength in matches.items():
        yield f"iteration {iteration}", _line(strength, low, high)


def _column(elo: float, low: float, high: float) -> int:
    return round((elo - low) / (high - low) * (WIDTH - 1))


def _scale(low: float, high: float) -> str:
    """The ends, and 0 where there is room for it between them."""
    left, right = (signed(end) if end else "0" for end in (low, high))
    line = list(left + right.rjust(WIDTH - len(left)))
    zero = _column(0.0, low, high)
    if all(line[at] == " " for at in range(max(0, zero - 1), min(WIDTH, zero + 2))):
        line[zero] = "0"
    return "".join(line)


def _line(strength: Mapping[str, Any], low: float, high: float) -> str:
    begin, end = strength["elo_ci95"]
    first = 0 if begin is None else _column(begin, low, high)
    last = WIDTH - 1 if end is None else _column(end, low, high)
    line = [" "] * WIDTH
    line[_column(0.0, low, high)] = ZERO
    line[first : last + 1] = LINE * (last + 1 - first)
    line[first], line[last] = BEGIN if begin is not None else BEYOND[0], END if end is not None else BEYOND[1]
    if strength["elo"] is not None:
        line[_column(strength["elo"], low, high)] = MEAN
    return "".join(line).rstrip()
