"""What is recorded of finished games: shards on the disk, or messages to the process that requested the games, after
which a game counts; and how games with resignation ended. Which games may be resigned is checked here; the search
decides when a player does (`puct.would_resign`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gpuinfer.api import Infer
from gpuinfer.errors import UsageError
from gpuinfer.models import positions
from gpuinfer.models.record_shards import OF_GAMES, GameArrays, GameRecord, gathered, read_shard
from gpuinfer.report.game_statistics import EndedGame
from gpuinfer.workloads.selfplay.arrays import NOBODY, OF_RESIGNATION
from gpuinfer.workloads.selfplay.game import Game, is_won_or_lost

SHARD_S, SHARD_BYTES = 10.0, 32 << 20  # whichever comes first: games finished longer ago are on disk
SHARD_SHARE = 20  # of a run that is watched: a shard waits for this part of the run's time so far


class GameTally(Protocol):
    """Adds up something of games, by their numbers; a game counts once."""

    def add(self, games: Mapping[int, Any], /) -> None: ...

    def facts(self) -> Mapping[str, float]: ...


class GameKeeper:
    """Takes in finished games, as `Arena.collect` gives them, and says which of them count: here their numbers alone,
    and all of them at once.
    """

    def __init__(self) -> None:
        self._kept: list[int] = []

    async def add(self, part: dict[str, np.ndarray]) -> None:
        self._kept += part["finished"].tolist()

    async def write_if_due(self) -> None: ...

    async def flush(self) -> None:
        """All games that were added count when this returns."""

    @property
    def full(self) -> bool:
        """More waits to be taken than one message should hold."""
        return False

    def take(self) -> dict[str, Any]:
        """`kept`, the numbers of the games that count now and have not been taken before, and what goes with them."""
        kept, self._kept = self._kept, []
        return {"kept": kept}


MESSAGE_BYTES = 16 << 20  # of records; far below what a message may hold


class GameSender(GameKeeper):
    """Sends the records of finished games with their numbers: a game counts when its message has come. `moves`: those
    of searched moves too, not only what is counted of games.
    """

    def __init__(self, moves: bool) -> None:
        super().__init__()
        self._moves = moves
        self._parts: deque[dict[str, np.ndarray]] = deque()
        self._bytes = 0

    async def add(self, part: dict[str, np.ndarray]) -> None:
        if not self._moves:
            part = {name: array for name, array in part.items() if name in OF_GAMES}
        self._bytes += _bytes_of(part)
        self._parts.extend(_in_pieces(part))

    @property
    def full(self) -> bool:
        return self._bytes > MESSAGE_BYTES

    def take(self) -> dict[str, Any]:
        taken, size = list[dict[str, np.ndarray]](), 0
        while self._parts and (not taken or size + _bytes_of(self._parts[0]) <= MESSAGE_BYTES):
            taken.append(self._parts.popleft())
            size += _bytes_of(taken[-1])
        self._bytes -= size
        if not taken:
            return {"kept": []}
        arrays = {name: np.concatenate([part[name] for part in taken]) for name in taken[0]}
        plain = {name: [array.dtype.str, array.shape, array.tobytes()] for name, array in arrays.items()}
        return {"kept": arrays["finished"].tolist(), "records": plain}


def _bytes_of(part: Mapping[str, np.ndarray]) -> int:
    return sum(array.nbytes for array in part.values())


def _in_pieces(part: dict[str, np.ndarray]) -> Sequence[dict[str, np.ndarray]]:
    """Of games that fit into a message together; a game is not divided."""
    if _bytes_of(part) <= MESSAGE_BYTES:
        return [part]
    games, pieces, begin = GameArrays(part), list[dict[str, np.ndarray]](), 0
    filled = np.cumsum(games.sizes())
    while begin < len(filled):
        before = filled[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(filled, before + MESSAGE_BYTES, "right")))
        pieces.append(gathered([GameRecord(games, place) for place in range(begin, end)]))
        begin = end
    return pieces


def received_games(message: Mapping[str, Any]) -> GameArrays:
    """The records in a message of a `GameSender`, in the message's own memory."""
    return GameArrays(
        {
            name: np.frombuffer(content, dtype).reshape(shape)
            for name, (dtype, shape, content) in message["records"].items()
        }
    )


