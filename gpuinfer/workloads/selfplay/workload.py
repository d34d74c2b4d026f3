"""Self-play: the workload that plays many games with a tree search, in as many processes as the machine has cores."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from gpuinfer import api, machine
from gpuinfer.api import Infer, ModelSpec, Progress, Setup, Workers, Workload
from gpuinfer.errors import UnknownName, UsageError, WorkerDied
from gpuinfer.workloads.selfplay import games
from gpuinfer.workloads.selfplay.records import Folder

EVALUATORS = ("network", "uniform", "rollout")
MODELS = ("blobnet", "blobnet-small", "uniform", "rollout", "module:factory")
ROWS_WITHOUT_ROOFLINE = 512  # a block's, where the best batch was not measured
CACHED_BYTES = 512 << 10  # of trees a worker, where no network wants large blocks: they stay in the core's own cache
MOST_CUDA_WORKERS = 8
MEMORY_SHARE = 0.5  # of what is available now, for all games in flight


class SelfPlay(Workload):
    """Play games with a tree search, every move of all of them at once; write records to learn from."""

    class Options(api.Options):
        game: str = Field("blob", description="the game, or module:Class", json_schema_extra={"kind": "games"})
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
        workers: int | None = Field(None, ge=1, le=1024, description="processes [one a core]")
        games_in_flight: int | None = Field(
            None, ge=1, description="games played at once, by all workers [so that blocks reach the best batch]"
        )
        model: str = Field("blobnet", description="blobnet, blobnet-small, uniform, rollout or module:factory")
        weights: Path | None = Field(None, description="safetensors, or a torch file of plain tensors")
        out: Path | None = Field(None, description="write records to this folder")
        resume: bool = Field(False, description="go on with the records in --out")
        deterministic: bool = Field(False, description="the same games with a network, however they are batched")
        exploration: float = Field(1.5, gt=0, le=1e6, description="c of PUCT")
        noise: float = Field(0.25, ge=0, lt=1, description="share of Dirichlet noise in the root's priors")
        concentration: float = Field(10.0, gt=0, le=1e6, description="of the noise: alpha is this over the legal moves")
        temperature: float = Field(1.0, ge=0, le=1e6, description="of the choice among visits, early in a game")
        temperature_moves: int = Field(8, ge=0, description="moves of a game that are drawn; later ones are the best")

    options: Options

    def __init__(self, setup: Setup | None = None, /, **options: Any) -> None:
        super().__init__(setup, **options)
        given = {key: getattr(self.options, key) for key in games.FLAGS}
        self._game_options = {key: value for key, value in given.items() if value is not None}
        self._game_options |= parsed(self.options.game_options)
        self.game = games.build(self.options.game, self._game_options)
        if self.options.model not in MODELS and ":" not in self.options.model:
            raise UnknownName("model", self.options.model, MODELS, label="Choices")
        if self.options.resume and self.options.out is None:
            raise UsageError("--resume needs to know where the records are. Add --out DIR.")
        if self.options.weights is not None and not self.options.weights.is_file():
            raise UsageError(f"--weights: no file '{self.options.weights}'. Give the file that holds the weights.")

    def model(self) -> ModelSpec | None:
        if self.evaluator != "network":
            return None
        return ModelSpec(
            name=self.options.model,
            weights=str(self.options.weights) if self.options.weights else None,
            inputs=self.game.features,
            input_dtype=self.game.feature_dtype,
            arguments={"actions": self.game.actions, "seats": self.game.seats},
        )

    @property
    def asks(self) -> bool:
        return self.evaluator == "network"

    @property
    def evaluator(self) -> Literal["network", "uniform", "rollout"]:
        return self.options.model if self.options.model in ("uniform", "rollout") else "network"  # type: ignore[return-value]

    @property
    def processes(self) -> int:
        if self.options.workers is not None:
            return self.options.workers
        cores = min(machine.cores(), MOST_CUDA_WORKERS) if self.on_cuda else machine.cores()
        return max(1, min(cores, self.options.games))

    @property
    def on_cuda(self) -> bool:
        return self.setup.device.startswith("cuda") or (self.setup.device == "auto" and machine.has_cuda())

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
        """Messages to a worker: {games: [numbers], more: are there others}. From it: {ready: slots of each block},
        {need: how many games}, {counts: {games, simulations, evaluations}, begun}, and the same with {ended}.
        """
        folder = Folder(self.options.out) if self.options.out else None
        finished = folder.open(self.deciding_settings(), self.options.resume) if folder else set()
        if finished and max(finished) >= self.options.games:
            raise UsageError(
                f"{self.options.out} holds games up to number {max(finished)} already, more than --games "
                f"{self.options.games}. Ask for {max(finished) + 1} or more."
            )
        match = Match(self.options.games, finished, self.arguments(infer, len(finished)))
        if match.left:
            yield match.progress("starting the workers", setup=True)
            async with infer.workers("gpuinfer.workloads.selfplay.player:play", match.arguments) as workers:
                async for progress in match.follow(workers):
                    yield progress
        if folder:
            folder.close(match.done)
        yield match.progress()

    def arguments(self, infer: Infer, finished: int) -> list[dict[str, Any]]:
        """What each worker is told: plain values."""
        left = self.options.games - finished
        workers = max(1, min(self.processes, left))
        return [
            {
                "game": self.options.game,
                "game_options": self._game_options,
                "search": self.search(),
                "slots": self.slots(infer, workers, left),
                "halves": self.halves,
                "network": self.evaluator == "network",
                "out": str(self.options.out) if self.options.out else None,
            }
            for _ in range(workers)
        ]

    def search(self) -> dict[str, Any]:
        """The fields of `arrays.Search`."""
        names = ("simulations", "exploration", "noise", "concentration", "temperature", "temperature_moves")
        return {
            **{name: getattr(self.options, name) for name in names},
            "determinizations": self.determinizations,
            "seed": self.setup.seed,
            "evaluator": EVALUATORS.index(self.evaluator),
            "record": self.options.out is not None,
        }

    def slots(self, infer: Infer, workers: int, left: int) -> int:
        """How many games a worker has in flight: with a network, two blocks of the best batch size, or one of twice it.

        Games come and go, so a block is never quite full: more than the best size costs nothing, less does.
        """
        if self.options.games_in_flight is not None:
            share = math.ceil(self.options.games_in_flight / workers)
        elif self.evaluator == "network":
            rows = infer.roofline.at_rows if infer.roofline else ROWS_WITHOUT_ROOFLINE
            share = 2 * max(1, rows // self.determinizations)
        else:
            share = CACHED_BYTES // (self.determinizations * self.tree_bytes)
        if self.options.games_in_flight is None:
            share = min(share, int(MEMORY_SHARE * machine.memory_available() / workers / self.game_bytes))
        return max(1, min(share, math.ceil(left / workers)))

    @property
    def game_bytes(self) -> int:
        """About, of one game in flight: its trees, their rows in the block, and its records."""
        row = self.game.features * np.dtype(self.game.feature_dtype).itemsize
        records = self.game.max_moves * (row + 5 * self.game.actions) if self.options.out else 0
        return self.determinizations * (self.tree_bytes + row) + records

    @property
    def tree_bytes(self) -> int:
        """About, of one tree: 12-byte nodes, 16-byte edges, the root's position."""
        return (self.options.simulations + 1) * (12 + 16 * self.game.max_legal) + 8 * self.game.words

    def deciding_settings(self) -> dict[str, Any]:
        """All that decides how a game goes: records of other settings must not be mixed with them."""
        search = self.search()
        del search["record"], search["evaluator"]
        weights = self.options.weights
        return {
            "game": self.options.game,
            "game_options": self.game.options.model_dump(),
            **search,
            "model": self.options.model,
            "weights": hashlib.sha256(weights.read_bytes()).hexdigest() if weights else None,
            "dtype": self.setup.dtype if self.evaluator == "network" else None,
            "deterministic": self.options.deterministic,
        }


