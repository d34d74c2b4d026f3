"""A self-play worker process: plays the games that it is given, and reports."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from gpuinfer.api import Channel, Infer
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.workloads.selfplay import arrays, games, kernels, records
from gpuinfer.workloads.selfplay.arena import Arena
from gpuinfer.workloads.selfplay.game import Game

REPORT_S = 0.25  # between two reports
PLAY_S = 0.03  # one call into the kernel, when no network sets the pace
AHEAD_S = 0.25  # games on hand, beyond those in flight
SHARD_S, SHARD_BYTES = 10.0, 32 << 20  # whichever comes first: games finished longer ago are on disk

Answers = tuple[np.ndarray, np.ndarray]  # policy logits float32 [rows, actions], values float32 [rows, seats]


async def play(infer: Infer, channel: Channel, arguments: Mapping[str, Any]) -> None:
    """The worker's whole life. Messages: see `workload.py`, which sends the arguments."""
    game = games.build(arguments["game"], arguments["game_options"])
    if not kernels.is_cached(game.rules):
        await channel.send({"note": "compiling the search kernels (first run)"})
    max_rows = infer.limits.max_rows if arguments["network"] else None
    slots = blocks(arguments["slots"], arguments["halves"], arguments["search"]["determinizations"], max_rows)
    arenas = await asyncio.to_thread(_prepare, game, slots, arguments)
    await channel.send({"ready": slots})
    await Round(arenas, infer, channel, arguments).play()


