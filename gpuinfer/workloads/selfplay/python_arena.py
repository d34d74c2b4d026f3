"""One half of a worker's games where the rules are Python: what `Arena` is for compiled ones, game for game the same.

A round takes all trees one leaf further. In between, Python plays the edges that the trees came to, each once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

import numpy as np

from gpuinfer.workloads.selfplay import arrays, python_search
from gpuinfer.workloads.selfplay.arena import GameSlots
from gpuinfer.workloads.selfplay.arrays import FoundNodes
from gpuinfer.workloads.selfplay.draw import Draw, draw_by_visits, draw_noise, seed_stream, unit_of
from gpuinfer.workloads.selfplay.game import OutOfBounds
from gpuinfer.workloads.selfplay.python_game import (
    CHANCE,
    CLOSE,
    OVER,
    CheckedRules,
    GameLength,
    Position,
    PythonGame,
    calling,
    refuse_long,
)

ROOT = -1  # the parent of a root, and the edge that leads to it


class PythonArena(GameSlots):
    """Games whose rules are Python."""

    game: PythonGame

    def __init__(self, game: PythonGame, search: arrays.Search, slots: int, features: np.ndarray | None = None) -> None:
        super().__init__(game, search, slots, features)
        self._rules = CheckedRules(game)
        self.games = np.full(slots, arrays.IDLE, np.int64)
        self._moves = np.zeros(slots, np.int64)
        self._states: list[Position] = [None] * slots
        self._legal: list[list[int]] = [[]] * slots  # at the position that is searched
        self._movers = np.zeros(slots, np.int64)  # likewise
        self._streams = np.zeros((slots, 2), np.uint64)
        self._draws = [Draw(stream) for stream in self._streams]
        self._noise = np.zeros((slots, game.max_legal), np.float32)
        self._records: list[list[dict[str, Any]]] = [[] for _ in range(slots)]
        self._resigned = np.full(slots, arrays.NOBODY, np.int8)  # and the next two as in `arrays.Games`
        self._checked = np.zeros(slots, np.bool_)
        self._lowest = np.full((slots, game.seats), np.inf, np.float32)
        self._log: list[dict[str, np.ndarray]] = []
        self._forest = arrays.allocate_forest(self.trees, search.simulations, game.seats, game.max_legal)
        self._positions: list[list[Position]] = [[] for _ in range(self.trees)]  # of each node
        self._wanted = arrays.WantedEdges(*(np.zeros(self.trees, np.int32) for _ in arrays.WantedEdges._fields))
        self._rows_of = np.zeros(self.trees, np.int32)
        self._rows = 0
        self._seats = np.zeros(game.seats, np.float32)

    def roots(self) -> tuple[np.ndarray, np.ndarray]:
        slots = self._rows_of[: self._rows] // self.search.determinizations
        return slots, self._movers[slots]

    def play(self, logits: np.ndarray | None = None, values: np.ndarray | None = None, rounds: int = 1) -> int:
        for _ in range(rounds):
            python_search.absorb(
                self.search,
                self._forest,
                self._noise,
                self.counters,
                self._no_logits if logits is None else logits,
                self._no_values if values is None else values,
                self._seats,
            )
            with calling(self.game):
                self._round()
            if self._rows == 0:
                break
        return self._rows

    def _round(self) -> None:
        """From absorbed answers to the next block: each tree that is not done has a leaf in it."""
        self._rows = 0
        while True:
            positions = self._go_on()
            roots = len(positions)
            count = python_search.descend(
                self.search, self._forest, self._streams, self.counters, self._wanted, np.int64(roots)
            )
            if count == 0 and not len(self._ended()):
                return
            apply, known = self.game.apply, self._positions
            trees, nodes, _, actions = (part[roots:count].tolist() for part in self._wanted)
            positions += [
                apply(known[tree][node], action) for tree, node, action in zip(trees, nodes, actions, strict=True)
            ]
            if positions:
                self._grow(positions, roots)

    def _ended(self) -> np.ndarray:
        """The slots whose search has ended, or that have no game while there is one to begin."""
        done = self._forest.done.reshape(self.slots, -1).min(axis=1) >= self.search.simulations
        if not (self.queued and len(self._log) < self._log_room):
            done &= self.games != arrays.IDLE
        return np.flatnonzero(done)

    def _go_on(self) -> list[Position]:
        """Make the moves that have been searched, end games and begin others. The roots that want an evaluation then,
        which are the first of `_wanted`.
        """
        roots: list[Position] = []
        for slot in self._ended().tolist():
            if self.games[slot] != arrays.IDLE and not self._choose(slot):
                self._finish(slot)
            while self.games[slot] != arrays.IDLE or self._start(slot):
                if self._has_choice(slot):
                    roots += self._search(slot, len(roots))
                    break
                self._finish(slot)
        return roots

    def _start(self, slot: int) -> bool:
        """Deal the next game of the queue. False when there is none, or no room for what it leaves."""
        if not self.queued or len(self._log) >= self._log_room:
            return False
        number = int(self._queue[self.counters[arrays.NEXT]])
        self.counters[arrays.NEXT] += 1
        self.games[slot], self._moves[slot] = number, 0
        self._resigned[slot], self._lowest[slot] = arrays.NOBODY, np.inf
        self._checked[slot] = unit_of(self.search.seed, number) < self.search.resign_check
        seed_stream(self._streams[slot], self.search.seed, number // self.search.games_per_deal)
        self._states[slot] = self.game.deal(self._draws[slot])
        return True

    def _has_choice(self, slot: int) -> bool:
        """Make forced moves and those of chance up to the next choice. False when the game is over first."""
        rules, state = self._rules, self._states[slot]
        legal: list[int] = []
        length, made_by = GameLength(self.game), "apply" if self._moves[slot] else "deal"
        while (mover := rules.to_move(state, made_by)) != OVER:
            if mover == CHANCE:
                action = _drawn(rules.chances(state), self._draws[slot].unit())
            else:
                legal = rules.legal(state, made_by)
                if len(legal) > 1:
                    break
                action = legal[0]
                self._moves[slot] += 1
                refuse_long(self.game, self._moves[slot])
            length.count(mover)
            state, made_by = rules.apply(state, action), "apply"
        self._states[slot], self._legal[slot], self._movers[slot] = state, legal, mover
        return mover != OVER

    def _search(self, slot: int, wanted: int) -> list[Position]:
        """Empty trees for the position; their roots, which are put into `_wanted` from that place on."""
        game, search, state = self.game, self.search, self._states[slot]
        first = slot * search.determinizations
        trees = slice(first, first + search.determinizations)
        roots = [game.determinize(state, self._draws[slot]) for _ in range(search.determinizations)]
        draw_noise(search, self._streams[slot], self._noise[slot], len(self._legal[slot]))
        for positions in self._positions[trees]:
            positions.clear()
        for used in (self._forest.nodes_used, self._forest.edges_used, self._forest.done):
            used[trees] = 0
        self._forest.at[trees] = -1  # until the root has been evaluated
        places = slice(wanted, wanted + search.determinizations)
        self._wanted.tree[places] = range(trees.start, trees.stop)
        self._wanted.node[places] = self._wanted.edge[places] = ROOT
        if search.record:
            legal = np.zeros(game.actions, np.bool_)
            legal[self._legal[slot]] = True
            row = np.concatenate([legal, self._rules.observe(state)], dtype=game.feature_dtype)
            self._records[slot].append(
                {"observation": row, "legal": legal, "player": self._movers[slot], "move": self._moves[slot]}
            )
        return roots

    def _choose(self, slot: int) -> bool:
        """Add the visits of all determinizations up, record them, and play: drawn early in the game, the best later.

        False when the player resigns in place of that.
        """
        search, legal = self.search, self._legal[slot]
        first, count = slot * search.determinizations, len(legal)
        edges = self._forest.edges[first : first + search.determinizations, :count]
        # a single simulation evaluates the root alone: its priors are all there is
        visits = edges["visits" if search.simulations > 1 else "prior"].sum(axis=0, dtype=np.float32)
        if search.record:
            policy = np.zeros(self.game.actions, np.float32)
            policy[legal] = visits / visits.sum(dtype=np.float64)
            self._records[slot][-1]["policy"] = policy
        if search.resign:
            gives_up = python_search.would_resign(search, self._forest, np.int64(first), self._lowest[slot])
            if gives_up and self._resigned[slot] == arrays.NOBODY:
                self._resigned[slot] = self._movers[slot]
            if self._resigned[slot] != arrays.NOBODY and not self._checked[slot]:
                return False
        if search.temperature > 0.0 and self._moves[slot] < search.temperature_moves:
            chosen = draw_by_visits(visits, count, search.temperature, self._streams[slot])
        else:
            chosen = int(visits.argmax())
        self._states[slot] = self.game.apply(self._states[slot], legal[chosen])
        self._moves[slot] += 1
        refuse_long(self.game, self._moves[slot])
        return True

    def _finish(self, slot: int) -> None:
        """Write the game's returns and records to the log."""
        loser = self._resigned[slot]
        if loser != arrays.NOBODY and not self._checked[slot]:
            returns = np.ones(self.game.seats, np.float32)
            returns[loser] = -1.0
        else:
            returns = self._rules.returns(self._states[slot])
        number, rows = self.games[slot], self._records[slot]
        self.games[slot], self._states[slot], self._records[slot] = arrays.IDLE, None, []
        self.counters[arrays.FINISHED] += 1
        player = np.array([row["player"] for row in rows], np.int8)
        game, seats = self.game, self.game.seats
        shapes = (("observation", game.features, game.feature_dtype), ("legal", game.actions, "bool"))
        part = {
            **{
                name: np.array([row[name] for row in rows], dtype).reshape(len(rows), width)
                for name, width, dtype in (*shapes, ("policy", game.actions, "float32"))
            },
            "value": returns[(player[:, None] + np.arange(seats)) % seats],
            "player": player,
            "game": np.full(len(rows), number, np.int64),
            "move": np.array([row["move"] for row in rows], np.int16),
            "finished": np.array([number], np.int64),
            "returns": returns[None],
        }
        if self.search.resign:
            of_slot = (self._resigned[[slot]], self._checked[[slot]], self._lowest[[slot]])
            part |= dict(zip(arrays.OF_RESIGNATION, of_slot, strict=True))
        self._log.append(part)

    def play_out(self, rows: np.ndarray, logits: np.ndarray, values: np.ndarray) -> None:
        seats = np.arange(self.game.seats)
        for row in rows.tolist():
            tree = int(self._rows_of[row])
            leaf = int(self._forest.leaf[tree])
            draw = self._draws[tree // self.search.determinizations]
            with calling(self.game):
                returns = self._played_out(self._positions[tree][leaf], draw)
            logits[row] = 0.0
            values[row] = returns[(self._forest.nodes["mover"][tree, leaf] + seats) % self.game.seats]

    def collect(self) -> dict[str, np.ndarray] | None:
        if not self._log:
            return None
        parts, self._log = self._log, []
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def policies(self) -> dict[int, list[np.ndarray]]:
        """Of each game under way or not collected yet, its policies so far, float32 [actions]: what is recorded."""
        ended = {int(part["finished"][0]): list(part["policy"]) for part in self._log}
        busy = [(int(number), slot) for slot, number in enumerate(self.games) if number != arrays.IDLE]
        return ended | {
            number: [row["policy"] for row in self._records[slot] if "policy" in row] for number, slot in busy
        }

    def _grow(self, positions: list[Position], roots: int) -> None:
        """Nodes for these positions, in the order of `_wanted`, and rows of the block where a seat moves. The first
        `roots` of them are roots.
        """
        try:
            found = self._look_at(positions)
        except Exception:
            self._refuse(positions, roots)
            raise
        count = len(positions)
        trees = self._wanted.tree[:count]
        if roots:
            self._refuse_guesses(found, trees[:roots])
        nodes = int(self._forest.nodes_used[trees].max()) + 1
        edges = int((self._forest.edges_used[trees] + found.width).max())
        self._forest = arrays.with_room(self._forest, nodes, edges)
        before = self._rows
        rows = python_search.grow(
            self._forest,
            self._wanted,
            found,
            self.counters,
            self.features,
            np.int64(before),
            np.int64(self.game.actions),
            np.int64(self.game.max_legal),
            self._rows_of,
        )
        if rows == python_search.UNSOUND:
            self._refuse(positions, roots)
            raise OutOfBounds("its methods answer otherwise at a second look. Answer from the position alone.")
        self._rows = int(rows)
        observe, actions, seats = self.game.observe, self.game.actions, found.mover >= 0
        for tree, position in zip(trees.tolist(), positions, strict=True):
            self._positions[tree].append(position)
        leaves = np.flatnonzero(seats).tolist()
        for row, place in enumerate(leaves, before):
            observe(positions[place], self.features[row, actions:])
        if self.features.dtype.kind == "f" and not python_search.are_finite(self.features[before : self._rows]):
            self._refuse(positions, roots)
        if self.search.evaluator == arrays.ROLLOUT:
            for row, place in enumerate(leaves, before):
                tree = self._rows_of[row]
                draw = self._draws[tree // self.search.determinizations]
                self._forest.values[tree] = self._played_out(positions[place], draw)

    def _look_at(self, positions: list[Position]) -> FoundNodes:
        """What there is to know of each, once. Forced moves are made at once: a position in the list is replaced by the
        one after them.
        """
        game = self.game
        to_move, legal, most, seats = game.to_move, game.legal, game.max_moves, game.seats
        movers: list[int] = []
        counts: list[int] = []
        actions: list[int] = []
        chances: list[tuple[int, list[float]]] = []  # from which place on in `actions`
        outcome = np.zeros((len(positions), seats), np.float32)
        for place, position in enumerate(positions):
            mover, choices, forced = to_move(position), _NONE, 0
            while mover >= 0:
                choices = legal(position)
                if len(choices) != 1:
                    break
                forced += 1
                if forced > most:
                    refuse_long(game, forced)
                if not 0 <= (action := index(choices[0])) < game.actions:
                    raise OutOfBounds(f"`legal` names action {action}; actions = {game.actions}.")
                positions[place] = position = game.apply(position, action)
                mover, choices = to_move(position), _NONE
            if mover == CHANCE:
                outcomes = game.chances(position)
                choices = [action for action, _ in outcomes]
                chances.append((len(actions), [chance for _, chance in outcomes]))
            elif mover == OVER:
                returns = game.returns(position)
                if len(returns) != seats:  # one number would be taken for all of them
                    raise OutOfBounds(f"`returns` gives {len(returns)} numbers for seats = {seats}.")
                outcome[place] = returns
            movers.append(mover)
            counts.append(len(choices))
            actions.extend(choices)
        found = FoundNodes(
            _whole(movers),
            np.array(counts, np.int32),
            _whole(actions),
            np.zeros(len(actions), np.float32),
            outcome,
        )
        for start, probabilities in chances:
            if not abs(sum(probabilities) - 1.0) <= CLOSE or min(probabilities) < 0.0:
                raise OutOfBounds(f"`chances` adds up to {sum(probabilities)}.")
            found.chances[start : start + len(probabilities)] = probabilities
        return found

    def _refuse(self, positions: Sequence[Position], roots: int) -> None:
        """Raises `OutOfBounds` for the first of these positions of which a method returns what it may not."""
        for place, position in enumerate(positions):
            self._rules.check_position(position, "determinize" if place < roots else "apply")

    def _refuse_guesses(self, found: FoundNodes, trees: np.ndarray) -> None:
        """Raises `OutOfBounds` unless at these roots, the first of what was found, the game's own seat moves."""
        count = len(trees)
        slots = trees // self.search.determinizations
        legal = [len(self._legal[slot]) for slot in slots.tolist()]
        if (found.mover[:count] != self._movers[slots]).any() or (found.width[:count] != legal).any():
            raise OutOfBounds(
                "`determinize` gives a position that the player to move can tell from the true one: another seat moves "
                "there, or other actions are legal. Change only what that player cannot see."
            )

    def _played_out(self, position: Position, draw: Draw) -> np.ndarray:
        """float32 [seats]: what comes of moves at random."""
        game, length = self.game, GameLength(self.game)
        try:
            while (mover := game.to_move(position)) != OVER:
                if mover == CHANCE:
                    action = _drawn(self._rules.chances(position), draw.unit())
                else:
                    legal = game.legal(position)
                    action = index(legal[draw.below(len(legal))])
                length.count(mover)
                position = game.apply(position, action)
        except OutOfBounds:
            raise
        except Exception:
            self._rules.check_position(position, "apply")
            raise
        return self._rules.returns(position)


_NONE: Sequence[int] = ()


def _whole(numbers: list[Any]) -> np.ndarray:
    """int32. Raises `TypeError` for what is no whole number, which a conversion would round."""
    if not numbers:
        return np.zeros(0, np.int32)
    array = np.array(numbers)
    if array.dtype.kind not in "iub":
        raise TypeError(f"not whole numbers: {array.dtype}")
    return array.astype(np.int32)


def _drawn(outcomes: Iterable[tuple[int, float]], unit: float) -> int:
    """One of them, in proportion to its probability; `unit` is uniform on [0, 1)."""
    drawn = -1
    for drawn, chance in outcomes:  # noqa: B007 (the last one, where rounding leaves something over)
        unit -= chance
        if unit < 0.0:
            break
    return drawn
