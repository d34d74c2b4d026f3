"""What a position takes of memory, as the C library counts it: a tree keeps one for each node."""

from __future__ import annotations

import ctypes
import random

import pyspiel

CLONES = 256
USUAL_BYTES = 4096  # where that cannot be seen
MOST_MOVES = 200  # to a position in the middle of a game


class Counts(ctypes.Structure):
    """`struct mallinfo2` of the GNU C library."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    ))  # fmt: skip


def position_bytes(game: pyspiel.Game) -> int:
    """About, of one position from the middle of a random game."""
    state = _middle(game)
    before = _allocated()
    clones = [state.clone() for _ in range(CLONES)]
    taken = _allocated() - before
    return taken // len(clones) or USUAL_BYTES


def _middle(game: pyspiel.Game) -> pyspiel.State:
    moves, state = random.Random(0), game.new_initial_state()
    for _ in range(min(MOST_MOVES, game.max_game_length() // 2)):
        following = state.child(moves.choice(state.legal_actions()))
        if following.is_terminal():
            break
        state = following
    return state


def _allocated() -> int:
    """Bytes that are in use, of the C library's first heap and beside it; 0 where it does not tell."""
    tell = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if tell is None:
        return 0
    tell.restype = Counts
    counts = tell()
    return int(counts.uordblks + counts.hblkhd)
