"""A game of which each move is given from outside: shown, searched on demand, taken back. For `gpuinfer play`.

It is the self-play of one slot. Its searches stop before a move is chosen, and the moves are those that are said. Moves
without a choice, and those of chance, make themselves, as in self-play.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import UsageError
from gpuinfer.host import error_text
from gpuinfer.workloads.selfplay import arrays, kernels
from gpuinfer.workloads.selfplay.arena import Arena
from gpuinfer.workloads.selfplay.draw import seed_stream
from gpuinfer.workloads.selfplay.evaluator import as_answers
from gpuinfer.workloads.selfplay.game import Game
from gpuinfer.workloads.selfplay.python_arena import PythonArena
from gpuinfer.workloads.selfplay.python_game import Position, PythonGame, calling

SLOT = 0  # the only one


@dataclass(frozen=True, slots=True)
class ConsideredMove:
    """What a search found about one move."""

    action: int
    share: float  # of all visits
    value: float | None  # the mean return of the player to move; None if never visited


class ManualGame:
    """One game from its deal on. `search` says how it is searched, without noise; `number` which deal it is."""

    def __init__(self, game: Game, search: arrays.Search, number: int) -> None:
        self.game, self._number = game, number
        plain = search._replace(noise=0.0, temperature=0.0, record=False, games_per_deal=1, resign=0.0)
        self._slot = _PythonSlot(game, plain, 1) if isinstance(game, PythonGame) else _CompiledSlot(game, plain)
        self._history: list[tuple[Position, int, int | None]] = []  # positions, the moves made there, and by which seat
        self._rows = self._slot.start(number)  # of the search, that want an evaluation

    @property
    def mover(self) -> int | None:
        """The seat that has a choice; None when the game is over."""
        return self._slot.mover

    @property
    def legal(self) -> Sequence[int]:
        """The actions that it has."""
        return self._slot.choices

    @property
    def returns(self) -> Sequence[float]:
        """Of a game that is over, by seat."""
        returns: list[float] = self._slot.outcome.tolist()
        return returns

    def shown(self, seat: int) -> str:
        """The position as this seat may see it."""
        with calling(self.game):
            return self._text("show", self.game.show(self._slot.position, seat))

    def names(self) -> dict[str, int]:
        """The legal actions by what people call them; by number, where two are called the same."""
        position, legal = self._slot.position, self.legal
        with calling(self.game):
            found = {self._text("action_name", self.game.action_name(position, one)): one for one in legal}
        return found if len(found) == len(legal) else {str(action): action for action in legal}

    def _text(self, method: str, said: Any) -> str:
        if not isinstance(said, str):
            raise UsageError(
                f"game '{type(self.game).__name__}': `{method}` returned {error_text.safe_repr(said)}. Return a text."
            )
        return said

    def play(self, action: int) -> None:
        """Make this move, which is legal."""
        self._history.append((self._slot.position, action, self.mover))
        self._rows = self._slot.go_on(self._slot.position, action)

    def take_back(self, seat: int) -> bool:
        """Go back to the last choice that this seat has made. False where it has made none."""
        places = [place for place, (_, _, mover) in enumerate(self._history) if mover == seat]
        if not places:
            return False
        del self._history[places[-1] :]
        if self._history:
            position, action, _ = self._history[-1]
            self._rows = self._slot.go_on(position, action)
        else:
            self._rows = self._slot.start(self._number)
        return True

    def think(self, ask: Callable[[np.ndarray], Any]) -> list[ConsideredMove]:
        """Search the position: all legal actions, most visited first. `ask` has a network answer rows of features."""
        slot, by_network = self._slot, self._slot.search.evaluator == arrays.NETWORK
        while self._rows:
            answers = as_answers(ask(slot.features[: self._rows]), self._rows, self.game) if by_network else ()
            self._rows = slot.play(*answers)
        edges = slot.edges
        visits = edges["visits" if slot.search.simulations > 1 else "prior"].astype(np.float64)
        total, each = visits.sum(), visits.sum(axis=0)
        sums = (edges["q"] * edges["visits"]).sum(axis=0, dtype=np.float64)
        seen = edges["visits"].sum(axis=0)
        found = [
            ConsideredMove(action, float(each[k] / total), float(sums[k] / seen[k]) if seen[k] else None)
            for k, action in enumerate(self.legal)
        ]
        return sorted(found, key=lambda one: -one.share)


class _CompiledSlot(Arena):
    """Where the rules are compiled, only the search asks them: it is made to choose the move that was said."""

    outcome: NDArray[np.float32]

    def __init__(self, game: Game, search: arrays.Search) -> None:
        super().__init__(game, kernels.load_search(game.rules), search, 1)

    def start(self, number: int) -> int:
        self._games.game[SLOT] = arrays.IDLE
        self._number = number
        self.counters[arrays.LOG_GAMES] = 0
        self.add_games([number])
        return self._until_a_choice()

    def go_on(self, position: Position, action: int) -> int:
        """The rows that the search of the position after it wants evaluated first."""
        games, trees = self._games, self._trees
        games.game[SLOT], games.state[SLOT] = self._number, position
        root, edge = trees.nodes[:, 0], trees.edges[:, 0]
        root["count"] = 1
        edge["action"], edge["visits"], edge["prior"] = action, 1, 1.0
        trees.row[:], trees.done[:] = -1, self.search.simulations
        self.counters[arrays.LOG_GAMES] = 0
        return self._until_a_choice()

    def _until_a_choice(self) -> int:
        rows = self.play()
        if (ended := self.collect()) is not None:
            self.outcome = ended["returns"][0]
        self.counters[arrays.LOG_GAMES] = self._log_room  # a full log keeps the search from choosing a move
        return rows

    @property
    def position(self) -> Position:
        return self._games.state[SLOT].copy()

    @property
    def mover(self) -> int | None:
        return None if self._games.game[SLOT] == arrays.IDLE else int(self._trees.nodes["mover"][0, 0])

    @property
    def choices(self) -> Sequence[int]:
        actions: list[int] = [] if self.mover is None else self.edges["action"][0].tolist()
        return actions

    @property
    def edges(self) -> np.ndarray:
        """[determinizations, legal actions] of the roots."""
        return self._trees.edges[:, : int(self._trees.nodes["count"][0, 0])]


class _PythonSlot(PythonArena):
    """Where the rules are Python, they are asked."""

    outcome: NDArray[np.float32]
    _unsearched = False  # the position has no trees yet

    def start(self, number: int) -> int:
        self._number = number
        seed_stream(self._streams[SLOT], self.search.seed, number)
        self._moves[SLOT] = 0
        with calling(self.game):
            self._states[SLOT] = self.game.deal(self._draws[SLOT])
            return self._until_a_choice()

    def go_on(self, position: Position, action: int) -> int:
        self._moves[SLOT] = 1  # or more: moves may have been taken back
        with calling(self.game):
            self._states[SLOT] = self.game.apply(position, action)
            return self._until_a_choice()

    def _until_a_choice(self) -> int:
        self._unsearched = self._has_choice(SLOT)
        self.games[SLOT] = self._number if self._unsearched else arrays.IDLE
        self._forest.row[:] = -1
        if not self._unsearched:
            self.outcome = self._rules.returns(self._states[SLOT])
            return 0
        return self.play()

    def _go_on(self) -> list[Position]:
        """No move is chosen here: the roots of a position that has no trees yet."""
        unsearched, self._unsearched = self._unsearched, False
        return self._search(SLOT, 0) if unsearched else []

    def _ended(self) -> np.ndarray:
        return np.zeros(0, np.intp)

    @property
    def position(self) -> Position:
        return self._states[SLOT]

    @property
    def mover(self) -> int | None:
        return None if self.games[SLOT] == arrays.IDLE else int(self._movers[SLOT])

    @property
    def choices(self) -> Sequence[int]:
        return () if self.mover is None else self._legal[SLOT]

    @property
    def edges(self) -> np.ndarray:
        return self._forest.edges[:, : len(self._legal[SLOT])]
