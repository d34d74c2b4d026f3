"""Connect Four: the ways to win, the edges that must not wrap, the draw."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from table import Table, play_out

from gpuinfer.workloads.selfplay.games.connect_four import ConnectFour


def lines(stones: set[tuple[int, int]]) -> bool:
    """Whether four stand in a row, looked for square by square."""
    steps = [(1, 0), (0, 1), (1, 1), (1, -1)]
    return any(
        all((column + i * across, row + i * up) in stones for i in range(4))
        for column, row in stones
        for across, up in steps
    )


@settings(deadline=None)
@given(moves=st.randoms(use_true_random=False))
def test_a_game_is_over_exactly_when_four_stand_in_a_row_or_the_board_is_full(moves):
    table, heights, stones = Table(ConnectFour()), [0] * 7, (set(), set())
    for column in play_out(table, moves):
        assert not any(map(lines, stones))
        assert table.legal() == [c for c in range(7) if heights[c] < 6]
        stones[table.mover].add((column, heights[column]))
        heights[column] += 1
    won = [lines(side) for side in stones]
    assert any(won) or sum(heights) == 42
    assert table.returns() == [float(won[0]) - won[1], float(won[1]) - won[0]]


@settings(deadline=None)
@given(moves=st.randoms(use_true_random=False), stop=st.integers(0, 41))
def test_the_player_to_move_sees_its_own_stones_first(moves, stop):
    table, board = Table(ConnectFour()), [[[0] * 6 for _ in range(7)] for _ in range(2)]
    heights = [0] * 7
    for made, column in enumerate(play_out(table, moves)):
        row = table.observe()
        assert row[:7].tolist() == [int(height < 6) for height in heights]
        own, other = board[table.mover], board[1 - table.mover]
        assert row[7:].tolist() == [stone for column in own + other for stone in column]
        if made == stop:
            break
        board[table.mover][column][heights[column]] = 1
        heights[column] += 1
