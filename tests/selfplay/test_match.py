"""Games and the workers that lose them: whatever is killed when, each game counts exactly once."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter

import pytest
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuinfer.errors import WorkerDied
from gpuinfer.workloads.selfplay.match import GameSource, Match, NumberedGames

STEPS = 100_000  # a match that takes more hangs


class Player:
    """A worker as the match sees it. Its games are finished, then written, then reported."""

    def __init__(self):
        self.queue, self.finished, self.written = [], [], []
        self.played = self.told = 0
        self.more, self.asked, self.over, self.alive = True, True, False, True

    def hear(self, message):
        self.over |= "over" in message
        if "games" in message:
            self.queue += message["games"]
            self.more, self.asked = message["more"], False


class Crew:
    """Workers that act in a random order, and of whom some are killed at random moments."""

    def __init__(self, workers, kills, seed, *, records):
        self.players = [Player() for _ in range(workers)]
        self.disk: Counter[int] = Counter()
        self.reported: Counter[int] = Counter()
        self.records, self.kills, self.random = records, kills, random.Random(seed)

    async def send(self, worker, message):
        if not self.players[worker].alive:
            raise WorkerDied("it is gone. Do without it.")
        self.players[worker].hear(message)

    async def __aiter__(self):
        unready = set(range(len(self.players)))
        for _ in range(STEPS):
            await asyncio.sleep(0)  # games are given by another task
            alive = [number for number, player in enumerate(self.players) if player.alive]
            if not alive:
                return
            worker = self.random.choice(alive)
            player = self.players[worker]
            if self.kills and self.random.random() < 0.05:
                self.kills, player.alive = self.kills - 1, False
                yield worker, None
            elif worker in unready:
                unready.remove(worker)
                yield worker, {"ready": [1]}
            elif player.over:
                player.alive = False
                yield worker, {**self.report(player), "ended": True}
                yield worker, None
            elif (message := self.act(player)) is not None:
                yield worker, message
        raise AssertionError("the match does not end")

    def act(self, player):
        """One step of its own choice, and what it says then."""
        step = self.random.choice(["play", "play", "write", "report", "ask"])
        if step == "play" and player.queue:
            player.finished.append(player.queue.pop(0))
            player.played += 1
        elif step == "write":
            self.write(player)
        elif step == "ask" and player.more and not player.asked and len(player.queue) < 2:
            player.asked = True
            return {"need": 3}
        elif step == "report":
            if not player.queue and not player.more:
                self.write(player)
            return self.report(player)
        return None

    def write(self, player):
        self.disk.update(player.finished)
        player.written += player.finished
        player.finished = []

    def report(self, player):
        kept, player.written = player.written, []
        self.reported.update(kept)
        player.told = player.played
        return {"counts": {"games": player.played, "simulations": 10 * player.played}, "begun": 0.0, "kept": kept}

    def on_disk(self):
        return set(self.disk) if self.records else set()

    @property
    def counted(self):
        return self.disk if self.records else self.reported


class InBatches(GameSource):
    """Games of which some are given when all that were given before count, as between two versions of the weights."""

    def __init__(self, total):
        self.given, self.counting, self.wanted = [], [], total
        self.news = asyncio.Event()

    @property
    def left(self):
        return math.inf if len(self.given) < self.wanted else 0

    async def take(self, most):
        while len(self.counting) < len(self.given):
            self.news.clear()
            await self.news.wait()
        games = range(self.wanted)[len(self.given) :][: min(most, 3)]
        self.given += games
        return games

    def kept(self, games, message):
        self.counting += games
        self.news.set()


def play(crew, total, finished=frozenset(), source=None):
    """The match, and what follows it."""
    one = {"slots": 2, "out": "games" if crew.records else None, "search": {"determinizations": 1}}
    games = source or NumberedGames(total, set(finished))
    match = Match(games, [one] * len(crew.players), crew.on_disk)

    async def follow():
        return [progress async for progress in match.follow(crew)]

    return match, follow


@settings(max_examples=examples(200), deadline=None)
@given(
    st.integers(1, 5),
    st.integers(0, 5),
    st.integers(1, 40),
    st.integers(0, 2**32),
    st.booleans(),
    st.sets(st.integers(0, 40), max_size=10),
)
def test_each_game_counts_exactly_once(workers, kills, total, seed, records, before):
    finished = {game for game in before if game < total - 1}
    crew = Crew(workers, kills, seed, records=records)
    match, follow = play(crew, total, finished)
    expected = Counter(set(range(total)) - finished)
    try:
        last = asyncio.run(follow())[-1]
    except WorkerDied:
        assert not any(player.alive for player in crew.players)
        assert crew.counted < expected  # none twice, and some missing
    else:
        assert crew.counted == expected
        assert last.done == total
        assert last.counts["games"] == total - len(finished)
    assert match.done == len(finished) + crew.counted.total()


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(2, 5), st.integers(0, 5), st.integers(1, 20), st.integers(0, 2**32))
def test_games_of_a_killed_worker_are_played_though_the_source_waits_for_them(workers, kills, total, seed):
    crew, source = Crew(workers, min(kills, workers - 1), seed, records=False), InBatches(total)
    _, follow = play(crew, total, source=source)
    asyncio.run(follow())
    assert crew.reported == Counter(range(total))
    assert sorted(source.counting) == [*range(total)]


@pytest.mark.parametrize("records", [True, False], ids=["on disk", "in memory"])
def test_what_a_worker_said_it_had_done_stays_done_when_it_dies(records):
    crew = Crew(3, 2, 5, records=records)
    _, follow = play(crew, 30)
    last = asyncio.run(follow())[-1]
    assert crew.kills == 0
    assert last.counts["simulations"] == 10 * sum(player.told for player in crew.players)


class KilledAtTheEnd(Crew):
    """Its workers do all that they are given, and are killed before they can say so."""

    async def __aiter__(self):
        async for worker, message in super().__aiter__():
            if message is None or "ended" not in message:
                yield worker, message


def test_workers_that_are_killed_when_all_games_count_are_not_missed():
    crew = KilledAtTheEnd(2, 0, 1, records=True)
    match, follow = play(crew, 5)
    assert asyncio.run(follow())[-1].done == 5
    assert match.done == 5
