"""Which games are let in: told with a toy of a game that asks, is answered and goes on."""

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.rollouts.agent import RolloutCounts
from gpuinfer.rollouts.concurrency import ConcurrencyController


class Games:
    """Games that ask a controller for a place, each until `go`."""

    def __init__(self, controller, agents=1):
        self.controller, self.agents = controller, agents
        self.inside, self._go, self._tasks = [], {}, []

    async def come(self, number):
        self._go[number] = asyncio.Event()
        self._tasks.append(asyncio.create_task(self._one(number)))
        await settled()

    async def _one(self, number):
        async with self.controller.place() as place:
            self.inside.append(number)
            self.controller.game_started(place, self.agents)
            self.controller.counts.ask(self.agents)
            self.controller.asking(place)
            try:
                await self._go[number].wait()
            finally:
                for _ in range(self.agents):
                    self.controller.counts.answered(None)
                self.inside.remove(number)

    async def go(self, number):
        self._go[number].set()
        await settled()

    async def end(self):
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)


async def settled():
    for _ in range(10):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def games_of(slots, agents=1, counts=None):
    games = Games(ConcurrencyController(counts or RolloutCounts(), slots), agents)
    try:
        yield games
    finally:
        await games.end()


async def test_conversations_have_slots_too_until_it_is_known_that_nothing_is_said_again():
    async with games_of(slots=7, agents=3, counts=RolloutCounts(input_tokens=10)) as games:
        for number in range(4):
            await games.come(number)
            for _ in range(2):  # of three agents one is asked
                games.controller.counts.answered(None)
        assert games.inside == [0, 1]
        await games.go(0)
        games.controller.counts.asked = 2
        games.controller.admit_waiting()
        await settled()
        assert games.inside == [1, 2, 3]


@pytest.mark.parametrize(("cached", "most"), [(1.0, 10), (0.8, 8), (0.0, 8)])
async def test_games_are_let_in_by_how_much_a_backend_remembers(cached, most):
    counts = RolloutCounts()
    async with games_of(slots=8, counts=counts) as games:
        await games.come(0)
        counts.input_tokens, counts.carried_tokens, counts.again = 1000, 900, 20
        counts.kept_tokens = int(900 * cached)
        await games.go(0)
        for number in range(1, 12):
            await games.come(number)
            games.controller.counts.answered(None)
        assert len(games.inside) == most


@given(
    moves=st.lists(st.tuples(st.sampled_from(["come", "go", "cancel"]), st.integers(0, 30)), min_size=1, max_size=40),
    slots=st.integers(1, 5),
    agents=st.integers(1, 4),
)
def test_whoever_comes_gets_a_place_in_turn_and_nobody_waits_before_an_empty_table(moves, slots, agents):
    async def play():
        async with games_of(slots, agents) as games:
            for number, (move, which) in enumerate(moves):
                if move == "come" or not number:
                    await games.come(len(games._tasks))
                elif which < len(games._tasks):
                    games._go[which].set() if move == "go" else games._tasks[which].cancel()
                    await settled()
            left = [number for number, task in enumerate(games._tasks) if not task.done()]
            assert games.inside == sorted(games.inside) == left[: len(games.inside)]
            assert games.inside or not left
            assert games.controller.games == len(games.inside)
            for number in left:
                games._go[number].set()
            for _ in left:
                await settled()
            assert games.inside == []

    asyncio.run(play())
