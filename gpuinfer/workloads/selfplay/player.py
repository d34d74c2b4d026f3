"""A self-play worker process: plays the games that it is given, and reports."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gpuinfer.api import Channel, Infer
from gpuinfer.errors import UsageError
from gpuinfer.host import compile_status
from gpuinfer.workloads.selfplay import arrays, game_records, games, kernels
from gpuinfer.workloads.selfplay.arena import Arena, GameSlots
from gpuinfer.workloads.selfplay.evaluator import (
    WITHOUT_NETWORK,
    Answer,
    Answers,
    Ask,
    Pairing,
    network,
    network_evaluator,
    one_network,
    points_of_pairing,
    rows_in_place,
    two_sides,
)
from gpuinfer.workloads.selfplay.game import Game
from gpuinfer.workloads.selfplay.game_records import GameKeeper, GameSender, ShardWriter
from gpuinfer.workloads.selfplay.python_arena import PythonArena
from gpuinfer.workloads.selfplay.python_game import PythonGame

REPORT_S = 0.25  # between two reports
PLAY_S = 0.03  # one call into the kernel, when no network sets the pace
MOST_ROUNDS = 1 << 20  # in one call: one with nothing to play takes no time, which would double them without end
AHEAD_S = 0.25  # games on hand, beyond those in flight
LOOK_S = 0.1  # between two looks whether something is compiled
COMPILING = "compiling the search: once for this game, a minute or two"

Made = TypeVar("Made")


async def play(infer: Infer, channel: Channel, arguments: Mapping[str, Any]) -> None:
    """The worker's whole life. Messages: see `match.py`; `workload.py` sends the arguments."""
    game = games.build_game(arguments["game"], arguments["game_options"])
    against = await opponent_of(arguments, infer, game)
    ways = [infer, *([against.infer] if against is not None and against.infer is not None else [])]
    max_rows = min(way.limits.max_rows for way in ways) if arguments["network"] else None
    slots = blocks(arguments["slots"], arguments["halves"], arguments["search"]["determinizations"], max_rows)
    determinizations = arguments["search"]["determinizations"]
    in_place = arguments["network"] and against is None  # rows of two networks lie there only once they are divided
    rooms = [rows_in_place(infer, game, count * determinizations) if in_place else None for count in slots]
    preparing = asyncio.create_task(asyncio.to_thread(_prepare, game, slots, rooms, arguments))
    while not (await asyncio.wait({preparing}, timeout=LOOK_S))[0]:
        if compile_status.is_compiling():  # the parent is told once
            await channel.send({"note": COMPILING})
            break
    arenas = await preparing
    await channel.send({"ready": slots})
    await WorkerLoop(arenas, infer, channel, arguments, against).play()


@dataclass(frozen=True)
class PlayerOpponent:
    """Who holds the other seats: another network, or one of `WITHOUT_NETWORK`, for which no model is asked."""

    model: str
    infer: Infer | None
    sides: Pairing


async def opponent_of(arguments: Mapping[str, Any], infer: Infer, game: Game) -> PlayerOpponent | None:
    """With its model loaded. Raises `UsageError` when there can be none beside the run's own."""
    if (given := arguments["opponent"]) is None:
        return None
    sides = Pairing(game.seats, arguments["search"]["seed"])
    if given["model"] in WITHOUT_NETWORK and given["source"] is None:
        return PlayerOpponent(given["model"], None, sides)
    way = infer.beside(replace(network(game, given["model"], given["weights"]), source=given["source"]))
    await way.ready()
    return PlayerOpponent(given["model"], way, sides)


def _refuse_features(game: Game, features: np.ndarray) -> None:
    """Raises `UsageError` where features are no numbers, which is the game's fault and no model's."""
    if features.dtype.kind == "f" and not np.isfinite(features).all():
        raise UsageError(
            f"game '{type(game).__name__}': `observe` wrote features that are not finite, and a network answers "
            "NaN to those. Mend it there."
        ) from None


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