def blocks(slots: int, halves: int, determinizations: int, max_rows: int | None) -> list[int]:
    """The slots of each arena: `halves` of them, or more when a half would not fit into one batch.

    `max_rows` is None where no model is asked. Raises UsageError when a single game does not fit.
    """
    if max_rows is not None and determinizations > max_rows:
        raise UsageError(
            f"a game asks for {determinizations} rows at once, one for each determinization, and a batch holds "
            f"{max_rows}. Try --determinizations {max_rows}, or a larger batch."
        )
    fitting = 1 if max_rows is None else math.ceil(slots / (max_rows // determinizations))
    count = min(slots, max(halves, fitting))
    return [slots // count + (index < slots % count) for index in range(count)]


def _prepare(game: Game, slots: Sequence[int], arguments: Mapping[str, Any]) -> list[Arena]:
    """The arenas, with the kernels compiled or loaded."""
    search = arrays.Search(**arguments["search"])
    module: ModuleType = kernels.load(game.rules)
    arenas = [Arena(game, module, search, count) for count in slots]
    arenas[0].play()  # with no games queued: compiles, and does nothing
    return arenas


class Round:
    """One run of a worker: while one arena's block is in the model, another is searched."""

    def __init__(self, arenas: list[Arena], infer: Infer, channel: Channel, arguments: Mapping[str, Any]) -> None:
        self._arenas, self._infer, self._channel = arenas, infer, channel
        self._queue: deque[int] = deque()
        self._more = True  # the parent may have more games
        self._asked = True  # the first games come unasked
        self._arrived = asyncio.Event()
        # A thread for the search, so that blocks can be cut and answered meanwhile; alone, it would only add a hop.
        self._thread = ThreadPoolExecutor(1, "gpuinfer-search") if len(arenas) > 1 else None
        self._lane = infer.lane("search")
        self._writer = Writer(Path(arguments["out"]), infer) if arguments["out"] else None
        self._began = time.monotonic()

    async def play(self) -> None:
        play = self._with_network if self._arenas[0].search.evaluator == arrays.NETWORK else self._alone
        try:
            async with asyncio.TaskGroup() as group:
                helpers = [group.create_task(self._listen()), group.create_task(self._report())]
                await asyncio.gather(*(group.create_task(play(arena)) for arena in self._arenas))
                for helper in helpers:
                    helper.cancel()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            if self._writer is not None:  # what is finished is kept, however the rest ended
                await self._writer.flush()
        await self._channel.send({**self._counts(), "ended": True})

    async def _with_network(self, arena: Arena) -> None:
        """Search, block to the model, search, … until no game is left."""
        answers: Answers | None = None
        with self._infer.client() as me:
            while await self._supply(arena):
                rows = await self._search(arena, answers)
                answers = None
                if rows:
                    block = arena.features[:rows]
                    answers = _as_answers(await self._infer(block, rows=rows, client=me), rows, arena)
                await self._collect(arena)

    async def _alone(self, arena: Arena) -> None:
        """An evaluator inside the kernel: many rounds a call."""
        rounds = 1
        while await self._supply(arena):
            start = time.perf_counter()
            self._play(arena, None, rounds)
            seconds = time.perf_counter() - start
            rounds = max(1, min(2 * rounds, int(rounds * PLAY_S / max(seconds, 1e-6))))
            await self._collect(arena)
            await asyncio.sleep(0)

    async def _search(self, arena: Arena, answers: Answers | None) -> int:
        if self._thread is None:
            return self._play(arena, answers)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._play, arena, answers)

    def _play(self, arena: Arena, answers: Answers | None, rounds: int = 1) -> int:
        self._lane.enter("search")
        logits, values = answers or (None, None)
        rows = arena.play(logits, values, rounds)
        self._lane.enter("idle")
        return rows

    async def _supply(self, arena: Arena) -> bool:
        """Queue games for free slots. Waits for the parent when there are none; False when there never will be."""
        while not self._infer.stopping.is_set():
            self._arrived.clear()  # before the look at what has arrived, so that no arrival goes unnoticed
            busy = arena.busy
            room = arena.spare(busy)
            arena.add_games([self._queue.popleft() for _ in range(min(room, len(self._queue)))])
            await self._ask()
            if busy or arena.queued:
                return True
            if not self._more and not self._queue:
                return False
            await self._wait_for_games()
        return False

    async def _wait_for_games(self) -> None:
        stopping = asyncio.create_task(self._infer.stopping.wait())
        arrived = asyncio.create_task(self._arrived.wait())
        try:
            await asyncio.wait({stopping, arrived}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            arrived.cancel()

    async def _ask(self) -> None:
        """Ask for games before they run out, but keep few: what lies here cannot be played by another worker."""
        per_second = self._finished() / max(time.monotonic() - self._began, AHEAD_S)
        ahead = 1 + int(AHEAD_S * per_second)
        if self._more and not self._asked and len(self._queue) < ahead:
            self._asked = True
            await self._channel.send({"need": 2 * ahead - len(self._queue)})

    async def _listen(self) -> None:
        while True:
            message = await self._channel.receive()
            self._queue.extend(message["games"])
            self._more, self._asked = message["more"], False
            self._arrived.set()

    async def _collect(self, arena: Arena) -> None:
        finished = arena.collect()
        if finished is not None and self._writer is not None:
            await self._writer.add(finished)

    async def _report(self) -> None:
        while True:
            await self._channel.send(self._counts())
            await asyncio.sleep(REPORT_S)
            if self._writer is not None:
                await self._writer.write_if_due()

    def _finished(self) -> int:
        return sum(int(arena.counters[arrays.FINISHED]) for arena in self._arenas)

    def _counts(self) -> dict[str, Any]:
        total = np.sum([arena.counters for arena in self._arenas], axis=0)
        names = {"games": arrays.FINISHED, "simulations": arrays.SIMULATIONS, "evaluations": arrays.EVALUATIONS}
        return {
            "counts": {name: int(total[index]) for name, index in names.items()},
            "begun": sum(arena.begun for arena in self._arenas),
        }


class Writer:
    """Collects finished games and writes them as shards, in a thread so that search and model go on."""

    def __init__(self, path: Path, infer: Infer) -> None:
        self._folder = records.Folder(path)
        self._lane = infer.lane("records")
        self._parts: list[dict[str, np.ndarray]] = []
        self._bytes = 0
        self._oldest = 0.0
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
        if self._parts and (self._bytes > SHARD_BYTES or time.monotonic() > self._oldest + SHARD_S):
            await self._start()

    async def flush(self) -> None:
        """Everything is on disk when this returns. Raises WorkError when it cannot be."""
        async with self._turn:
            await self._written()
            self._begin()
            await self._written()

    async def _start(self) -> None:
        async with self._turn:  # one shard at a time: memory stays bounded when the disk is slow
            await self._written()
            self._begin()

    async def _written(self) -> None:
        """Wait for the shard that is being written. Whoever waits may be cancelled; the shard is not."""
        if self._writing is not None:
            await asyncio.shield(self._writing)
            self._writing = None

    def _begin(self) -> None:
        if self._parts:
            parts, self._parts, self._bytes = self._parts, [], 0
            self._writing = asyncio.create_task(asyncio.to_thread(self._write, parts))

    def _write(self, parts: list[dict[str, np.ndarray]]) -> None:
        self._lane.enter("record")
        try:
            self._folder.write(records.merge(parts))
        finally:
            self._lane.enter("idle")


def _as_answers(result: Any, rows: int, arena: Arena) -> Answers:
    """(policy logits float32 [rows, actions], values float32 [rows, seats]) of a model's answer."""
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise UsageError(
            f"the model answered with {type(result).__name__}, not (policy logits, values). Return these two tensors."
        )
    logits, values = (np.ascontiguousarray(part, dtype=np.float32) for part in result)
    expected = (rows, arena.game.actions), (rows, arena.game.seats)
    if (logits.shape, values.shape) != expected:
        raise WorkError(
            f"the model answered with shapes {logits.shape} and {values.shape} where {expected[0]} and {expected[1]} "
            "were due. Mend the model, or choose the game that it was made for."
        )
    if not np.isfinite(values).all():  # the engine lets -inf pass, for the sake of the logits
        raise WorkError(f"the model answered with -inf among its values {expected[1]}. Check its weights and inputs.")
    return logits, values
