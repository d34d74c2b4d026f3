"""The arrays of search trees over positions that Python holds; `growing.py` has the steps that work on them.

Nodes and edges come from pools, since how many actions are legal differs widely; a node knows its parent, so a path
needs no list.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpuinfer.workloads.selfplay.python_game import PythonGame

NODE = np.dtype(
    [
        ("value", "f4"),  # the mean for whoever moves here
        ("visits", "i4"),
        ("parent", "i4"),  # -1 of the root
        ("edge", "i4"),  # of the tree, the one that leads here
        ("first", "i4"),  # of its own edges
        ("count", "i4"),  # 0: the game is over here
        ("mover", "i4"),
    ]
)
EDGE = np.dtype([("prior", "f4"), ("q", "f4"), ("visits", "i4"), ("child", "i4"), ("action", "i4")])
UNEXPANDED = -1
USUAL_WIDTH = 8  # edges a node, at first: pools grow
LIKELY_WIDTH = 64  # edges a node, counted with when memory is reckoned


class Forest(NamedTuple):
    """Per tree; tree = slot × determinizations + d. Pools are as large as the largest tree so far needs."""

    nodes: np.ndarray  # NODE [trees, room for nodes]
    edges: np.ndarray  # EDGE [trees, room for edges]
    outcome: np.ndarray  # float32 [trees, room for nodes, seats]: the returns where the game is over
    nodes_used: np.ndarray  # int32 [trees]
    edges_used: np.ndarray  # int32 [trees]
    done: np.ndarray  # int32 [trees]: simulations done
    at: np.ndarray  # int32 [trees]: the node where the next simulation, or the rest of this one, sets out; -1: it waits
    leaf: np.ndarray  # int32 [trees]: the node that waits for its evaluation
    row: np.ndarray  # int32 [trees]: its row in the block, -1 when none waits
    values: np.ndarray  # float32 [trees, seats]: a rollout's returns
    inverse: np.ndarray  # float32 [simulations + 2]: 1 / n
    root_of: np.ndarray  # float32 [simulations + 2]: sqrt(n)


class Wanted(NamedTuple):
    """Edges that Python is asked to play, at most one a tree. A root is one without parent and edge: -1."""

    tree: np.ndarray  # int32 [trees]
    node: np.ndarray  # int32 [trees]
    edge: np.ndarray  # int32 [trees]: of the tree
    action: np.ndarray  # int32 [trees]


class Found(NamedTuple):
    """What Python says of each edge that was wanted."""

    mover: np.ndarray  # int32 [wanted]: a seat, OVER or CHANCE
    width: np.ndarray  # int32 [wanted]: how many legal actions, or outcomes of chance
    actions: np.ndarray  # int32 [sum of widths]
    chances: np.ndarray  # float32 [sum of widths]: probabilities; of other nodes nothing
    outcome: np.ndarray  # float32 [wanted, seats]: returns where the game is over


def allocate(trees: int, simulations: int, seats: int, max_legal: int) -> Forest:
    counts = np.arange(simulations + 2, dtype=np.float32)
    room = simulations + 1
    return Forest(
        nodes=np.zeros((trees, room), NODE),
        edges=np.zeros((trees, room * min(max_legal, USUAL_WIDTH)), EDGE),
        outcome=np.zeros((trees, room, seats), np.float32),
        nodes_used=np.zeros(trees, np.int32),
        edges_used=np.zeros(trees, np.int32),
        done=np.full(trees, simulations, np.int32),
        at=np.full(trees, -1, np.int32),
        leaf=np.zeros(trees, np.int32),
        row=np.full(trees, -1, np.int32),
        values=np.zeros((trees, seats), np.float32),
        inverse=1.0 / np.maximum(counts, 1.0),
        root_of=np.sqrt(counts),
    )


def node_bytes(game: PythonGame) -> int:
    """About, of one node with its edges and its position."""
    width = min(game.max_legal, LIKELY_WIDTH)
    return NODE.itemsize + 4 * game.seats + width * EDGE.itemsize + game.position_bytes


def with_room(forest: Forest, nodes: int, edges: int) -> Forest:
    """The same, with room for so many of either in each tree: twice as much as there was, where it did not suffice."""
    changed = {
        name: _wider(getattr(forest, name), needed)
        for name, needed in (("nodes", nodes), ("outcome", nodes), ("edges", edges))
        if getattr(forest, name).shape[1] < needed
    }
    return forest._replace(**changed) if changed else forest


def _wider(array: np.ndarray, needed: int) -> np.ndarray:
    wider = np.zeros((len(array), max(needed, 2 * array.shape[1]), *array.shape[2:]), array.dtype)
    wider[:, : array.shape[1]] = array
    return wider


def wanted(trees: int) -> Wanted:
    return Wanted(*(np.zeros(trees, np.int32) for _ in Wanted._fields))