def _prepare(
    game: Game, slots: Sequence[int], rooms: Sequence[np.ndarray | None], arguments: Mapping[str, Any]
) -> list[GameSlots]:
    """The arenas, with the kernels compiled or loaded."""
    search = arrays.Search(**arguments["search"])
    make: Callable[[int, np.ndarray | None], GameSlots]
    if isinstance(game, PythonGame):
        make = functools.partial(PythonArena, game, search)
    else:
        make = functools.partial(Arena, game, kernels.load_search(game.rules), search)
    arenas: list[GameSlots] = [make(count, block) for count, block in zip(slots, rooms, strict=True)]
    arenas[0].play()  # with no games queued: compiles, and does nothing
    if (arguments["opponent"] or {}).get("model") == "rollout":
        nothing = np.zeros((0, game.actions), np.float32), np.zeros((0, game.seats), np.float32)
        arenas[0].play_out(np.zeros(0, np.intp), *nothing)
    return arenas


class WorkerLoop:
    """One run of a worker: while one arena's block is in the model, another is searched."""

    def __init__(
        self,
        arenas: list[GameSlots],
        infer: Infer,
        channel: Channel,
        arguments: Mapping[str, Any],
        opponent: PlayerOpponent | None = None,
    ) -> None:
        self._arenas, self._infer, self._channel, self._opponent = arenas, infer, channel, opponent
        counted = {"points": opponent is not None, "resignations": arenas[0].search.resign}
        # what is counted of finished games once they count, by its name and their numbers
        self._counted: dict[str, dict[int, Any]] = {name: {} for name, on in counted.items() if on}
        self._queue: deque[int] = deque()
        self._more = True  # the parent has more games
        self._over = False  # and will never have any
        self._asked = True  # the first games come unasked
        self._idle = 0  # arenas without a game
        self._heard, self._news = 0, asyncio.Condition()  # games, that there are no more, the end of them, a stop
        # A thread for the search, so that blocks can be cut and answered meanwhile; alone, it would only add a hop.
        self._thread = ThreadPoolExecutor(1, "gpuinfer-search") if len(arenas) > 1 else None
        self._lane = infer.lane("search")
        self._keeper: GameKeeper
        if arguments["out"]:
            self._keeper = ShardWriter(Path(arguments["out"]), infer, arguments["shard_s"])
        else:
            self._keeper = GameSender(arguments["search"]["record"]) if arguments["sends_records"] else GameKeeper()
        self._began = time.monotonic()

    async def play(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(task()) for task in (self._listen, self._report_when_stopped, self._report)]
                await asyncio.gather(*(group.create_task(self._run(arena)) for arena in self._arenas))
                for task in tasks:
                    task.cancel()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            await self._keep_finished()
        await self._tell_counts(ended=True)

    async def _keep_finished(self) -> None:
        """All finished games count when this returns, however the round ended: those too of a search whose answers
        never came, and though the parent cancels this, which it does once another worker has failed.
        """

        async def collect_all() -> None:
            for arena in self._arenas:
                await self._collect(arena)
            await self._keeper.flush()

        keeping = asyncio.ensure_future(collect_all())
        while not keeping.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(keeping)
        keeping.result()

    async def _run(self, arena: GameSlots) -> None:
        play = self._with_network if arena.search.evaluator == arrays.NETWORK else self._alone
        while await self._has_games(arena):
            await play(arena)

    async def _with_network(self, arena: GameSlots) -> None:
        """Search, block to the model, search, … until it has no games. Answers are used up before the block is sent
        again, so they may lie in memory that is then written anew.
        """
        answers: Answers | None = None
        with self._asking(arena) as ask:
            while await self._supply(arena):
                rows = await self._in_thread(arena.play, *(answers or (None, None)))
                try:
                    answers = await ask(rows) if rows else None
                except Exception:
                    _refuse_features(arena.game, arena.features[:rows])
                    raise
                await self._collect(arena)

    def _asking(self, arena: GameSlots) -> AbstractContextManager[Ask]:
        other = self._opponent
        if other is None:
            return one_network(self._infer, arena)
        theirs: AbstractContextManager[Answer]
        if other.infer is None:
            theirs = contextlib.nullcontext(functools.partial(self._in_thread, WITHOUT_NETWORK[other.model], arena))
        else:
            theirs = network_evaluator(other.infer, arena, "the opponent")
        return two_sides(arena, other.sides, network_evaluator(self._infer, arena), theirs)

    async def _alone(self, arena: GameSlots) -> None:
        """An evaluator inside the kernel: many rounds a call."""
        rounds = 1
        while await self._supply(arena):
            start = time.perf_counter()
            self._searching(arena.play, None, None, rounds)
            seconds = time.perf_counter() - start
            rounds = max(1, min(2 * rounds, MOST_ROUNDS, int(rounds * PLAY_S / max(seconds, 1e-6))))
            await self._collect(arena)
            await asyncio.sleep(0)

    async def _in_thread(self, work: Callable[..., Made], *arguments: Any) -> Made:
        if self._thread is None:
            return self._searching(work, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._searching, work, *arguments)

    def _searching(self, work: Callable[..., Made], *arguments: Any) -> Made:
        """On the lane of the search."""
        self._lane.enter("search")
        made = work(*arguments)
        self._lane.enter("idle")
        return made

    async def _has_games(self, arena: GameSlots) -> bool:
        """Wait for games. False when there never will be any, or when the run is to stop."""
        while not self._over and not self._infer.stopping.is_set():
            heard = self._heard  # before the look at what there is, so that no news goes unnoticed
            if await self._supply(arena):
                return True
            self._idle += 1
            if self._idle == len(self._arenas) and not self._more:  # the parent waits for all games to count
                await self._keeper.flush()
                await self._tell_counts()
            async with self._news:
                while self._heard == heard:
                    await self._news.wait()
            self._idle -= 1
        return False

    async def _supply(self, arena: GameSlots) -> bool:
        """Queue games for free slots, and ask for more in time. False when it has none, or when the run is to stop."""
        busy = arena.busy
        arena.add_games([self._queue.popleft() for _ in range(min(arena.spare(busy), len(self._queue)))])
        await self._ask()
        return bool(busy or arena.queued) and not self._infer.stopping.is_set()

    async def _ask(self) -> None:
        """Ask for games before they run out, but keep few: what lies here cannot be played by another worker."""
        finished = sum(int(arena.counters[arrays.FINISHED]) for arena in self._arenas)
        per_second = finished / max(time.monotonic() - self._began, AHEAD_S)
        ahead = 1 + int(AHEAD_S * per_second)
        if self._more and not self._asked and len(self._queue) < ahead:
            self._asked = True
            free = sum(max(0, arena.slots - arena.busy - arena.queued) for arena in self._arenas)
            await self._channel.send({"need": free + 2 * ahead - len(self._queue)})

    async def _listen(self) -> None:
        while True:
            message = await self._channel.receive()
            if "over" in message:
                self._over = True
            else:
                self._queue.extend(message["games"])
                self._more, self._asked = message["more"], False
            await self._tell()

    async def _report_when_stopped(self) -> None:
        await self._infer.stopping.wait()
        await self._tell()

    async def _tell(self) -> None:
        self._heard += 1
        async with self._news:
            self._news.notify_all()

    async def _collect(self, arena: GameSlots) -> None:
        finished = arena.collect()
        if finished is None:
            return
        if (observed := finished.get("observation")) is not None:
            _refuse_features(arena.game, observed)  # not every network answers NaN to them
        if self._opponent is not None:
            numbers, returns = finished["finished"].tolist(), finished["returns"]
            finished["sides"] = np.stack([self._opponent.sides.of(number) for number in numbers])
            self._counted["points"].update(
                zip(numbers, map(points_of_pairing, returns, finished["sides"]), strict=True)
            )
        if arena.search.resign:
            game_records.refuse_returns(arena.game, finished["returns"])
            self._counted["resignations"].update(game_records.ended_games(finished))
        await self._keeper.add(finished)
        if self._keeper.full:
            await self._tell_counts()

    async def _report(self) -> None:
        while True:
            await self._tell_counts()
            await asyncio.sleep(REPORT_S)
            await self._keeper.write_if_due()

    async def _tell_counts(self, **more: Any) -> None:
        while self._keeper.full:
            await self._channel.send(self._counts())
        await self._channel.send({**self._counts(), **more})

    def _counts(self) -> dict[str, Any]:
        total = np.sum([arena.counters for arena in self._arenas], axis=0)
        names = {"games": arrays.FINISHED, "simulations": arrays.SIMULATIONS, "evaluations": arrays.EVALUATIONS}
        taken = self._keeper.take()
        return {
            "counts": {name: int(total[index]) for name, index in names.items()},
            "begun": sum(arena.begun for arena in self._arenas),
            **taken,
            **{name: [of_games.pop(number) for number in taken["kept"]] for name, of_games in self._counted.items()},
        }
