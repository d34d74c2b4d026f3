"""The worker's parts: blocks, and the shards that it writes beside its games."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import numpy as np
import pytest
from in_python import Wager

from gpuinfer import stats
from gpuinfer.errors import BackendDied, UsageError, unwrap
from gpuinfer.models import positions
from gpuinfer.workloads.selfplay import arrays, game_records, player


class Session:
    def lane(self, name):
        return stats.Lane(name)


def part(number):
    return {"finished": np.array([number]), "game": np.array([number, number])}


@pytest.fixture
def writer(tmp_path, monkeypatch):
    monkeypatch.setattr(game_records, "SHARD_BYTES", 1)  # every part is worth a shard
    return game_records.ShardWriter(tmp_path, Session())


@pytest.fixture
def gate(monkeypatch):
    """No shard is written before this is set. Its `writing`: one is waiting to be."""
    opened, write = threading.Event(), positions.PositionsFolder.write
    opened.writing = threading.Event()

    def slow(self, arrays):
        opened.writing.set()
        assert opened.wait(60)
        return write(self, arrays)

    monkeypatch.setattr(positions.PositionsFolder, "write", slow)
    return opened


async def test_two_who_ask_for_a_shard_at_once_lose_none(writer, gate, tmp_path):
    first = asyncio.create_task(writer.add(part(0)))
    await first
    others = [asyncio.create_task(writer.add(part(1))), asyncio.create_task(writer.write_if_due())]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*others)
    await writer.flush()
    assert positions.PositionsFolder(tmp_path).finished() == {0, 1}


async def test_whoever_is_cancelled_while_a_shard_is_written_leaves_it_whole(writer, gate, tmp_path):
    await writer.add(part(0))
    impatient = asyncio.create_task(writer.add(part(1)))
    await asyncio.sleep(0)
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    gate.set()
    await writer.flush()
    assert positions.PositionsFolder(tmp_path).finished() == {0, 1}


async def test_records_travel_in_messages_that_are_not_too_large(monkeypatch):
    games = [{"finished": np.arange(5 * k, 5 * k + 5), "returns": np.zeros((5, 2), np.float32)} for k in range(4)]
    for one in games:
        numbers = np.repeat(one["finished"], 3)
        one |= {"game": numbers, "move": np.tile(np.arange(3, dtype=np.int16), 5), "observation": numbers[:, None]}
    monkeypatch.setattr(game_records, "MESSAGE_BYTES", 200)  # less than three games
    sender = game_records.GameSender(moves=True)
    for one in games:
        await sender.add(one)
    messages = []
    while sender.full:
        messages.append(sender.take())
    messages.append(sender.take())
    assert sender.take() == {"kept": []}
    assert [number for message in messages for number in message["kept"]] == list(range(20))
    assert max(len(message["kept"]) for message in messages) == 2
    received = [game_records.received_games(message) for message in messages]
    rows = np.concatenate([one.arrays["observation"] for one in received])
    assert rows[:, 0].tolist() == np.repeat(np.arange(20), 3).tolist()


@pytest.mark.parametrize(
    ("slots", "halves", "max_rows", "blocks"),
    [
        (10, 2, 4096, [5, 5]),
        (11, 2, 4096, [6, 5]),
        (10, 1, 4096, [10]),
        (10, 1, 12, [4, 3, 3]),  # as many as fit a batch
        (1, 2, 4096, [1]),
        (500, 1, None, [500]),
    ],
)
def test_games_are_divided_into_blocks_that_fit_a_batch(slots, halves, max_rows, blocks):
    assert player.blocks(slots, halves, 3, max_rows) == blocks
    with pytest.raises(UsageError, match="--determinizations 8"):
        player.blocks(4, 2, 9, 8)


class Told(list):
    """A channel that keeps what was sent."""

    async def send(self, message):
        self.append(message)


class LastSearch:
    """An arena with one game, which the search finishes while it asks for one more row."""

    game = Wager()
    slots, trees, queued, begun = 1, 1, 0, 0.0
    search = arrays.Search(**dict.fromkeys(arrays.Search._fields, arrays.NETWORK))
    features = np.zeros((1, 1), np.float32)
    counters = np.zeros(7, np.int64)
    busy = 1

    def __init__(self):
        self._finished = None

    def add_games(self, ids): ...

    def spare(self, busy):
        return 0

    def play(self, logits, values):
        self._finished = part(7)
        return 1

    def collect(self):
        finished, self._finished = self._finished, None
        return finished


class Dead(Session):
    """A way to a model that is gone."""

    def __init__(self):
        self.stopping = asyncio.Event()

    def client(self):
        return contextlib.nullcontext("me")

    async def __call__(self, *_, **__):
        raise BackendDied("the server was killed.")


class Silent(Told):
    async def receive(self):
        await asyncio.Event().wait()


def last_round(path):
    return player.WorkerLoop([LastSearch()], Dead(), Silent(), {"out": str(path), "shard_s": 10.0}).play()


async def test_games_that_finished_in_a_search_whose_answers_never_come_are_kept(tmp_path):
    with pytest.raises(ExceptionGroup) as failed:
        await last_round(tmp_path)
    assert isinstance(unwrap(failed.value), BackendDied)
    assert positions.PositionsFolder(tmp_path).finished() == {7}


async def test_a_parent_that_hangs_up_meanwhile_does_not_keep_them_from_the_disk(gate, tmp_path):
    playing = asyncio.create_task(last_round(tmp_path))
    assert await asyncio.to_thread(gate.writing.wait, 60)
    for _ in range(2):
        playing.cancel()
        await asyncio.sleep(0)
    gate.set()
    with pytest.raises(ExceptionGroup):
        await playing
    assert positions.PositionsFolder(tmp_path).finished() == {7}