class ShardWriter(GameKeeper):
    """Collects finished games and writes them as shards, in a thread so that search and model go on.

    `first_s`: how long a game waits for its shard at the beginning of the run, later longer, and `SHARD_S` at most.
    """

    def __init__(self, path: Path, infer: Infer, first_s: float = SHARD_S) -> None:
        super().__init__()
        self._folder = positions.PositionsFolder(path)
        self._lane = infer.lane("records")
        self._parts: list[dict[str, np.ndarray]] = []
        self._bytes = 0
        self._oldest = 0.0
        self._began, self._first_s = time.monotonic(), first_s
        self._turn = asyncio.Lock()
        self._writing: asyncio.Task[None] | None = None

    async def add(self, part: dict[str, np.ndarray]) -> None:
        """Raises WorkError when an earlier shard could not be written."""
        if not self._parts:
            self._oldest = time.monotonic()
        self._parts.append(part)
        self._bytes += sum(array.nbytes for array in part.values())
        await self.write_if_due()

    async def write_if_due(self) -> None:
        """Begin a shard when enough has come together, or the oldest game has waited long enough."""
        now = time.monotonic()
        wait_s = min(SHARD_S, self._first_s + (now - self._began) / SHARD_SHARE)
        if self._parts and (self._bytes > SHARD_BYTES or now > self._oldest + wait_s):
            async with self._turn:  # one shard at a time: memory stays bounded when the disk is slow
                await self._written()
                self._begin()

    async def flush(self) -> None:
        """Everything is on disk when this returns. Raises WorkError when it cannot be."""
        async with self._turn:
            await self._written()
            self._begin()
            await self._written()

    async def _written(self) -> None:
        """Wait for the shard that is being written. The wait may be cancelled; the shard is not."""
        if self._writing is not None:
            await asyncio.shield(self._writing)
            self._writing = None

    def _begin(self) -> None:
        if self._parts:
            parts, self._parts, self._bytes = self._parts, [], 0
            self._writing = asyncio.create_task(self._store(parts))

    async def _store(self, parts: list[dict[str, np.ndarray]]) -> None:
        def write() -> list[int]:
            self._lane.enter("record")
            try:
                whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
                self._folder.write(whole)
            finally:
                self._lane.enter("idle")
            return [int(game) for game in whole["finished"]]

        self._kept += await asyncio.to_thread(write)


CHECKED = 0.1  # of all games, as in AlphaGo Zero


def refuse_resigning(game: Game, name: str, threshold: float, simulations: int) -> None:
    """Raises `UsageError` for a game in which it is not clear what a player who resigns has lost, or a search that
    looks at no move.
    """
    given = f"--resign {threshold:g}"
    if game.seats != 2:
        seats = "1 player" if game.seats == 1 else f"{game.seats} players"
        raise UsageError(
            f"{given}: game '{name}' has {seats}, and who resigns loses to the one other. Leave --resign out."
        )
    if not game.won_or_lost:
        raise UsageError(
            f"{given}: game '{name}' does not say that it is won or lost, and by how much one loses who resigns is not "
            "known. Set won_or_lost = True in its class if its returns are 1 and -1, or 0 for both; else leave "
            "--resign out."
        )
    if simulations < 2:
        raise UsageError(
            f"{given}: a player resigns by what the best move is worth, and one simulation looks at no move. Ask for "
            "--simulations 2 or more."
        )


def refuse_returns(game: Game, returns: np.ndarray) -> None:
    """Raises `UsageError` for those of a game that was neither won, drawn nor lost. returns: float32 [games, seats]"""
    for one in returns.tolist():
        if not is_won_or_lost(one):
            raise UsageError(
                f"game '{type(game).__name__}' brought {one}, and says that it is won or lost: 1 and -1, or 0 for "
                "both. Leave --resign out, or mend `returns`."
            )


def ended_games(games: Mapping[str, np.ndarray]) -> dict[int, Sequence[bool | float]]:
    """By number, the fields of an `Ended` of each. `games`: the arrays of `arrays.OF_GAMES`."""
    found: dict[int, Sequence[bool | float]] = {}
    columns = (games[name] for name in ("finished", "returns", *OF_RESIGNATION))
    for number, returns, loser, checked, lowest in zip(*columns, strict=True):
        unbeaten = returns >= 0
        found[int(number)] = list(
            EndedGame(
                checked=bool(checked),
                resigned=bool(loser != NOBODY),
                false=bool(loser != NOBODY and unbeaten[loser]),
                lowest=float(lowest.min()),
                lowest_false=float(lowest[unbeaten].min()),
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class CountedOfGames:
    """Something that is counted of games as they count, and again of their records. `of_games` has it, by the game's
    number, of the arrays in `names`.
    """

    tally: GameTally
    names: Sequence[str]
    of_games: Callable[[Mapping[str, np.ndarray]], Mapping[int, Any]]

    def add(self, games: Mapping[str, np.ndarray]) -> None:
        """`games`: their arrays, as a shard has them."""
        self.tally.add(self.of_games(games))

    def add_recorded(self, folder: positions.PositionsFolder) -> None:
        """All games in whole shards. Raises one of `UNREADABLE`."""
        for shard in folder.shards():
            self.add(read_shard(shard, self.names))
