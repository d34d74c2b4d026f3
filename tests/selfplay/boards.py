"""Connect Four solved by brute force, a few moves deep: which moves win, and how soon."""

from __future__ import annotations

from table import Table


def wins_in(table: Table, plies: int) -> list[int]:
    """The moves after which the player to move wins within `plies`, whatever the other does."""
    return [move for move in table.legal() if _after(table, move, lambda: _won(table, plies - 1))]


def _won(table: Table, plies: int) -> bool:
    """Whether the player who has just moved has won or cannot be stopped from winning within `plies` more."""
    if table.over:
        return min(table.returns()) < 0
    if plies < 2:
        return False
    return all(
        _after(table, reply, lambda: not table.over and bool(wins_in(table, plies - 1))) for reply in table.legal()
    )


def holds(table: Table, plies: int) -> list[int]:
    """The moves after which the other cannot win within `plies`."""
    return [move for move in table.legal() if _after(table, move, lambda: table.over or not wins_in(table, plies))]


def _after(table: Table, move: int, question) -> bool:
    before = table.state.copy()
    table.play(move)
    answer = question()
    table.state[:] = before
    return answer
