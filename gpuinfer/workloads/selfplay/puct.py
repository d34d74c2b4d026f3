"""What any tree search here is made of: PUCT, priors from logits, noise at the root, the draw of a move, resignation.

PUCT with a network's priors is that of AlphaZero (Silver et al. 2018), and so is the noise at the root. Whoever finds
both root and best move worth too little resigns (Silver et al. 2017, "Mastering the game of Go without human
knowledge", Methods).

Compiled, and called by compiled code: `search.py` plays compiled rules, `python_search.py` games in Python. `trees` has
records `nodes` [trees, …] (value, visits, count) and `edges` [trees, …] (prior, q, visits, action), and `inverse` and
`root_of` as in `arrays.Trees`.
"""

import numpy as np

from gpuinfer.workloads.selfplay.bits import compiled, inner, inner_inlined, random_gamma, random_unit


@inner_inlined
def select(search, trees, tree, node, base):
    """PUCT: the edge with the highest q + c × prior × sqrt(visits of the node) / (1 + visits of the edge).

    An edge that was never visited counts with the mean value of its node, whose edges begin at `base`.
    """
    here = trees.nodes[tree, node]
    scale = np.float32(search.exploration) * trees.root_of[here.visits]
    best, best_score = 0, np.float32(-np.inf)
    for k in range(here.count):
        edge = trees.edges[tree, base + k]
        q = edge.q if edge.visits > 0 else here.value
        score = q + scale * edge.prior * trees.inverse[edge.visits + 1]
        if score > best_score:
            best, best_score = k, score
    return best


@inner_inlined
def set_priors(trees, logits, tree, base, count):
    """Softmax over the legal actions. When all of them have -inf, none is better than another."""
    highest = np.float32(-np.inf)
    for k in range(count):
        highest = max(highest, logits[trees.edges[tree, base + k].action])
    if highest == -np.inf:
        set_equal_priors(trees, tree, base, count)
        return
    total = np.float32(0.0)
    for k in range(count):
        edge = trees.edges[tree, base + k]
        edge.prior = np.exp(logits[edge.action] - highest)
        total += edge.prior
    scale = np.float32(1.0) / total
    for k in range(count):
        trees.edges[tree, base + k].prior *= scale


@inner_inlined
def set_equal_priors(trees, tree, base, count):
    prior = np.float32(1.0) / np.float32(count)
    for k in range(count):
        trees.edges[tree, base + k].prior = prior


@inner
def draw_noise(search, stream, noise, count):
    """Dirichlet noise for the root; the same for every determinization."""
    if search.noise <= 0.0:
        return
    total = np.float32(0.0)
    for k in range(count):
        noise[k] = random_gamma(stream, search.concentration / count)
        total += noise[k]
    for k in range(count):
        noise[k] = noise[k] / total if total > 0.0 else np.float32(1.0) / count


@compiled
def draw_by_visits(visits, count, temperature, stream):
    """In proportion to visits ** (1 / temperature)."""
    highest, total = np.float32(0.0), 0.0
    for k in range(count):
        highest = max(highest, visits[k])
    for k in range(count):
        visits[k] = (visits[k] / highest) ** (1.0 / temperature)
        total += visits[k]
    threshold = random_unit(stream) * total
    last = 0
    for k in range(count):
        if visits[k] > 0.0:
            last = k
            threshold -= visits[k]
            if threshold < 0.0:
                break
    return last


@inner
def would_resign(search, trees, first, lowest):
    """Whether the player to move at these roots, of the tree `first` and those of its other determinizations, gives up.

    lowest: float32 [seats], of the game; what the position is worth is noted there when it is less than ever before
    """
    value = worth(search, trees, first)
    least = np.float32(np.inf)
    for seat in range(lowest.shape[0]):
        least = min(least, lowest[seat])
    if value < least:
        lowest[trees.nodes[first, 0].mover] = value
    return value <= np.float32(-search.resign)


@inner
def worth(search, trees, first):
    """What a searched position is worth to the player to move, float32: the mean value of its roots, or that of the
    most visited move where it is higher. Edges of a root begin at 0.
    """
    after = first + search.determinizations
    best, most = 0, -1
    for k in range(trees.nodes[first, 0].count):
        visits = 0
        for tree in range(first, after):
            visits += trees.edges[tree, k].visits
        if visits > most:
            best, most = k, visits
    roots, move = 0.0, 0.0
    for tree in range(first, after):
        roots += trees.nodes[tree, 0].value
        move += trees.edges[tree, best].visits * trees.edges[tree, best].q
    return np.float32(max(roots / search.determinizations, move / most))


@inner_inlined
def fill(row, value):
    """Like row[:] = value, which takes Numba seconds to compile."""
    for i in range(row.shape[0]):
        row[i] = value


@inner_inlined
def copy(row, source):
    """Like row[:] = source, which takes Numba seconds to compile."""
    for i in range(row.shape[0]):
        row[i] = source[i]
