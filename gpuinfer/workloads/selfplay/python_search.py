"""The search over positions that Python holds: compiled steps, each over all trees, with Python in between.

`descend` takes every tree to the edge where it knows no further; Python plays that edge's action and says what it
found; `grow` makes a node of it, and a row of the block where the node wants an evaluation; `absorb` takes the answers.
The search is that of `search.py`, to the bit: a test plays the same games both ways.
"""

from pathlib import Path

import numpy as np

from gpuinfer.models import kernel_cache
from gpuinfer.workloads.selfplay import puct
from gpuinfer.workloads.selfplay.arrays import (
    EVALUATIONS,
    NETWORK,
    SIMULATIONS,
    UNEXPANDED,
    Forest,
    FoundNodes,
    Search,
    WantedEdges,
)
from gpuinfer.workloads.selfplay.bits import inner_inlined, random_unit
from gpuinfer.workloads.selfplay.puct import copy, select, set_equal_priors, set_priors
from gpuinfer.workloads.selfplay.python_game import CHANCE, OVER

UNSOUND = -1  # an answer of `grow`

FILES = [
    Path(__file__).with_name(name) for name in ("python_search.py", "puct.py", "bits.py", "arrays.py", "python_game.py")
]
step = kernel_cache.compiler(FILES, nogil=True, error_model="numpy", _nrt=False)


