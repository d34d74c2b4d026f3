"""The compiled search: PUCT with vector values over determinizations, many games in lockstep.

`play` takes the answers to the last block, lets every tree of every game go on until it needs one more leaf evaluated,
and writes those leaves into the next block: one row a tree at most, strictly sequential inside each tree. It also plays
the chosen moves, ends games and starts the next ones, so that Python sees blocks and finished games only.

Sources: PUCT with a prior (Silver et al. 2017, Mastering the game of Go without human knowledge), one value a seat
(max^n: Luckhardt, Irani 1986), determinized search (Cowling, Powley, Whitehouse 2012), noise at the root (Silver 2017).

This file is executed once for each game, with `rules` bound to that game's compiled rules: see kernels.py.
"""

import numpy as np
from numba import njit

from gpuinfer.workloads.selfplay.arrays import (
    END,
    EVALUATIONS,
    FINISHED,
    IDLE,
    LOG_GAMES,
    LOG_ROWS,
    NETWORK,
    NEXT,
    NOBODY,
    ROLLOUT,
    SIMULATIONS,
    UNEXPANDED,
)
from gpuinfer.workloads.selfplay.bits import compiled, inner, inner_inlined, random_below, seed_stream, unit_of
from gpuinfer.workloads.selfplay.puct import (
    copy,
    draw_by_visits,
    draw_noise,
    fill,
    select,
    set_equal_priors,
    set_priors,
    would_resign,
)

rules = globals()["rules"]  # bound before this file is executed


@njit(nogil=True, cache=True, no_cfunc_wrapper=True, error_model="numpy", _nrt=False)
def play(config, search, games, trees, log, queue, counters, scratch, work, features, logits, values, rounds):
    """Up to `rounds` rounds; more than one only with an evaluator that needs no network.

    Returns the number of rows that the last one wrote to `features`; 0 when nothing is left to do or the log is full.

    queue: int64, the ids of games to start, queue[counters[NEXT]:counters[END]]
    counters: int64 [7]; features: [trees, features]
    logits: float32 [rows, actions], values: float32 [rows, seats]: the answers to the rows of the round before
    scratch: (integers, floats) for the rules; work: (state, actions, seats, visits), one of each
    """
    rows = 0
    for _ in range(rounds):
        rows = 0
        for slot in range(games.game.shape[0]):
            rows = go_on(
                config, search, games, trees, log, queue, counters, scratch, work, features, logits, values, slot, rows
            )
        counters[EVALUATIONS] += rows
        if rows == 0:
            break
    return rows


@inner_inlined
def go_on(config, search, games, trees, log, queue, counters, scratch, work, features, logits, values, slot, rows):
    """Take one game from the answers to its last leaves to its next leaves. Returns the rows now in the block."""
    first = slot * search.determinizations
    after = first + search.determinizations
    searching = games.game[slot] != IDLE
    if searching:
        for tree in range(first, after):
            if trees.row[tree] >= 0:
                absorb(search, games, trees, work, logits, values, slot, tree)
                counters[SIMULATIONS] += 1
    while True:
        if searching:
            before = rows
            for tree in range(first, after):
                rows = descend(config, search, trees, counters, games.stream[slot], work, features, tree, rows)
            if rows > before or counters[LOG_GAMES] == log.finished.shape[0]:
                break
            goes_on = choose_move(config, search, games, trees, work[3], slot)
        elif counters[NEXT] < counters[END] and counters[LOG_GAMES] < log.finished.shape[0]:
            start_game(config, search, games, queue, counters, slot)
            goes_on = True
        else:
            break
        searching = goes_on and begin_search(config, search, games, trees, scratch, work, slot)
        if not searching:
            finish_game(config, search, games, log, counters, work[2], slot)
    return rows


