"""Self-play: the workload that plays many games with a tree search, in as many processes as the machine has cores."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from gpuinfer import api
from gpuinfer.api import Infer, ModelSpec, Progress, Setup, Workers, Workload
from gpuinfer.config import import_paths
from gpuinfer.division import RangeFeed
from gpuinfer.errors import UnknownName, UsageError, WorkError
from gpuinfer.host import machine
from gpuinfer.models.merged_records import merge_folder
from gpuinfer.models.positions import PositionsFolder, Symmetries, checked
from gpuinfer.report.game_statistics import Resignations, ScoreTally
from gpuinfer.serving.openai.model_options import refuse_several
from gpuinfer.workloads.selfplay import arrays, game_records, games, rehearsal, rules_digest
from gpuinfer.workloads.selfplay.evaluator import OF_POINTS, PAIR, WITHOUT_NETWORK, network, points_of_games
from gpuinfer.workloads.selfplay.game import Game
from gpuinfer.workloads.selfplay.game_records import CountedOfGames
from gpuinfer.workloads.selfplay.match import Match, NumberedGames
from gpuinfer.workloads.selfplay.python_game import PythonGame, calling
from gpuinfer.workloads.selfplay.selfplay_division import SelfPlayDivision
from gpuinfer.workloads.selfplay.selfplay_ranges import FedGames, packed_range

if TYPE_CHECKING:
    from gpuinfer.workloads.selfplay.manual_play import ManualGame

ENDLESS = 10**9  # games
PLAYER = "gpuinfer.workloads.selfplay.player:play"

EVALUATORS = ("network", "uniform", "rollout")
MODELS = ("blobnet", "blobnet-small", "uniform", "rollout", "module:factory")
LEAST_ROWS = 640  # half a block's, where the best batch is smaller or was not measured: blocks shrink as games end
HEAVY_ROWS = 1280  # the same for a heavy model, where the search hardly counts and each block's change of hands does
HEAVY_PER_S = 200_000  # rows: a model is heavy that the machine does fewer of
CACHED_BYTES = 512 << 10  # of trees a worker, where no network wants large blocks: they stay in the core's own cache
MOST_CUDA_WORKERS = 8
A_CORE, ALWAYS = 2, 4  # workers that may be asked for on any core, and on any machine; more would only take turns
WORKER_MB = 250  # about, with a network of its own
LIKELY_MOVES = 512  # of a game in Python, whose records grow as it goes: the longest possible one may be far longer
MEMORY_SHARE = 0.5  # of what is available now, for all games in flight

log = logging.getLogger(__name__)


class SelfPlayWorkload(Workload):
    """Play games with a tree search, every move of all of them at once; write records to learn from."""

    class Options(api.Options):
        game: str = Field(
            "blob",
            description="the game, NAME:VARIANT of one that has some, or module:Class",
            json_schema_extra={"kind": "games"},
        )
        players: int | None = Field(None, description="players at the table [blob: 4]")
        cards: int | None = Field(None, description="cards dealt to each player [blob: 5]")
        trump: str | None = Field(None, description="turned, none, or a suit [blob: turned]")
        scoring: str | None = Field(None, description="blob or oh-hell [blob: blob]")
        game_options: str = Field("", description="options of another game, as key=value,key=value")
        games: int = Field(200, ge=1, description="games to play")
        determinizations: int | None = Field(
            None, ge=1, le=1000, description="guesses at the hidden cards, one tree each [3; 1 when nothing is hidden]"
        )
        simulations: int = Field(30, ge=1, le=10_000, description="simulations in each tree")
        workers: int | None = Field(
            None,
            ge=0,
            le=1024,
            description="processes [one a core], 0: in this one; more than two a core only take turns",
        )
        oversubscribe: bool = Field(False, description="start all of --workers, however few cores there are")
        games_in_flight: int | None = Field(
            None, ge=1, description="games played at once, by all workers [so that blocks reach the best batch]"
        )
        model: str = Field(
            "blobnet",
            description="blobnet, blobnet-small, uniform, rollout or module:factory",
            json_schema_extra={"names": ["blobnet", "blobnet-small", "uniform", "rollout"]},
        )
        weights: Path | None = Field(None, description="safetensors, or a torch file of plain tensors")
        opponent_model: str | None = Field(
            None,
            description="has half of the seats: a model, with weights of its own, uniform or rollout",
            json_schema_extra={"names": ["blobnet", "blobnet-small", "uniform", "rollout"]},
        )
        opponent_weights: Path | None = Field(None, description="of the opponent, as --weights")
        out: Path | None = Field(None, description="write records to this folder")
        resume: bool = Field(False, description="go on with the records in --out")
        deterministic: bool = Field(False, description="the same games with a network, however they are batched")
        exploration: float = Field(1.5, gt=0, le=1e6, description="c of PUCT")
        noise: float = Field(0.25, ge=0, lt=1, description="share of Dirichlet noise in the root's priors")
        concentration: float = Field(10.0, gt=0, le=1e6, description="of the noise: alpha is this over the legal moves")
        temperature: float = Field(1.0, ge=0, le=1e6, description="of the choice among visits, early in a game")
        temperature_moves: int = Field(8, ge=0, description="moves of a game that are drawn; later ones are the best")
        resign: float | None = Field(
            None,
            gt=0,
            le=1,
            description="resign where root and best move are both worth minus this or less, as 0.9 [never]",
        )
        resign_check: float | None = Field(
            None, ge=0, le=1, description="share of games that nobody may resign, to see whether they are lost [0.1]"
        )

    options: Options
    goes_on_by, writes_to = ("resume",), ("out",)
    prepares = True  # workers that are ready wait to be dealt games
    first_shard_s = game_records.SHARD_S  # less where somebody reads the records while they grow
    merges_records = True  # once all games are there; not where somebody reads the shards one after the other

    def __init__(
        self,
        setup: Setup | None = None,
        /,
        *,
        source: Any = None,
        source_digest: Callable[[], str] | None = None,
        opponent_source: Any = None,
        opponent_digest: Callable[[], str] | None = None,
        **options: Any,
    ) -> None:
        """`source`: the model, where it is an object of the program (`ModelSpec.source`), and `source_digest` a digest
        of that; `options.model` is then what it is called. So for the opponent.
        """
        super().__init__(setup, **options)
        self.source, self._source_digest = source, source_digest
        self.opponent_source, self._opponent_digest = opponent_source, opponent_digest
        given = {key: getattr(self.options, key) for key in games.FLAGS}
        self._game_options = {key: value for key, value in given.items() if value is not None}
        self._game_options |= parsed(self.options.game_options)
        self.game = games.build_game(self.options.game, self._game_options)
        refuse_several(self.options.model, "selfplay", ", and the one that it is to play against with --opponent-model")
        if source is None:
            if self.options.model not in MODELS and ":" not in self.options.model:
                raise UnknownName("model", self.options.model, MODELS, label="Choices")
            if ":" in self.options.model:
                import_paths.refuse_absent_module(self.options.model)
        self._check_opponent()
        if self.options.resume and self.options.out is None:
            raise UsageError("--resume needs to know where the records are. Add --out DIR.")
        for flag, file in (("--weights", self.options.weights), ("--opponent-weights", self.options.opponent_weights)):
            if file is not None and not file.is_file():
                raise UsageError(f"{flag}: no file '{file}'. Give the file that holds the weights.")

        if self.options.resign is not None:
            game_records.refuse_resigning(self.game, self.options.game, self.options.resign, self.options.simulations)
        elif self.options.resign_check is not None:
            raise UsageError(f"--resign-check {self.options.resign_check:g}: nobody resigns. Add --resign 0.9.")
        self._refuse_workers()
        self._games = self.options.games

    def _check_opponent(self) -> None:
        """Raises `UsageError` unless there is none, or one that can hold half of the seats."""
        model, weights = self.options.opponent_model, self.options.opponent_weights
        if weights is not None and model in (None, *WITHOUT_NETWORK):
            raise UsageError(
                f"--opponent-weights {weights}: "
                + ("no network is named that has them." if model is None else f"{model} has no weights.")
                + " Name one with --opponent-model, such as blobnet."
            )
        if model is None:
            return
        if self.opponent_source is None and model not in MODELS and ":" not in model:
            raise UnknownName("opponent", model, MODELS, label="Choices")
        if self.opponent_source is None and ":" in model:
            import_paths.refuse_absent_module(model, "opponent")
        if self.evaluator != "network":
            raise UsageError(
                f"--opponent-model {model}: the run's own side must be a network, and --model is {self.options.model}. "
                f"Name the network with --model; {self.options.model} may be the opponent."
            )
        if self.game.seats < PAIR:
            raise UsageError(f"game '{self.options.game}' has one seat, and none for an opponent. Choose another game.")

    @property
    def deterministic(self) -> bool:
        return self.options.deterministic

    def trial(self, setup: Setup, **changes: Any) -> SelfPlayWorkload:
        """Games without end and without records, as many in flight as there are of this one's."""
        sources = {"source": self.source, "opponent_source": self.opponent_source}
        options = {**self.options.model_dump(), "out": None, "resume": False, **changes}
        played = SelfPlayWorkload(setup, **sources, **options)
        played._games = ENDLESS
        return played

    def table(self, number: int) -> ManualGame:
        """The game of that number, of which each move is given from outside (`gpuinfer play`). Takes a minute where its
        search has never been compiled. Raises `UsageError` for a game that cannot show itself.
        """
        if type(self.game).show is Game.show:
            raise UsageError(
                f"game '{self.options.game}' cannot show itself. Give its class a method show(position, seat), which "
                "returns the position as text; docs/selfplay.md has one."
            )
        from gpuinfer.workloads.selfplay import (
            arrays,
            manual_play,  # compiled: only who plays by hand waits for it
        )

        if rehearsal.is_due(self.game):
            rehearsal.ensure(self.game, self.options.game, self._game_options)
        return manual_play.ManualGame(self.game, arrays.Search(**self.search()), number)

    def model(self) -> ModelSpec | None:
        if self.evaluator != "network":
            return None
        spec = network(self.game, self.options.model, _text(self.options.weights))
        return spec if self.source is None else replace(spec, source=self.source)

    @property
    def opponent(self) -> ModelSpec | None:
        """The other network; None without one, and for what needs none."""
        name = self.options.opponent_model
        if name is None or (name in WITHOUT_NETWORK and self.opponent_source is None):
            return None
        spec = network(self.game, name, _text(self.options.opponent_weights))
        return spec if self.opponent_source is None else replace(spec, source=self.opponent_source)

    @property
    def asks(self) -> bool:
        return self.evaluator == "network"

    @property
    def evaluator(self) -> Literal["network", "uniform", "rollout"]:
        if self.source is not None:
            return "network"
        return self.options.model if self.options.model in ("uniform", "rollout") else "network"  # type: ignore[return-value]

    @property
    def local(self) -> bool:
        """Whether this process plays, and starts no worker."""
        return self.options.workers == 0 or (
            self.options.workers is None and games.why_local(type(self.game)) is not None
        )

    def _refuse_workers(self) -> None:
        """Raises `UsageError` where worker processes are wanted that cannot have the game."""
        if self.options.workers and (why := games.why_local(type(self.game))) is not None:
            name = type(self.game).__name__
            raise UsageError(
                f"game '{name}' is defined {why}, and worker processes cannot import it from there. Write it into a "
                f"file, such as mygame.py, and give mygame.{name}; or play in this process: --workers 0."
            )

    @property
    def processes(self) -> int:
        if self.local:
            return 1
        if (asked := self.options.workers) is not None:
            return asked if self.options.oversubscribe else min(asked, max(ALWAYS, A_CORE * machine.cores()))
        cores = min(machine.cores(), MOST_CUDA_WORKERS) if self.on_cuda else machine.cores()
        return max(1, min(cores, self.options.games))

    @property
    def on_cuda(self) -> bool:
        return machine.wants_cuda(self.setup.devices)

    @property
    def halves(self) -> int:
        """Into how many blocks a worker's games are divided: two that alternate, search and model at once.

        One where both would share a core: there is nothing to overlap, and one block is twice as large. See
        docs/decisions/halves.md.
        """
        if self.evaluator != "network":
            return 1
        return 2 if self.on_cuda or machine.cores() >= 2 * self.processes else 1

    @property
    def determinizations(self) -> int:
        return self.options.determinizations or (3 if self.game.hidden else 1)

    async def run(self, infer: Infer) -> AsyncIterator[Progress]:
        self._say_how_many()
        folder = PositionsFolder(self.options.out) if self.options.out else None
        symmetries = self._symmetries()
        settings = await asyncio.to_thread(self.deciding_settings) if folder else {}
        finished = folder.open(settings, self.options.resume) if folder else set()
        if folder and symmetries is not None:
            folder.declare(symmetries)
        if finished and max(finished) >= self.options.games:
            raise UsageError(
                f"{self.options.out} holds games up to number {max(finished)} already, more than --games "
                f"{self.options.games}. Ask for {max(finished) + 1} or more."
            )
        on_disk = folder.finished if folder else set
        counted = self._counted()
        if folder:
            for one in counted.values():
                one.add_recorded(folder)
        match = Match(
            NumberedGames(self._games, finished),
            self.arguments(infer, self.options.games - len(finished)),
            on_disk,
            {name: one.tally for name, one in counted.items()},
        )
        async with contextlib.aclosing(self._play(infer, match)) as playing:
            async for progress in playing:
                yield progress
        if folder:
            for one in counted.values():  # a worker that was killed may not have reported all its games
                await asyncio.to_thread(one.add_recorded, folder)
            if self.merges_records and match.done == self.options.games:
                await self._merge(folder, infer.stopping)
            folder.close(match.done)
        yield match.progress()

    async def _merge(self, folder: PositionsFolder, stopping: asyncio.Event) -> None:
        try:
            await asyncio.to_thread(merge_folder, folder, stopping.is_set)
        except WorkError as error:
            log.warning("All games are kept, but their shards could not be merged: %s", error)

    async def run_ranges(self, infer: Infer, feed: RangeFeed) -> AsyncIterator[Progress]:
        self._say_how_many()
        self._symmetries()
        at_most = self.options.games if feed.total is None else feed.total
        match = Match(FedGames(feed), [{**one, "out": None} for one in self.arguments(infer, at_most)])
        async with contextlib.aclosing(self._play(infer, match)) as playing:
            async for progress in playing:
                yield progress
        yield match.progress()

    def pack_records(self, records: Sequence[Any]) -> bytes:
        return packed_range(records)

    def division(self) -> SelfPlayDivision:
        if self.source is not None or self.opponent_source is not None:
            raise UsageError("nodes cannot have a network that is an object of this program. Name it: module:factory.")
        if (why := games.why_local(type(self.game))) is not None:
            raise UsageError(
                f"game '{self.options.game}' is defined {why}, and nodes cannot import it from there. Write it into a "
                "file, such as mygame.py, and give mygame.Class."
            )
        counted = list(self._counted().values())
        options = self.options
        return SelfPlayDivision(
            options.games, self.deciding_settings, counted, options.out, options.resume, self._symmetries()
        )

    def deciding(self, arithmetic: str) -> Mapping[str, Any]:
        return self.deciding_settings()

    def _symmetries(self) -> Symmetries | None:
        """The game's own. Raises `UsageError` for what is none."""
        with calling(self.game):
            return checked(self.game.symmetries(), self.game.features, self.game.actions, f"game '{self.options.game}'")

    async def _play(self, infer: Infer, match: Match) -> AsyncGenerator[Progress]:
        """All that is left of a match, from the look at the rules to the end of the workers."""
        if self.opponent is not None:
            infer.beside(self.opponent)  # refused here, before any worker is started
        if rehearsal.is_due(self.game):
            yield Progress(0, note="playing the game at random, to look at its rules", setup=True)
            await asyncio.to_thread(rehearsal.ensure, self.game, self.options.game, self._game_options)
        if match.left:
            yield match.progress("starting the workers", setup=True)
            async with (
                self._players(infer, match.arguments) as workers,
                contextlib.aclosing(match.follow(workers)) as following,
            ):
                async for progress in following:
                    yield progress

    def _players(
        self, infer: Infer, arguments: Sequence[Mapping[str, Any]]
    ) -> contextlib.AbstractAsyncContextManager[Workers]:
        """Worker processes, or one player in this process."""
        if not self.local:
            return infer.workers(PLAYER, arguments)
        from gpuinfer.workloads.selfplay.local_player import LocalPlayer  # compiles

        return LocalPlayer(infer, arguments[0])

    def _counted(self) -> dict[str, CountedOfGames]:
        """What is counted of games, by the name under which workers tell of it."""
        counted: dict[str, CountedOfGames] = {}
        if self.options.opponent_model is not None:
            counted["points"] = CountedOfGames(ScoreTally(), OF_POINTS, points_of_games)
        if self.options.resign is not None:
            of_ends = ("finished", "returns", *arrays.OF_RESIGNATION)
            tally = Resignations(self.options.resign)
            counted["resignations"] = CountedOfGames(tally, of_ends, game_records.ended_games)
        return counted

    def _say_how_many(self) -> None:
        """Before they start, each of which takes a second or more."""
        asked, cores = self.options.workers or 0, machine.cores()
        if asked <= max(ALWAYS, A_CORE * cores):
            return
        there = f"{cores} core{'' if cores == 1 else 's'} and {machine.memory_available() / 1e9:.1f} GB of free memory"
        if self.options.oversubscribe:
            log.warning("%d workers take turns on %s; each needs about %d MB of that.", asked, there, WORKER_MB)
        else:
            said = (
                "--workers %d: there are %s. %d are started, as more would only take turns; --oversubscribe starts all."
            )
            log.warning(said, asked, there, self.processes)

    def arguments(self, infer: Infer, left: int) -> list[dict[str, Any]]:
        """What each worker is sent: plain values. `left`: games that are to be played."""
        workers = max(1, min(self.processes, left))
        opponent = None
        if self.options.opponent_model is not None:
            opponent = {
                "model": self.options.opponent_model,
                "weights": _text(self.options.opponent_weights),
                "source": self.opponent_source,
            }
        return [
            {
                "game": self.options.game,
                "game_options": self._game_options,
                "search": self.search(),
                "slots": self.slots(infer, workers, left),
                "halves": self.halves,
                "network": self.evaluator == "network",
                "opponent": opponent,
                "out": str(self.options.out) if self.options.out else None,
                "shard_s": self.first_shard_s,
                "sends_records": self.options.out is not None or bool(self._counted()),  # without `out`
            }
            for _ in range(workers)
        ]

    def search(self) -> dict[str, Any]:
        """The fields of `arrays.Search`."""
        checked = 0.0  # the share of games in which no player may resign
        if self.options.resign is not None:
            asked = self.options.resign_check
            checked = game_records.CHECKED if asked is None else asked
        names = ("simulations", "exploration", "noise", "concentration", "temperature", "temperature_moves")
        return {
            **{name: getattr(self.options, name) for name in names},
            "determinizations": self.determinizations,
            "seed": self.setup.seed,
            "evaluator": EVALUATORS.index(self.evaluator),
            "record": self.options.out is not None,
            "games_per_deal": 1 if self.options.opponent_model is None else PAIR,
            "resign": self.options.resign or 0.0,
            "resign_check": checked,
        }

    def slots(self, infer: Infer, workers: int, left: int) -> int:
        """How many games a worker has in flight: with a network, two blocks of the best batch size, or one of twice it;
        with two networks, which divide each block, twice as many. Workers on the same CUDA devices share a best batch.

        Games come and go, so a block is never quite full: more than the best size costs nothing, less does.
        """
        if self.options.games_in_flight is not None:
            share = math.ceil(self.options.games_in_flight / workers)
        elif self.evaluator == "network":
            # Blocks of all workers meet in the batches of a device; on a CPU, a worker has cores of its own.
            # Half a block each, which together fill the best batch of each device; or more, where that costs nothing.
            # See docs/decisions/halves.md.
            block, roofline = LEAST_ROWS, infer.roofline
            if roofline is not None:
                least = HEAVY_ROWS if roofline.rows_per_s < HEAVY_PER_S else LEAST_ROWS
                sharing = workers if self.on_cuda else 1
                block = max(least, math.ceil(roofline.at_rows * roofline.devices / sharing))
            share = 2 * max(1, block // self.determinizations)
            share *= 1 if self.opponent is None else 2
        else:
            share = CACHED_BYTES // (self.determinizations * self.tree_bytes)
        if self.options.games_in_flight is None:
            share = min(share, int(MEMORY_SHARE * machine.memory_available() / workers / self.game_bytes))
        return max(1, min(share, math.ceil(left / workers)))

    @property
    def game_bytes(self) -> int:
        """About, of one game in flight: its trees, their rows in the block, and its records."""
        row = self.game.features * np.dtype(self.game.feature_dtype).itemsize
        moves = min(self.game.max_moves, LIKELY_MOVES) if isinstance(self.game, PythonGame) else self.game.max_moves
        records = moves * (row + 5 * self.game.actions) if self.options.out else 0
        return self.determinizations * (self.tree_bytes + row) + records

    @property
    def tree_bytes(self) -> int:
        """About, of one tree: 12-byte nodes, 16-byte edges, the root's position; or larger ones, and all positions."""
        if isinstance(self.game, PythonGame):
            return (self.options.simulations + 1) * arrays.node_bytes(self.game)
        return (self.options.simulations + 1) * (12 + 16 * self.game.max_legal) + 8 * self.game.words

    def deciding_settings(self) -> dict[str, Any]:
        """All that decides how a game goes: records of other settings must not be mixed with them."""
        search = self.search()
        del search["record"], search["evaluator"], search["games_per_deal"]
        if not search["resign"]:
            del search["resign"], search["resign_check"]
        return {
            "game": self.options.game,
            "game_options": self.game.options.model_dump(),
            # What the names of game and networks meant: the same names may mean something else another day.
            "rules": rules_digest.game_digest(self.game),
            "network": self._source_digest()
            if self._source_digest is not None
            else rules_digest.network_digest(self.options.model),
            "opponent_network": self._opponent_digest()
            if self._opponent_digest is not None
            else rules_digest.network_digest(self.options.opponent_model),
            **search,
            "model": self.options.model,
            "weights": _digest(self.options.weights),
            "opponent_model": self.options.opponent_model,
            "opponent_weights": _digest(self.options.opponent_weights),
            "dtype": self.setup.dtype if self.evaluator == "network" else None,
            "deterministic": self.options.deterministic,
        }


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _digest(path: Path | None) -> str | None:
    return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()


def parsed(text: str) -> dict[str, str]:
    """`key=value,key=value` as a dict; what stands between brackets is one value, as in `go(board_size=9,komi=5.5)`.

    Raises UsageError.
    """
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    pairs = [part.partition("=") for part in parts if part.strip()]
    for key, equals, value in pairs:
        if not (equals and key.strip() and value.strip()):
            raise UsageError(
                f"--game-options: '{key}{equals}{value}' is not of the form key=value. Write key=value,key=value."
            )
    return {key.strip(): value.strip() for key, _, value in pairs}