class Match:
    """Hands games out to workers, each to exactly one, and adds up what they report."""

    def __init__(self, total: int, finished: set[int], arguments: list[dict[str, Any]]) -> None:
        self.arguments = arguments
        self.left = total - len(finished)
        self._total, self._before = total, len(finished)
        self._ids: Iterator[int] = itertools.filterfalse(finished.__contains__, range(total))
        self._counts: list[Mapping[str, int]] = [{} for _ in arguments]
        self._begun = [0.0] * len(arguments)
        self._slots: dict[int, list[int]] = {}  # of each block, by worker
        self._ended: set[int] = set()

    @property
    def done(self) -> int:
        return self._before + sum(counts.get("games", 0) for counts in self._counts)

    async def follow(self, workers: Workers) -> AsyncIterator[Progress]:
        async for worker, message in workers:
            if message is None:
                if worker not in self._ended:
                    raise WorkerDied(lost(worker, self.arguments[worker]["out"]))
            elif "ready" in message:
                self._slots[worker] = message["ready"]
                if self.all_ready:
                    yield self.progress()  # the run's clock starts
                    await self._deal(workers)
                else:
                    yield self.progress("starting the workers", setup=True)
            elif "need" in message:
                await self._give(workers, worker, min(message["need"], math.ceil(self.left / len(self.arguments))))
            elif "note" in message:
                yield self.progress(message["note"], setup=True)
            else:
                self._counts[worker], self._begun[worker] = message["counts"], message["begun"]
                if "ended" in message:
                    self._ended.add(worker)
                if self.all_ready:
                    yield self.progress()

    @property
    def all_ready(self) -> bool:
        return len(self._slots) == len(self.arguments)

    async def _deal(self, workers: Workers) -> None:
        """The first games: as many as fit, in equal shares."""
        for worker, arguments in enumerate(self.arguments):
            share = math.ceil(self.left / (len(self.arguments) - worker))
            await self._give(workers, worker, min(arguments["slots"], share))

    async def _give(self, workers: Workers, worker: int, games: int) -> None:
        if worker in self._ended:  # it was asked to stop meanwhile
            return
        given = list(itertools.islice(self._ids, games))
        self.left -= len(given)
        await workers.send(worker, {"games": given, "more": self.left > 0})

    def progress(self, note: str = "", setup: bool = False) -> Progress:
        counts = {
            name: sum(part.get(name, 0) for part in self._counts) for name in ("games", "simulations", "evaluations")
        }
        return Progress(
            done=self.done,
            total=self._total,
            unit="games",
            before=self._before,
            begun=sum(self._begun),
            counts=counts,
            facts=self.facts(),
            note=note,
            setup=setup,
        )

    def facts(self) -> dict[str, float]:
        slots = sum(arguments["slots"] for arguments in self.arguments)
        return {
            "workers": len(self.arguments),
            "blocks": max((len(blocks) for blocks in self._slots.values()), default=1),
            "games_in_flight": slots,
            "rows_outstanding": slots * self.arguments[0]["search"]["determinizations"],
        }


def lost(worker: int, out: str | None) -> str:
    """What to say of a worker that was killed."""
    kept = (
        f"Finished games are kept in {out}: run again with --resume." if out else "Run again, with --out to keep games."
    )
    return f"worker {worker} was killed before its games were done (SIGKILL; out of memory?). {kept}"


def parsed(text: str) -> dict[str, str]:
    """`key=value,key=value` as a dict. Raises UsageError."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    for key, equals, value in pairs:
        if not (equals and key.strip() and value.strip()):
            raise UsageError(
                f"--game-options: '{key}{equals}{value}' is not of the form key=value. Write key=value,key=value."
            )
    return {key.strip(): value.strip() for key, _, value in pairs}