@inner
def start_game(config, search, games, queue, counters, slot):
    """Deal the next game of the queue."""
    games.game[slot] = queue[counters[NEXT]]
    games.moves[slot] = 0
    games.records[slot] = 0
    games.resigned[slot] = NOBODY
    games.checked[slot] = unit_of(search.seed, games.game[slot]) < search.resign_check
    fill(games.lowest[slot], np.inf)
    counters[NEXT] += 1
    seed_stream(games.stream[slot], search.seed, games.game[slot] // search.games_per_deal)
    rules.deal(config, games.state[slot], games.stream[slot])


@compiled
def begin_search(config, search, games, trees, scratch, work, slot):
    """Play forced moves, then set up the trees at the next choice. False when the game is over first."""
    actions = work[1]
    state = games.state[slot]
    while True:
        if rules.to_move(config, state) < 0:
            return False
        count = rules.legal(config, state, actions)
        if count > 1:
            break
        rules.apply(config, state, actions[0])
        games.moves[slot] += 1
    first = slot * search.determinizations
    roots = trees.root[first : first + search.determinizations]
    rules.determinize(config, state, roots, games.stream[slot], scratch[0], scratch[1])
    draw_noise(search, games.stream[slot], games.noise[slot], count)
    mover = rules.to_move(config, state)
    for tree in range(first, first + search.determinizations):
        trees.size[tree] = 0
        trees.done[tree] = 0
        trees.row[tree] = -1
        add_node(trees, actions, tree, count, mover)
    if search.record:
        index = games.records[slot]
        observe(config, state, actions, count, games.observation[slot, index])
        legal = games.legal[slot, index]
        fill(legal, False)
        for k in range(count):
            legal[actions[k]] = True
        games.player[slot, index] = mover
        games.move[slot, index] = games.moves[slot]
    return True


@inner_inlined
def add_node(trees, actions, tree, count, mover):
    """Append a node with its edges; the priors come with its evaluation."""
    index = trees.size[tree]
    trees.size[tree] = index + 1
    node = trees.nodes[tree, index]
    node.visits = 0
    node.value = 0.0
    node.mover = mover
    node.count = count
    base = index * actions.shape[0]
    for k in range(count):
        edge = trees.edges[tree, base + k]
        edge.q = 0.0
        edge.visits = 0
        edge.child = UNEXPANDED
        edge.action = actions[k]
    return index


@inner_inlined
def descend(config, search, trees, counters, stream, work, features, tree, rows):
    """Simulate until a leaf needs an evaluation, or all simulations are done. Returns the rows now in the block.

    A simulation that ends the game is backed up at once. Moves without a choice are passed through: they make no node.
    """
    state, actions, seats, _ = work
    width = actions.shape[0]
    while trees.done[tree] < search.simulations:
        copy(state, trees.root[tree])
        node = np.int64(0)
        depth = 0
        leaf = np.int64(0) if trees.nodes[tree, 0].visits == 0 else np.int64(-1)
        count = np.int64(trees.nodes[tree, 0].count)
        while leaf < 0:
            position = node * width + select(search, trees, tree, node, node * width)
            trees.path[tree, depth] = position
            depth += 1
            edge = trees.edges[tree, position]
            count = advance(config, state, actions, edge.action)
            if count == 0:
                break
            if edge.child < 0:
                leaf = add_node(trees, actions, tree, count, rules.to_move(config, state))
                edge.child = leaf
            else:
                node = np.int64(edge.child)
        trees.depth[tree] = depth
        if leaf >= 0:
            if depth == 0:
                rules.legal(config, state, actions)
            offer(config, search, trees, stream, work, features, tree, leaf, count, rows)
            return rows + 1
        rules.returns(config, state, seats)
        back_up(trees, seats, tree, width)
        counters[SIMULATIONS] += 1
    return rows


@inner_inlined
def advance(config, state, actions, action):
    """Play an action and all forced ones after it. Returns how many actions are legal then; 0 when the game is over."""
    rules.apply(config, state, action)
    while rules.to_move(config, state) >= 0:
        count = rules.legal(config, state, actions)
        if count > 1:
            return count
        rules.apply(config, state, actions[0])
    return 0


@inner_inlined
def offer(config, search, trees, stream, work, features, tree, leaf, count, rows):
    """Put the leaf's features into the block, or play it out."""
    state, actions, seats, _ = work
    trees.leaf[tree] = leaf
    trees.row[tree] = rows
    if search.evaluator == ROLLOUT:
        play_to_the_end(config, stream, state, actions, seats)
        copy(trees.values[tree], seats)
        return
    observe(config, state, actions, count, features[rows])


@inner_inlined
def play_to_the_end(config, stream, state, actions, seats):
    """Moves at random; what comes of them, a return each seat."""
    while rules.to_move(config, state) >= 0:
        count = rules.legal(config, state, actions)
        rules.apply(config, state, actions[random_below(stream, count)])
    rules.returns(config, state, seats)


@njit(nogil=True, cache=True, no_cfunc_wrapper=True, error_model="numpy", _nrt=False)
def play_out(config, search, games, trees, work, chosen, logits, values):
    """Answer the leaves of these trees of the last block as the evaluator ROLLOUT does: equal priors, and the returns
    of a random playout. For an opponent that is no network, beside one that is.

    chosen: int64 [trees]; logits: float32 [rows, actions], values: float32 [rows, seats] of the block, where only the
    rows of those trees are written
    """
    state, actions, seats, _ = work
    players = seats.shape[0]
    for tree in chosen:
        copy(state, trees.root[tree])
        for i in range(trees.depth[tree]):
            advance(config, state, actions, trees.edges[tree, trees.path[tree, i]].action)
        mover = rules.to_move(config, state)
        play_to_the_end(config, games.stream[tree // search.determinizations], state, actions, seats)
        row = trees.row[tree]
        fill(logits[row], 0.0)
        for k in range(players):
            seat = mover + k
            values[row, k] = seats[seat if seat < players else seat - players]


@inner_inlined
def observe(config, state, actions, count, row):
    fill(row, 0)
    rules.observe(config, state, actions, count, row)


@inner_inlined
def absorb(search, games, trees, work, logits, values, slot, tree):
    """Take the evaluation of a tree's leaf: priors for its edges, values back up the path."""
    _, actions, seats, _ = work
    leaf = np.int64(trees.leaf[tree])
    node = trees.nodes[tree, leaf]
    row = trees.row[tree]
    trees.row[tree] = -1
    width, players = actions.shape[0], seats.shape[0]
    base = leaf * width
    if search.evaluator == NETWORK:
        set_priors(trees, logits[row], tree, base, node.count)
        for k in range(players):
            seat = node.mover + k
            seats[seat if seat < players else seat - players] = values[row, k]
    else:
        set_equal_priors(trees, tree, base, node.count)
        copy(seats, trees.values[tree])
    if leaf == 0 and search.noise > 0.0:
        share = np.float32(search.noise)
        for k in range(node.count):
            edge = trees.edges[tree, k]
            edge.prior = (np.float32(1.0) - share) * edge.prior + share * games.noise[slot, k]
    node.visits = 1
    node.value = seats[node.mover]
    back_up(trees, seats, tree, width)


@inner_inlined
def back_up(trees, seats, tree, width):
    """Add one simulation to the running means along the path: each edge counts for the player who chose it."""
    for i in range(trees.depth[tree]):
        position = trees.path[tree, i]
        edge = trees.edges[tree, position]
        parent = trees.nodes[tree, position // width]
        value = seats[parent.mover]
        edge.visits += 1
        edge.q += (value - edge.q) * trees.inverse[edge.visits]
        parent.visits += 1
        parent.value += (value - parent.value) * trees.inverse[parent.visits]
    trees.done[tree] += 1


@inner
def choose_move(config, search, games, trees, visits, slot):
    """Add the visits of all determinizations up, record them, and play: drawn early in the game, the best later.

    False when the player resigns in place of that.
    """
    first = slot * search.determinizations
    count = trees.nodes[first, 0].count
    fill(visits, 0.0)
    total = np.float32(0.0)
    for tree in range(first, first + search.determinizations):
        for k in range(count):
            # a single simulation evaluates the root alone: its priors are all there is
            share = trees.edges[tree, k].visits if search.simulations > 1 else trees.edges[tree, k].prior
            visits[k] += share
            total += share
    if search.record:
        index = games.records[slot]
        policy = games.policy[slot, index]
        fill(policy, 0.0)
        for k in range(count):
            policy[trees.edges[first, k].action] = visits[k] / total
        games.records[slot] = index + 1
    if search.resign > 0.0:
        if would_resign(search, trees, first, games.lowest[slot]) and games.resigned[slot] == NOBODY:
            games.resigned[slot] = trees.nodes[first, 0].mover
        if games.resigned[slot] != NOBODY and not games.checked[slot]:
            return False
    chosen = 0
    if search.temperature > 0.0 and games.moves[slot] < search.temperature_moves:
        chosen = draw_by_visits(visits, count, search.temperature, games.stream[slot])
    else:
        for k in range(1, count):
            if visits[k] > visits[chosen]:
                chosen = k
    rules.apply(config, games.state[slot], trees.edges[first, chosen].action)
    games.moves[slot] += 1
    return True


@inner
def finish_game(config, search, games, log, counters, seats, slot):
    """Write the game's returns and records to the log."""
    loser = games.resigned[slot]
    if loser != NOBODY and not games.checked[slot]:
        fill(seats, 1.0)
        seats[loser] = -1.0
    else:
        rules.returns(config, games.state[slot], seats)
    players = seats.shape[0]
    index = counters[LOG_GAMES]
    log.finished[index] = games.game[slot]
    copy(log.returns[index], seats)
    log.resigned[index] = loser
    log.checked[index] = games.checked[slot]
    copy(log.lowest[index], games.lowest[slot])
    games.game[slot] = IDLE
    counters[LOG_GAMES] += 1
    counters[FINISHED] += 1
    if not search.record:
        return
    row = counters[LOG_ROWS]
    for i in range(games.records[slot]):
        copy(log.observation[row], games.observation[slot, i])
        copy(log.legal[row], games.legal[slot, i])
        copy(log.policy[row], games.policy[slot, i])
        log.player[row] = games.player[slot, i]
        log.move[row] = games.move[slot, i]
        log.game[row] = log.finished[index]
        for k in range(players):
            seat = games.player[slot, i] + k
            log.value[row, k] = seats[seat if seat < players else seat - players]
        row += 1
    counters[LOG_ROWS] = row
