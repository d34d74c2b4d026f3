"""The compiled rules of Connect Four. A player's stones are a bitboard: bit 7 × column + row, the seventh row empty."""

import numpy as np

from gpuinfer.workloads.selfplay.bits import compiled, inlined

# state
TURN, WINNER, BOARDS = 0, 1, 2  # the side to move, or -1; the winner, or -1; a board for each side
COLUMNS, ROWS, HEIGHT = 7, 6, 7
ONE = np.int64(1)


@compiled
def deal(config, state, stream):
    state[TURN] = 0
    state[WINNER] = -1
    state[BOARDS] = state[BOARDS + 1] = 0


@inlined
def to_move(config, state):
    return state[TURN]


@compiled
def legal(config, state, actions):
    taken = state[BOARDS] | state[BOARDS + 1]
    count = 0
    for column in range(COLUMNS):
        if not taken >> (HEIGHT * column + ROWS - 1) & 1:
            actions[count] = column
            count += 1
    return count


@compiled
def apply(config, state, action):
    seat = state[TURN]
    taken = state[BOARDS] | state[BOARDS + 1]
    column = HEIGHT * np.int64(action)
    stone = (taken + (ONE << column)) & ~taken & (((ONE << HEIGHT) - 1) << column)
    state[BOARDS + seat] |= stone
    if connects(state[BOARDS + seat]):
        state[WINNER], state[TURN] = seat, -1
    elif is_full(taken | stone):
        state[TURN] = -1
    else:
        state[TURN] = 1 - seat


@inlined
def connects(board):
    """Whether four stones stand in a row: down a column, along a row, or on either diagonal."""
    for shift in (1, HEIGHT, HEIGHT - 1, HEIGHT + 1):
        pairs = board & (board >> shift)
        if pairs & (pairs >> (2 * shift)):
            return True
    return False


@inlined
def is_full(taken):
    for column in range(COLUMNS):
        if not taken >> (HEIGHT * column + ROWS - 1) & 1:
            return False
    return True


@compiled
def returns(config, state, values):
    values[0] = values[1] = 0.0
    if state[WINNER] >= 0:
        values[state[WINNER]] = 1.0
        values[1 - state[WINNER]] = -1.0


@compiled
def observe(config, state, actions, count, row):
    """7 legal columns, then 42 cells of the player to move and 42 of the other, column by column from the bottom."""
    for k in range(count):
        row[actions[k]] = 1
    for side in range(2):
        board = state[BOARDS + (state[TURN] if side == 0 else 1 - state[TURN])]
        for column in range(COLUMNS):
            for height in range(ROWS):
                row[7 + 42 * side + ROWS * column + height] = board >> (HEIGHT * column + height) & 1


@compiled
def determinize(config, state, samples, stream, integers, floats):
    """Nothing is hidden."""
    for n in range(samples.shape[0]):
        for i in range(state.shape[0]):
            samples[n, i] = state[i]
