"""The arrays that the searches work on: those of compiled rules, one slot a game in flight with `determinizations`
trees a slot, and those of positions that Python holds, whose nodes and edges come from pools. Nodes and edges are
small records, since a visit reads all fields of one edge; everything else is one array a field. None is allocated by
the kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpuinfer.workloads.selfplay.game import Game
from gpuinfer.workloads.selfplay.python_game import PythonGame

NODE = np.dtype([("value", "f4"), ("visits", "i4"), ("mover", "i2"), ("count", "i2")], align=True)
EDGE = np.dtype([("prior", "f4"), ("q", "f4"), ("visits", "i4"), ("child", "i2"), ("action", "i2")], align=True)
UNEXPANDED = -1  # an edge's child, when there is none
IDLE = -1  # a slot's game, when there is none
NOBODY = -1  # has resigned
NETWORK, UNIFORM, ROLLOUT = 0, 1, 2  # who evaluates leaves

# counters
NEXT, END, LOG_ROWS, LOG_GAMES, SIMULATIONS, EVALUATIONS, FINISHED = range(7)


class Search(NamedTuple):
    """Parameters of the search and of the choice of moves."""

    determinizations: int
    simulations: int
    seed: int
    evaluator: int
    exploration: float  # c in PUCT
    noise: float  # share of Dirichlet noise in the root's priors
    concentration: float  # the noise's alpha × legal actions
    temperature: float
    temperature_moves: int  # moves of a game, counted from its first, that are drawn; later ones take the most visited
    record: bool
    games_per_deal: int = 1  # so many games, one after the other by number, begin with the same random numbers
    resign: float = 0.0  # a player whose position is worth no more than minus this resigns; 0: no player does
    resign_check: float = 0.0  # share of games that are played to the end all the same


class Games(NamedTuple):
    """Per slot."""

    state: np.ndarray  # int64 [slots, words]
    stream: np.ndarray  # uint64 [slots, 2]
    game: np.ndarray  # int64 [slots]
    moves: np.ndarray  # int64 [slots]
    noise: np.ndarray  # float32 [slots, max_legal]
    records: np.ndarray  # int64 [slots]: how many of the arrays below are filled
    observation: np.ndarray  # [slots, max_moves, features]
    legal: np.ndarray  # bool [slots, max_moves, actions]
    policy: np.ndarray  # float32 [slots, max_moves, actions]
    player: np.ndarray  # int8 [slots, max_moves]
    move: np.ndarray  # int16 [slots, max_moves]
    resigned: np.ndarray  # int8 [slots]: the seat that has given up, or would have where the game is checked
    checked: np.ndarray  # bool [slots]: it is played to the end all the same
    lowest: (
        np.ndarray
    )  # float32 [slots, seats]: what a seat's position was worth when that was the game's least, or inf


class Trees(NamedTuple):
    """Per tree; tree = slot × determinizations + d."""

    root: np.ndarray  # int64 [trees, words]: the full position it searches
    nodes: np.ndarray  # NODE [trees, simulations + 1]
    edges: np.ndarray  # EDGE [trees, (simulations + 1) × max_legal]
    size: np.ndarray  # int32 [trees]: nodes in use
    done: np.ndarray  # int32 [trees]: simulations done
    path: np.ndarray  # int32 [trees, simulations + 1]: edges from the root to the leaf
    depth: np.ndarray  # int32 [trees]
    leaf: np.ndarray  # int32 [trees]: the node that waits for its evaluation
    row: np.ndarray  # int32 [trees]: its row in the block, -1 when none waits
    values: np.ndarray  # float32 [trees, seats]: a rollout's returns
    inverse: np.ndarray  # float32 [simulations + 2]: 1 / n
    root_of: np.ndarray  # float32 [simulations + 2]: sqrt(n)


class Log(NamedTuple):
    """What finished games leave behind until it is collected. Values count seats from the player to move."""

    observation: np.ndarray
    legal: np.ndarray
    policy: np.ndarray
    value: np.ndarray  # float32 [rows, seats]
    player: np.ndarray
    game: np.ndarray  # int64 [rows]
    move: np.ndarray
    finished: np.ndarray  # int64 [games]
    returns: np.ndarray  # float32 [games, seats], absolute seats
    resigned: np.ndarray  # int8 [games], and the next two as in `Games`
    checked: np.ndarray  # bool [games]
    lowest: np.ndarray  # float32 [games, seats]


OF_RESIGNATION = ("resigned", "checked", "lowest")  # in records only where players may resign
OF_GAMES = ("finished", "returns", *OF_RESIGNATION)  # one row a game; of all others one row a searched move


def allocate_games(game: Game, slots: int, record: bool) -> Games:
    kept = slots if record else 0
    return Games(
        state=np.zeros((slots, game.words), np.int64),
        stream=np.zeros((slots, 2), np.uint64),
        game=np.full(slots, IDLE, np.int64),
        moves=np.zeros(slots, np.int64),
        noise=np.zeros((slots, game.max_legal), np.float32),
        records=np.zeros(slots, np.int64),
        observation=np.zeros((kept, game.max_moves, game.features), game.feature_dtype),
        legal=np.zeros((kept, game.max_moves, game.actions), np.bool_),
        policy=np.zeros((kept, game.max_moves, game.actions), np.float32),
        player=np.zeros((kept, game.max_moves), np.int8),
        move=np.zeros((kept, game.max_moves), np.int16),
        resigned=np.full(slots, NOBODY, np.int8),
        checked=np.zeros(slots, np.bool_),
        lowest=np.full((slots, game.seats), np.inf, np.float32),
    )


def allocate_trees(game: Game, trees: int, simulations: int) -> Trees:
    counts = np.arange(simulations + 2, dtype=np.float32)
    return Trees(
        root=np.zeros((trees, game.words), np.int64),
        nodes=np.zeros((trees, simulations + 1), NODE),
        edges=np.zeros((trees, (simulations + 1) * game.max_legal), EDGE),
        size=np.zeros(trees, np.int32),
        done=np.zeros(trees, np.int32),
        path=np.zeros((trees, simulations + 1), np.int32),
        depth=np.zeros(trees, np.int32),
        leaf=np.zeros(trees, np.int32),
        row=np.full(trees, -1, np.int32),
        values=np.zeros((trees, game.seats), np.float32),
        inverse=1.0 / np.maximum(counts, 1.0),
        root_of=np.sqrt(counts),
    )


def allocate_log(game: Game, games: int, record: bool) -> Log:
    rows = games * game.max_moves if record else 0
    return Log(
        observation=np.zeros((rows, game.features), game.feature_dtype),
        legal=np.zeros((rows, game.actions), np.bool_),
        policy=np.zeros((rows, game.actions), np.float32),
        value=np.zeros((rows, game.seats), np.float32),
        player=np.zeros(rows, np.int8),
        game=np.zeros(rows, np.int64),
        move=np.zeros(rows, np.int16),
        finished=np.zeros(games, np.int64),
        returns=np.zeros((games, game.seats), np.float32),
        resigned=np.full(games, NOBODY, np.int8),
        checked=np.zeros(games, np.bool_),
        lowest=np.zeros((games, game.seats), np.float32),
    )


FOREST_NODE = np.dtype(
    [
        ("value", "f4"),  # the mean for the player to move
        ("visits", "i4"),
        ("parent", "i4"),  # -1 of the root
        ("edge", "i4"),  # of the tree, the one that leads here
        ("first", "i4"),  # of its own edges
        ("count", "i4"),  # 0: the game is over here
        ("mover", "i4"),
    ]
)
FOREST_EDGE = np.dtype([("prior", "f4"), ("q", "f4"), ("visits", "i4"), ("child", "i4"), ("action", "i4")])
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


class WantedEdges(NamedTuple):
    """Edges that Python is asked to play, at most one a tree. A root is one without parent and edge: -1."""

    tree: np.ndarray  # int32 [trees]
    node: np.ndarray  # int32 [trees]
    edge: np.ndarray  # int32 [trees]: of the tree
    action: np.ndarray  # int32 [trees]


class FoundNodes(NamedTuple):
    """What Python says of each edge that was wanted."""

    mover: np.ndarray  # int32 [wanted]: a seat, OVER or CHANCE
    width: np.ndarray  # int32 [wanted]: how many legal actions, or outcomes of chance
    actions: np.ndarray  # int32 [sum of widths]
    chances: np.ndarray  # float32 [sum of widths]: probabilities; of other nodes nothing
    outcome: np.ndarray  # float32 [wanted, seats]: returns where the game is over


def allocate_forest(trees: int, simulations: int, seats: int, max_legal: int) -> Forest:
    counts = np.arange(simulations + 2, dtype=np.float32)
    room = simulations + 1
    return Forest(
        nodes=np.zeros((trees, room), FOREST_NODE),
        edges=np.zeros((trees, room * min(max_legal, USUAL_WIDTH)), FOREST_EDGE),
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
    return FOREST_NODE.itemsize + 4 * game.seats + width * FOREST_EDGE.itemsize + game.position_bytes


def with_room(forest: Forest, nodes: int, edges: int) -> Forest:
    """The same, with room for so many of either in each tree: twice as much as there was, where it did not suffice."""
    changed: dict[str, np.ndarray] = {}
    for name, needed in (("nodes", nodes), ("outcome", nodes), ("edges", edges)):
        array: np.ndarray = getattr(forest, name)
        if array.shape[1] < needed:
            changed[name] = np.zeros((len(array), max(needed, 2 * array.shape[1]), *array.shape[2:]), array.dtype)
            changed[name][:, : array.shape[1]] = array
    return forest._replace(**changed) if changed else forest
