"""One game of the engine `diplomacy`, in plain values.

The engine is imported with the first game, since that takes a third of a second. Its calls take milliseconds, all of
them in Python: `on_thread` runs them on the one thread of all games. More of them would only wait for one another.
"""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

Kind = Literal["M", "R", "A"]  # movement, retreats, adjustments
Orders = Mapping[str, Sequence[str]]  # by power

FIRST_YEAR = 1901


@dataclass(frozen=True, slots=True)
class Position:
    """What is to be ordered, and on which board. All lists are sorted: the same board is the same text."""

    phase: str  # such as S1901M
    units: Mapping[str, Sequence[str]]  # power → "A PAR"; dislodged ones are in `dislodged`
    dislodged: Mapping[str, Sequence[str]]
    centers: Mapping[str, Sequence[str]]  # power → those that it owns
    legal: Mapping[str, Mapping[str, Sequence[str]]]  # power → province → the orders of what stands or is built there
    adjustments: Mapping[str, int]  # power → builds that it may order, or disbands that it must, negative

    @property
    def kind(self) -> Kind:
        return self.phase[-1]  # type: ignore[return-value]

    @property
    def year(self) -> int:
        return int(self.phase[1:5])


@dataclass(frozen=True, slots=True)
class Resolved:
    """What was ordered in a phase, and what came of those orders that did not go as ordered."""

    phase: str
    orders: Mapping[str, Sequence[str]]
    results: Mapping[str, str]  # unit → such as "bounce"; units whose orders went well are not in it


class Board:
    """One game. No two calls at once."""

    def __init__(self) -> None:
        self._game = _game_class()()

    @property
    def over(self) -> bool:
        """Whether a power has won."""
        return bool(self._game.is_game_done)

    def state(self) -> dict[str, Any]:
        """A plain copy: a game goes on from it in any number of boards, since copying a whole game takes a second."""
        state: dict[str, Any] = self._game.get_state()
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        self._game.set_state(dict(state))

    def position(self) -> Position:
        game = self._game
        possible = {} if self.over else game.get_all_possible_orders()
        legal = {
            # a power that orders no build has waived it
            power: {
                place: tuple(found)
                for place in places
                if (found := sorted(order for order in possible[place] if order != "WAIVE"))
            }
            for power, places in ({} if self.over else game.get_orderable_locations()).items()
        }
        state = game.get_state()
        return Position(
            phase=game.get_current_phase(),
            units={power: sorted(u for u in units if u[0] != "*") for power, units in state["units"].items()},
            dislodged={power: sorted(units) for power, units in state["retreats"].items()},
            centers={power: sorted(centers) for power, centers in state["centers"].items()},
            legal=legal,
            adjustments={power: builds["count"] for power, builds in state["builds"].items()},
        )

    def accepts(self, power: str, orders: Sequence[str]) -> bool:
        """Whether the engine takes all of these orders, and no fewer. They stand until the next are given."""
        self._game.clear_orders(power)
        self._game.error = []
        self._game.set_orders(power, list(orders), expand=False)
        return not self._game.error and sorted(self._game.get_orders(power)) == sorted(orders)

    def play(self, orders: Orders) -> Resolved:
        """Adjudicate the phase. Orders are to be legal ones; a unit without one holds, or goes as the rules say."""
        for power, ordered in orders.items():
            self._game.set_orders(power, list(ordered), expand=False)  # a third of the time that reading them takes
        data = self._game.process()
        messages = {unit: [code.message for code in codes if code.message] for unit, codes in data.results.items()}
        results = {unit: ", ".join(map(str, found)) for unit, found in messages.items() if found}
        return Resolved(data.name, {power: tuple(ordered or ()) for power, ordered in data.orders.items()}, results)


@lru_cache(1)
def _game_class() -> Callable[[], Any]:
    """The engine, without what its import does besides: files left open, and a log of its own on standard error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import diplomacy

    log = logging.getLogger("diplomacy")
    log.handlers.clear()
    log.setLevel(logging.WARNING)
    log.propagate = True
    game: Callable[[], Any] = diplomacy.Game
    return game


@lru_cache(1)
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="diplomacy")


async def on_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(_thread(), partial(function, *arguments))