@step
def descend(search: Search, forest: Forest, streams, counters, wanted: WantedEdges, count):
    """Take every tree that is under way to an edge that was not played yet, and add it to the first `count` of
    `wanted`. Returns how many there are then.

    A simulation that ends where the game does is backed up at once, and the next one begun.

    streams: uint64 [slots, 2]
    """
    for tree in range(forest.at.shape[0]):
        while forest.at[tree] >= 0 and forest.done[tree] < search.simulations:
            index = np.int64(forest.at[tree])
            node = forest.nodes[tree, index]
            if node.count == 0:
                back_up(forest, forest.outcome[tree, index], tree, index)
                counters[SIMULATIONS] += 1
                continue
            first = np.int64(node.first)
            if node.mover == CHANCE:
                choice = draw_outcome(forest, streams[tree // search.determinizations], tree, first, node.count)
            else:
                choice = select(search, forest, tree, index, first)
            edge = forest.edges[tree, first + choice]
            if edge.child >= 0:
                forest.at[tree] = edge.child
                continue
            wanted.tree[count] = tree
            wanted.node[count] = index
            wanted.edge[count] = first + choice
            wanted.action[count] = edge.action
            count += 1
            break
    return count


@inner_inlined
def draw_outcome(forest, stream, tree, first, count):
    """The edge of one outcome, in proportion to their probabilities."""
    threshold = np.float32(random_unit(stream))
    for k in range(count):
        threshold -= forest.edges[tree, first + k].prior
        if threshold < 0.0:
            return k
    return count - 1  # rounding must not leave the last one out


@step
def grow(forest: Forest, wanted: WantedEdges, found: FoundNodes, counters, features, rows, actions, max_legal, rows_of):
    """Make nodes of what was found. Those where a seat moves have a row of the block from now on, of which the mask
    of legal actions is written and the rest is zero. Returns how many rows there are then, or `UNSOUND`: something that
    was found is not what a game may say, and the trees are of no use any more.

    features: [trees, features]; rows: how many are taken; actions: how many there are; rows_of: int32 [trees], the tree
    of each row. Pools must have room.
    """
    start = 0
    for i in range(found.mover.shape[0]):
        tree, count, mover = np.int64(wanted.tree[i]), np.int64(found.width[i]), found.mover[i]
        if mover < CHANCE or mover >= found.outcome.shape[1] or (count < 1 and mover != OVER):
            return UNSOUND
        if mover >= 0 and count > max_legal:
            return UNSOUND
        index, first = np.int64(forest.nodes_used[tree]), np.int64(forest.edges_used[tree])
        forest.nodes_used[tree], forest.edges_used[tree] = index + 1, first + count
        node = forest.nodes[tree, index]
        node.value, node.visits = 0.0, 0
        node.parent, node.edge = wanted.node[i], wanted.edge[i]
        node.first, node.count, node.mover = first, count, mover
        if node.edge >= 0:
            forest.edges[tree, node.edge].child = index
        for k in range(count):
            edge = forest.edges[tree, first + k]
            edge.prior, edge.q, edge.visits, edge.child = found.chances[start + k], 0.0, 0, UNEXPANDED
            edge.action = found.actions[start + k]
        if node.mover < 0:
            for seat in range(found.outcome.shape[1]):
                if not np.isfinite(found.outcome[i, seat]):
                    return UNSOUND
            copy(forest.outcome[tree, index], found.outcome[i])
            forest.at[tree] = index
        else:
            row = features[rows]
            for k in range(row.shape[0]):
                row[k] = 0
            before = -1
            for k in range(count):
                action = found.actions[start + k]
                if action <= before or action >= actions:
                    return UNSOUND
                row[action] = 1
                before = action
            forest.at[tree], forest.leaf[tree], forest.row[tree] = -1, index, rows
            rows_of[rows] = tree
            rows += 1
            counters[EVALUATIONS] += 1
        start += count
    return rows


@step
def are_finite(rows):
    """Whether all numbers of float [rows, features] are."""
    for i in range(rows.shape[0]):
        for k in range(rows.shape[1]):
            if not np.isfinite(rows[i, k]):
                return False
    return True


@step
def absorb(search: Search, forest: Forest, noise, counters, logits, values, seats):
    """Take the evaluation of each tree's leaf: priors for its edges, values back up the path.

    noise: float32 [slots, max_legal]; logits: float32 [rows, actions]; values: float32 [rows, seats] from the point of
    view of the player to move, of a network; seats: float32 [seats], scratch
    """
    players = seats.shape[0]
    for tree in range(forest.row.shape[0]):
        row = np.int64(forest.row[tree])
        if row < 0:
            continue
        forest.row[tree] = -1
        leaf = np.int64(forest.leaf[tree])
        node = forest.nodes[tree, leaf]
        first, count = np.int64(node.first), np.int64(node.count)
        if search.evaluator == NETWORK:
            set_priors(forest, logits[row], tree, first, count)
            for k in range(players):
                seat = node.mover + k
                seats[seat if seat < players else seat - players] = values[row, k]
        else:
            set_equal_priors(forest, tree, first, count)
            copy(seats, forest.values[tree])
        if leaf == 0 and search.noise > 0.0:
            share = np.float32(search.noise)
            for k in range(count):
                edge = forest.edges[tree, first + k]
                edge.prior = (np.float32(1.0) - share) * edge.prior + share * noise[tree // search.determinizations, k]
        node.visits = 1
        node.value = seats[node.mover]
        back_up(forest, seats, tree, leaf)
        counters[SIMULATIONS] += 1


@step
def would_resign(search: Search, forest: Forest, first, lowest):
    return puct.would_resign(search, forest, first, lowest)


@inner_inlined
def back_up(forest, seats, tree, index):
    """Add one simulation to the running means on the way to the root: each edge counts for the player who chose it.

    Those of chance are not chosen, and have no mean.
    """
    parent = np.int64(forest.nodes[tree, index].parent)
    position = np.int64(forest.nodes[tree, index].edge)
    while parent >= 0:
        edge = forest.edges[tree, position]
        node = forest.nodes[tree, parent]
        edge.visits += 1
        node.visits += 1
        if node.mover >= 0:
            value = seats[node.mover]
            edge.q += (value - edge.q) * forest.inverse[edge.visits]
            node.value += (value - node.value) * forest.inverse[node.visits]
        parent, position = np.int64(node.parent), np.int64(node.edge)
    forest.done[tree] += 1
    forest.at[tree] = 0
