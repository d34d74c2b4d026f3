"""The search plays well: the best move where it is known, and more points than random players."""

from __future__ import annotations

import random
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from counts import counts
from table import Table

from gpuinfer.testing.reference_search import Thinker
from gpuinfer.workloads.selfplay.games.blob import Blob
from gpuinfer.workloads.selfplay.games.connect_four import ConnectFour

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from nim import Nim


@pytest.mark.parametrize(
    ("columns", "best"),
    [
        ("060601", {0}),  # win at once, up a column
        ("304152", {6}),  # along the row
        ("06060", {0}),  # block a column
        ("2625", {1, 3, 4}),  # keep the row open
        ("3322", {1, 4}),  # win in two: three in a row with both ends free
        ("362", {1, 4}),  # see the same coming and stop it
    ],
)
def test_connect_four_is_played_well(columns, best):
    table = Table(ConnectFour())
    table.play(*map(int, columns))
    visits = Thinker(table.game, determinizations=1, simulations=3000).think(table.state)
    assert int(visits.argmax()) in best
    assert visits[list(best)].sum() > 0.7


def wins_in(table: Table, plies: int) -> list[int]:
    """By brute force: the moves after which the player to move wins within `plies`, whatever the other does."""

    def won(left: int) -> bool:
        """Whether the player who has just moved has won or cannot be stopped from winning."""
        if table.over or left < 2:
            return table.over and min(table.returns()) < 0
        return all(after(reply, lambda: not table.over and bool(wins_in(table, left - 1))) for reply in table.legal())

    def after(move, question):
        before = table.state.copy()
        table.play(move)
        answer = question()
        table.state[:] = before
        return answer

    return [move for move in table.legal() if after(move, lambda: won(plies - 1))]


@pytest.mark.parametrize("count", counts(12, 300))
def test_forced_wins_of_three_and_five_plies_are_found(count):
    moves, game = random.Random(5), ConnectFour()
    thinker = Thinker(game, determinizations=1, simulations=8000)
    found = asked = 0
    while asked < count:
        table = Table(game)
        for _ in range(moves.randrange(4, 24)):
            if not table.over:
                table.play(moves.choice(table.legal()))
        if table.over or len(table.legal()) < 2 or wins_in(table, 1):
            continue
        winning = wins_in(table, 5)
        if 0 < len(winning) < len(table.legal()):
            asked += 1
            chosen = int(thinker.think(table.state).argmax())
            found += chosen in winning or chosen in wins_in(table, 7)  # a longer way is a way
    assert found >= 0.95 * count


@pytest.mark.thorough
def test_nim_is_played_as_bouton_solved_it():
    """A position is lost for the one to move exactly when the heaps' exclusive or is 0 (Bouton 1901)."""
    game = Nim(None, largest=3)
    thinker = Thinker(game, determinizations=1, simulations=4000)
    for heaps in product((1, 2, 3), repeat=3):
        if not heaps[0] ^ heaps[1] ^ heaps[2]:
            continue
        table = Table(game)
        table.state[1:4] = heaps
        heap, taken = divmod(int(thinker.think(table.state).argmax()), 3)
        left = list(heaps)
        left[heap] -= taken + 1
        assert left[0] ^ left[1] ^ left[2] == 0


@pytest.mark.parametrize(
    ("game", "options", "margin"),
    [
        (Blob(), {"determinizations": 3, "simulations": 30}, 0.2),
        (Blob(None, players=3, scoring="oh-hell"), {"simulations": 30}, 0.08),
        (ConnectFour(), {"determinizations": 1, "simulations": 100}, 1.6),
    ],
)
@pytest.mark.parametrize("deals", counts(40, 1000))
def test_the_search_beats_random_players(game, options, margin, deals):
    """By deal: what it makes, in each seat in turn, above the mean of its random opponents in that game."""
    thinker, moves, gained = Thinker(game, **options), random.Random(1), []
    for number in range(deals):
        margins = []
        for seat in range(game.seats):
            table = Table(game, 2, number)
            while not table.over:
                legal = table.legal()
                thinks = table.mover == seat and len(legal) > 1
                table.play(int(thinker.think(table.state).argmax()) if thinks else moves.choice(legal))
            returns = table.returns()
            margins.append(returns[seat] - (sum(returns) - returns[seat]) / (game.seats - 1))
        gained.append(np.mean(margins))
    assert np.mean(gained) - 1.96 * np.std(gained, ddof=1) / np.sqrt(deals) > margin
