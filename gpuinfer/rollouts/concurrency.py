"""How many games are under way at once, as many as keep the model busy and no more than its cache holds, and which
group is begun when.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuinfer.errors import Closed
from gpuinfer.rollouts.agent import RolloutCounts

if TYPE_CHECKING:
    from gpuinfer.rollouts.training import Training

CARRIED = 0.5  # of all prompt tokens, earlier messages: from there on conversations count
KEPT, LOST = 0.9, 0.7  # of earlier messages, the part that is cached: there may be more games; there were too many
MOST_GAMES = 4  # for each slot, however slow the environment is
GROWTH = 1.25  # of the conversations that there may be


@dataclass(eq=False)
class GamePlace:
    """The place of one game. `agents` is known once the game has begun."""

    agents: int | None = None
    has_asked: bool = False  # it has asked for its first answers


class ConcurrencyController:
    """Admits games, first come, first served; all at once without `slots`.

    All methods belong to one event loop.
    """

    def __init__(self, counts: RolloutCounts, slots: int | None = None) -> None:
        self.counts, self._slots = counts, math.inf if slots is None else slots
        self._most = self._slots  # conversations at once
        self._ceiling = math.inf
        self._judged = (0, 0, 0)  # of `Counts`, when `_most` was judged last
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._places: set[GamePlace] = set()
        self._agents: int | None = None  # of the latest game
        self._carries: bool | None = None  # most of a prompt is earlier messages; None: no game is over yet
        self.changed: Callable[[], None] = lambda: (
            None
        )  # called when there may be room for more games than those that wait
        counts.changed = self.admit_waiting

    @property
    def games(self) -> int:
        return len(self._places)

    @property
    def room(self) -> bool:
        """Whether a game that came now would be let in at once."""
        return not self._waiting and self._has_room

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[GamePlace]:
        """Wait for the place of one game, and free the place at the end."""
        if not self.room:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done():
                    asyncio.get_running_loop().call_soon(self.admit_waiting)
                raise
        place = GamePlace(self._agents)
        self._places.add(place)
        self.admit_waiting()
        try:
            yield place
        finally:
            self._places.discard(place)
            self._judge()
            self.admit_waiting()

    def game_started(self, place: GamePlace, agents: int) -> None:
        """The game has begun, and so many may speak in it."""
        place.agents = self._agents = agents
        self.admit_waiting()

    def asking(self, place: GamePlace) -> None:
        """The game has asked for its first answers."""
        if not place.has_asked:
            place.has_asked = True
            self.admit_waiting()

    def admit_waiting(self) -> None:
        """Admit the games that wait, as far as there is room."""
        while self._waiting and (self._waiting[0].done() or self._has_room):
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return  # it takes its place, and looks again
        if not self._waiting:
            self.changed()

    @property
    def _has_room(self) -> bool:
        if not self._places or self._slots == math.inf:
            return True
        quiet = sum(1 for place in self._places if not place.has_asked)
        if (
            len(self._places) >= MOST_GAMES * self._slots
            or self.counts.asked + quiet * self.counts.width >= self._slots
        ):
            return False
        if self._carries is False:
            return True
        conversations = sum(place.agents or math.inf for place in self._places)
        return conversations + (self._agents or math.inf) <= self._most

    def _judge(self) -> None:
        """After a game: adapt the number of conversations to how much of the repeated prompts was cached."""
        counts = self.counts
        self._carries = counts.carried_tokens >= CARRIED * counts.input_tokens
        now = counts.again, counts.carried_tokens, counts.kept_tokens
        turns, carried, kept = (new - old for new, old in zip(now, self._judged, strict=True))
        if turns < 2 * self._most or not carried:
            return
        self._judged = now
        if kept >= KEPT * carried:
            self._most = min(self._ceiling, GROWTH * self._most)
        elif kept < LOST * carried and self._most > self._slots:
            self._most = self._ceiling = max(self._slots, self._most / GROWTH)


class GroupFeed:
    """Gives out numbers of groups: while fewer than `limit` are under way, or, without a limit, whenever the controller
    has room for one more game; with a training, when its rule of capacity admits one more.
    """

    def __init__(
        self,
        numbers: Iterable[int],
        controller: ConcurrencyController,
        limit: int | None = None,
        training: Training | None = None,
    ) -> None:
        self._numbers, self._controller, self._limit, self._training = numbers, controller, limit, training
        self.under_way = 0  # groups that have been begun and are not over
        self._change = asyncio.Event()
        controller.changed = self._change.set

    async def __aiter__(self) -> AsyncIterator[int]:
        async for number in self.numbers():
            if self._training is not None:
                try:
                    await self._training.admitted()
                except Closed:  # the trainer wants no more
                    return
            await self.room()
            if self._training is not None:
                self._training.started()
            self.under_way += 1
            yield number

    async def numbers(self) -> AsyncIterator[int]:
        """Those that are to be played, in their order."""
        for number in self._numbers:
            yield number

    async def room(self) -> None:
        """Wait until one more group may be begun."""
        while not (self._controller.room if self._limit is None else self.under_way < self._limit):
            self._change.clear()
            await self._change.wait()

    def finished(self) -> None:
        self.under_way -= 1
        self._change.set()
