"""A node's games: their numbers from the feed of a divided run, and their records to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gpuinfer.division import RangeFeed
from gpuinfer.models.record_shards import GameRecord, pack_shard
from gpuinfer.workloads.selfplay.game_records import received_games
from gpuinfer.workloads.selfplay.match import GameSource


class FedGames(GameSource):
    """Games of a feed. The record of each is a `GameRecord`, or None where nothing is recorded."""

    cure = "The coordinator gives its games to other nodes; start it again with fewer --workers."

    def __init__(self, feed: RangeFeed) -> None:
        self._feed = feed
        self._over = False
        self._versions: dict[int, str] = {}  # of games that were taken and do not count yet, where there are versions

    @property
    def left(self) -> float:
        return 0 if self._over else math.inf

    async def take(self, most: int) -> Sequence[int]:
        await self._feed.room()
        if (work := await self._feed.take(most)) is None:
            self._over = True
            return []
        games = range(work.start, work.stop)
        if work.version:
            self._versions.update(dict.fromkeys(games, work.version))
        return games

    def kept(self, games: Sequence[int], message: Mapping[str, Any]) -> None:
        received = received_games(message) if "records" in message else None
        for place, number in enumerate(games):
            version = self._versions.pop(number, "")
            self._feed.done(number, None if received is None else GameRecord(received, place, version))


def packed_range(records: Sequence[GameRecord | None]) -> bytes:
    """The shard of a range, or no bytes where nothing is recorded."""
    games = [record for record in records if record is not None]
    return pack_shard(games) if games else b""
