"""Self-play in a program: games searched by a network, their records, and a network that learns from them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, Unpack

from gpuinfer.api import Roofline, Setup, Strategy
from gpuinfer.config import blame, registry
from gpuinfer.config.foreign_names import option_hint
from gpuinfer.config.options import GivenValue, check
from gpuinfer.config.settings import Common
from gpuinfer.errors import Closed, UsageError
from gpuinfer.host import children
from gpuinfer.library.choices import backend_of, in_python_words, setup_from, strategy_of
from gpuinfer.library.game_folder import GameRecords, PlayedGame, main_figures
from gpuinfer.library.measured import SessionVerdict
from gpuinfer.runtime.background_run import BackgroundRun
from gpuinfer.runtime.run import RunPlan, RunUpdate

if TYPE_CHECKING:
    from torch import nn

    from gpuinfer.workloads.selfplay.game import Game

LOOK_S = 0.1  # between two looks for games that have finished
FIRST_SHARD_S = 0.3  # a game of a short run is there to be read so soon after it has ended
OBJECTS = (("model", "weights", ""), ("opponent_model", "opponent_weights", "opponent_"))
"""Options that may be objects, those of their weights, and how their names at the workload begin."""
NO_PROCESS = "play in this process: workers=0"
TRAINED = "weights.safetensors"  # in the folder of a training that is over
ARGUMENTS = (
    *("game", "backend", "backend_options", "strategy", "strategy_options", "devices", "dtype", "seed", "roofline"),
    *("games", "out", "resume"),
)  # beside the options, for whoever misspells one


class SelfPlayOptions(TypedDict, total=False):
    """Options of `SelfPlay`, those of the command `selfplay`; `gpuinfer docs --simulations` explains one."""

    model: Any
    weights: str | Path | None
    simulations: int
    determinizations: int | None
    workers: int | None
    games_in_flight: int | None
    oversubscribe: bool
    opponent_model: Any
    opponent_weights: str | Path | None
    deterministic: bool
    exploration: float
    noise: float
    concentration: float
    temperature: float
    temperature_moves: int
    resign: float | None
    resign_check: float | None
    players: int | None
    cards: int | None
    trump: str | None
    scoring: str | None
    game_options: str | Mapping[str, Any]


class WatchOptions(TypedDict, total=False):
    """How a run is watched. `live`: the live view of the terminal; `progress`: a bar; `track`: where its figures go,
    such as "tensorboard=runs" or a list of such; `on_figures(step, figures)`: takes them, in the run's thread, and
    returns at once.
    """

    live: bool
    progress: bool
    track: str | Sequence[str]
    on_figures: Callable[[int, Mapping[str, float]], None]


class RunOptions(SelfPlayOptions, WatchOptions, total=False):
    """Options of one run: those of `SelfPlay`, its seed, and how it is watched."""

    seed: int


class TrainOptions(WatchOptions, total=False):
    """Options of `SelfPlay.train`, those of the command `train`, and how it is watched."""

    model: Any
    weights: str | Path | None
    batch_size: int
    learning_rate: float
    schedule: Literal["cosine", "constant"]
    warmup_steps: int
    weight_decay: float
    clip_norm: float
    value_weight: float
    window: int | None
    symmetries: bool
    validation_share: float
    checkpoint_every: int
    picture: bool


class SelfPlay:
    """Games that a network plays against itself, every move searched; records to learn from; and the learning.

        games = gpuinfer.SelfPlay("connect-four", model="blobnet-small", simulations=100)
        records = games.play(300)                       # waits for the end; Ctrl-C keeps what is finished
        for game in records:
            print(game.number, game.returns, game.policies.shape)

        for game in games.stream(300): ...              # each game as soon as it has finished
        records = await games.play_async(300)           # in a coroutine; also `async for game in games.stream(300)`

        records.save("folder")                          # as `gpuinfer selfplay --out folder` writes them
        records = games.play(600, out="folder", resume=True)    # goes on with them: 300 more

        network = games.train(records, steps=400)       # a torch.nn.Module
        print(games.verdict())                          # where the time went, and what to change

    `game`: "blob", "connect-four", another that is installed, "module:Class", or a class of your own or an object of
    one: derive from `gpuinfer.workloads.selfplay.python_game.PythonGame` (`gpuinfer docs selfplay` has an example).

    `model`: a `torch.nn.Module` that answers features [rows, features] with policy logits [rows, actions] and values
    [rows, seats], with the weights that it has when a run begins; a class of such, or a function, that makes it from
    those of `features`, `actions` and `seats` that it takes; or a name: "blobnet" (the default), "blobnet-small",
    "module:factory", with `weights` of a file; "uniform" and "rollout" search without a network.

    `workers`: processes that play, by default one a core; 0 plays in this process, and so do games and networks that
    are defined in a notebook. A script that starts processes does so below `if __name__ == "__main__":`, since each of
    them imports the script.

    `backend`: "inprocess" (each worker has a model of its own) or "central" (one server for all of them), with
    `backend_options={"max_rows": 512}`; `strategy`: a name or an object such as `gpuinfer.Adaptive()`; `devices`:
    "auto", "cpu", "cuda:1" or a list; `dtype`; `seed`: the same seed plays the same games (with a network:
    `deterministic=True`).

    `roofline`: whether the bare model is measured before the first run, in some seconds: it finds the best size of a
    block, and the verdict says how near a run came. By default on CUDA devices alone, where that size matters most.

    All other options are those of the command `selfplay`; each can be given to `play` and `stream` too, for one run:

        simulations=30, determinizations=None        in each tree; guesses at what is hidden, a tree for each
        exploration=1.5                              c of PUCT
        noise=0.25, concentration=10.0               Dirichlet noise in the root's priors
        temperature=1.0, temperature_moves=8         of the choice among visits, in a game's first moves
        resign=None, resign_check=None               resign where a position is worth -0.9 or less: resign=0.9
        opponent_model=None, opponent_weights=None   who has half of the seats: as `model` and `weights`
        games_in_flight=None                         games played at once, by all workers
        deterministic=False                          the same games with a network, however they are batched
        game_options={"rows": 5}                     of a game of yours; players, cards, trump, scoring: of "blob"

    Raises `UsageError`, which ends with the cure, for options that cannot be.
    """

    def __init__(
        self,
        game: str | type[Game] | Game,
        *,
        backend: str = "inprocess",
        backend_options: Mapping[str, Any] | None = None,
        strategy: str | Strategy = "dynamic",
        strategy_options: Mapping[str, Any] | None = None,
        devices: str | Sequence[Any] = "auto",
        dtype: Any = "float32",
        seed: int = 0,
        roofline: bool | None = None,
        **options: Unpack[SelfPlayOptions],
    ) -> None:
        if strategy_options and not isinstance(strategy, str):
            raise UsageError("strategy_options go with a name, and this strategy is an object with options of its own.")
        self._game, self._options = game, dict[str, Any](options)
        self._backend, self._backend_options = backend, dict(backend_options or {})
        self._strategy, self._strategy_options = strategy, dict(strategy_options or {})
        self._setup = setup_from(devices=devices, dtype=dtype, seed=seed)
        for name, one in {"dtype": self._setup.dtype, "seed": seed}.items():
            check(Common, {name: GivenValue(one, f"{name}={one!r}")}, "SelfPlay")
        self._wants_roofline = roofline
        self._roofline: Roofline | None = None  # once a run has measured it
        self._last: BackgroundRun | None = None
        self._records: GameRecords | None = None
        self._streams: set[GameStream] = set()
        self._process = os.getpid()
        self._closed = False
        self._plan(1, None, False, {})  # what cannot be is refused here

    def __repr__(self) -> str:
        return f"<SelfPlay {self._named()!r}, model={self._options.get('model', 'blobnet')!r}>"

    def _named(self) -> str:
        if isinstance(self._game, str):
            return self._game
        return (self._game if isinstance(self._game, type) else type(self._game)).__name__

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop what still runs, in order. Records stay."""
        self._closed = True
        for stream in list(self._streams):
            stream.close()

    # Playing

    def play(
        self,
        games: int,
        *,
        out: str | Path | None = None,
        resume: bool = False,
        **options: Unpack[RunOptions],
    ) -> GameRecords:
        """Play so many games, wait for their end, and return their records. Any thread may call it.

        `out`: the folder for the records, else a temporary one; `resume`: go on with those that are there, to `games`
        in all. `live=True` shows the live view in the terminal, `progress=True` a bar; `track="tensorboard=runs"` and
        `on_figures=function` take its figures while it goes on. `seed` and other options of `SelfPlay`: for this run.

        Ctrl-C stops the run in order and raises `KeyboardInterrupt`; `self.records` has the games that were finished
        by then, and a second Ctrl-C ends it at once. Raises `UsageError` for what cannot be played, and `WorkError`
        where the work failed, with the report so far as its `report`.
        """
        stream = self.stream(games, out=out, resume=resume, **options)
        with stream:
            stream.wait()
        return stream.records

    async def play_async(
        self,
        games: int,
        *,
        out: str | Path | None = None,
        resume: bool = False,
        **options: Unpack[RunOptions],
    ) -> GameRecords:
        """`play` for a coroutine: the event loop goes on meanwhile. When it is cancelled the run stops in order."""
        stream = await asyncio.to_thread(self.stream, games, out=out, resume=resume, **options)
        async with stream:
            await stream.wait_async()
        return stream.records

    def stream(
        self,
        games: int,
        *,
        out: str | Path | None = None,
        resume: bool = False,
        **options: Unpack[RunOptions],
    ) -> GameStream:
        """The games of a run as they finish: `for game in games.stream(300)`, or `async for`. Arguments as of `play`.

        The run begins with the first look. Leaving the loop early stops it, in order: what is finished is kept, in
        `self.records`.
        """
        self._refuse()
        if out is not None and (not isinstance(out, str | os.PathLike) or not os.fspath(out)):
            raise UsageError(f'out={out!r:.60} names no folder. Give one, such as out="games", or leave it out.')
        records = GameRecords.temporary() if out is None else GameRecords(out, new=True)
        if out is None and resume:
            raise UsageError('resume=True needs to know where the records are. Add out="folder".')
        changes = {name: one for name, one in options.items() if name not in WatchOptions.__annotations__}
        plan = self._plan(games, records.path, resume, changes)
        return GameStream(self, plan, records, changes, _Watch.of("selfplay", games, options))

    def _refuse(self) -> None:
        """Raises where no run can begin: `Closed`, `UsageError`."""
        children.refuse_while_imported("self-play")
        if self._closed:
            raise Closed("this SelfPlay is closed. Make another one.")
        if os.getpid() != self._process:
            raise UsageError(
                f"this SelfPlay was made in process {self._process}, and this process ({os.getpid()}) is a fork of it. "
                "Make one here, or start processes by multiprocessing's method 'spawn'."
            )

    def _plan(self, games: int, out: Path | None, resume: bool, changes: Mapping[str, Any]) -> RunPlan:
        """All that a run needs, made and checked. Raises `UsageError`."""
        from gpuinfer.workloads.selfplay import games as known_games

        changes = dict(changes)
        seed = changes.pop("seed", None)
        if seed is not None:
            check(Common, {"seed": GivenValue(seed, f"seed={seed!r}")}, "SelfPlay")
        setup = self._setup if seed is None else replace(self._setup, seed=seed)
        values: dict[str, Any] = {**self._options, **changes, "games": games, "resume": resume, "game": self._game}
        values |= {} if out is None else {"out": out}
        with in_python_words():
            if not isinstance(self._game, str):
                kind = self._game if isinstance(self._game, type) else type(self._game)
                values["game"], of_object = known_games.name_of(self._game)
                if values.get("workers") is None and known_games.why_local(kind) is not None:
                    values["workers"] = 0
                values["game_options"] = {**of_object, **_as_mapping(values.get("game_options") or {})}
            if isinstance(options := values.get("game_options"), Mapping):
                values["game_options"] = ",".join(f"{name}={value}" for name, value in options.items())
            sizes = functools.partial(_game_sizes, dict(values))
            sources: dict[str, Any] = {}
            for name, weights, of_workload in OBJECTS:
                if (made := _ModelObject.of(values, self._backend, setup, sizes, name, weights)) is not None:
                    values |= {name: made.title, "workers": made.workers}
                    sources |= {f"{of_workload}source": made.source, f"{of_workload or 'source_'}digest": made.digest}
            known = set(RunOptions.__annotations__) | set(ARGUMENTS)
            return _plan_of(
                "selfplay", values, known, setup, (self._backend, self._backend_options), self._strategy_in, sources
            )

    def _strategy_in(self, setup: Setup) -> Strategy:
        return strategy_of(self._strategy, self._strategy_options, setup)

    def _begin(self, plan: RunPlan, changes: Mapping[str, Any], watch: _Watch) -> BackgroundRun:
        """Start a run of self-play."""
        workload: Any = plan.workload
        workload.first_shard_s, workload.merges_records = FIRST_SHARD_S, False
        wanted = workload.on_cuda and not workload.local if self._wants_roofline is None else self._wants_roofline
        same = not changes.keys() & {"model", "weights", "workers", "games_in_flight"}
        known = self._roofline if wanted and same else None

        def look(update: RunUpdate) -> None:
            if same:
                self._roofline = update.roofline or self._roofline
            watch.update(update)

        run = BackgroundRun(plan, "self-play", look, watch.on_figures, watch.track, roofline=known or wanted)
        self._last = run  # another thread may begin one meanwhile
        run.start()
        return run

    # What was played

    @property
    def records(self) -> GameRecords:
        """The records of the last run, as far as it came. Raises `UsageError` before the first."""
        if self._records is None:
            raise UsageError("nothing has been played yet. Call play(100).")
        return self._records

    def report(self) -> dict[str, Any]:
        """All that was measured in the last run, as `--json` of the command writes it; also while it goes on."""
        if self._last is None:
            raise UsageError("nothing has been played yet. Call play(100).")
        return self._last.report()

    def stats(self) -> dict[str, Any]:
        """The figures of the last run until now: games and rates, batches, latency in seconds, errors."""
        return main_figures(self.report())

    def verdict(self) -> SessionVerdict:
        """Where the time of the last run went, what held it back, and what to change."""
        return SessionVerdict(self.report())

    # Learning

    def train(
        self,
        records: GameRecords | str | Path | Sequence[GameRecords | str | Path],
        *,
        steps: int = 1000,
        out: str | Path | None = None,
        resume: bool = False,
        backend_options: Mapping[str, Any] | None = None,
        **options: Unpack[TrainOptions],
    ) -> nn.Module:
        """Train a network on records, oldest first: on the shares of visits and on the outcomes. Returns the trained
        module, float32 on the CPU, in evaluation mode.

        It begins with this object's model and weights, unless `model` or `weights` say otherwise. `out`: a folder for
        checkpoints, the loss curve and the weights, which `resume` goes on with; without it nothing of them is kept.
        Other options are those of the command `train`. Ctrl-C stops after a checkpoint and raises `KeyboardInterrupt`.
        """
        self._refuse()
        own = {name: one for name, one in self._options.items() if name in ("model", "weights")}
        if "model" in options:
            own.pop("weights", None)
        watched = {name: one for name, one in options.items() if name in WatchOptions.__annotations__}
        values = {**own, **{name: one for name, one in options.items() if name not in watched}}
        values |= {"records": _folders(records), "steps": steps, "resume": resume}
        if values.get("model") in ("uniform", "rollout"):
            raise UsageError(f'model="{values["model"]}" has nothing to learn. Name a network: model="blobnet-small".')
        with contextlib.ExitStack() as stack, in_python_words():
            values["out"] = Path(stack.enter_context(tempfile.TemporaryDirectory()) if out is None else out)
            known = {*TrainOptions.__annotations__, "steps", "out", "resume", "backend_options"}
            served = "inprocess", dict(backend_options or {})
            sizes = functools.partial(_records_sizes, values["records"])
            made = _ModelObject.of({"workers": 0} | values, "inprocess", self._setup, sizes)
            values |= {} if made is None else {"model": made.title}
            sources = {} if made is None else {"source": made.source, "source_digest": made.digest}
            strategy = functools.partial(strategy_of, "dynamic", {})
            plan = _plan_of("train", values, known, self._setup, served, strategy, sources)
            watch = stack.enter_context(_Watch.of("train", steps, watched))
            run = BackgroundRun(plan, "training", watch.update, watch.on_figures, watch.track, roofline=False)
            self._last = run
            run.start()
            stack.callback(run.stop_in_order)
            watch.finish(run.result())
            return _trained(plan, values["out"])


class GameStream:
    """The games of one run as they finish, once: `for game in stream`, `async for game in stream`.

    `records` has all that are finished. Leaving the loop, `close` and leaving `with` stop the run in order.
    """

    def __init__(
        self,
        owner: SelfPlay,
        plan: RunPlan,
        records: GameRecords,
        changes: Mapping[str, Any],
        watch: _Watch,
    ) -> None:
        self.records = records
        self._owner, self._plan, self._changes, self._watch = owner, plan, changes, watch
        self._run: BackgroundRun | None = None
        self._seen = records.shards()  # of earlier runs
        self._closed = False

    def _started(self) -> BackgroundRun:
        """The run, which begins with the first call. Raises `Closed` once the stream is closed."""
        if self._closed:
            raise Closed("this stream is closed: its games are in `records`. Call stream() again for another run.")
        if self._run is None:
            self._owner._refuse()
            self._watch.__enter__()
            try:
                self._run = self._owner._begin(self._plan, self._changes, self._watch)
            except BaseException:
                self._watch.__exit__(None, None, None)
                raise
            self.records.run = self._run
            self._owner._records = self.records
            self._owner._streams.add(self)
        return self._run

    def wait(self) -> None:
        """Wait for the end of the run. Raises what it raised."""
        self._finish(self._started())

    def _finish(self, run: BackgroundRun) -> None:
        with in_python_words():
            self._watch.finish(run.result())

    async def wait_async(self) -> None:
        """`wait` for a coroutine."""
        await self._finish_async(self._started())

    async def _finish_async(self, run: BackgroundRun) -> None:
        with in_python_words():
            self._watch.finish(await run.result_async())

    def __iter__(self) -> Iterator[PlayedGame]:
        run = self._started()
        try:
            over = False
            while not over:
                over = run.wait(LOOK_S)  # before the look: the last games are written by then
                yield from self.records.unseen(self._seen)
            self._finish(run)
        finally:
            self.close()

    async def __aiter__(self) -> AsyncIterator[PlayedGame]:
        run = self._started()
        try:
            over = False
            while not over:
                over = run.over
                for game in await asyncio.to_thread(lambda: list(self.records.unseen(self._seen))):
                    yield game
                await asyncio.sleep(0 if over else LOOK_S)
            await self._finish_async(run)
        finally:
            await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Stop the run in order, and wait for its end: what is finished is in `records`."""
        was_closed, self._closed = self._closed, True
        self._owner._streams.discard(self)
        if self._run is None or was_closed:
            return
        try:
            self._run.stop_in_order()
        finally:
            self._watch.__exit__(None, None, None)
            workload: Any = self._plan.workload
            del self._plan
            if sources := [one for one in (workload.source, workload.opponent_source) if one is not None]:
                for source in sources:
                    source.release()
                workload.source = workload.opponent_source = None
                gc.collect()  # sessions are in cycles, and this one has a copy of the weights

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await asyncio.to_thread(self.close)


@dataclass
class _Watch:
    """How a user watches a run, as a context: a live view, a bar, figures, or nothing."""

    title: str
    total: int
    live: bool = False
    progress: bool = False
    track: Sequence[str] = ()
    on_figures: Callable[[int, Mapping[str, float]], None] | None = None
    _views: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _show: list[Callable[[RunUpdate], None]] = field(default_factory=list)
    _advance: Callable[[int], None] = lambda more: None
    _done: int = 0

    @classmethod
    def of(cls, title: str, total: int, options: Mapping[str, Any]) -> _Watch:
        values = {name: options[name] for name in WatchOptions.__annotations__ if name in options}
        track = values.pop("track", ())
        return cls(title, total, track=[track] if isinstance(track, str) else list(track), **values)

    def __enter__(self) -> Self:
        from gpuinfer.cli.screen.display import Display, progress_bar

        if self.live:
            self._show.append(self._views.enter_context(Display(self.title)).update)
        if self.progress:
            self._advance = self._views.enter_context(progress_bar(self.title, self.total))
        return self

    def update(self, update: RunUpdate) -> None:
        for show in self._show:
            show(update)
        self._reach(update.progress.done)

    def finish(self, report: Mapping[str, Any]) -> None:
        """The last games may have come after the last update."""
        self._reach(report["progress"]["done"])

    def _reach(self, done: int) -> None:
        if done > self._done:
            self._advance(done - self._done)
            self._done = done

    def __exit__(self, *raised: object) -> None:
        self._views.close()


@dataclass(frozen=True)
class _ModelObject:
    """A model that the program holds, for a workload."""

    title: str
    source: Any  # of `ModelSpec`
    digest: Callable[[], str]
    workers: int | None

    @classmethod
    def of(
        cls,
        options: Mapping[str, Any],
        backend: str,
        setup: Setup,
        sizes: Callable[[], Mapping[str, int]],
        name: str = "model",
        weights: str = "weights",
    ) -> _ModelObject | None:
        """The model that the option `name` is; None where that is a name. `sizes`: what a class may be made with.

        Where worker processes cannot have it, and none were asked for, this process plays. Raises `UsageError`.
        """
        model, workers = options.get(name), options.get("workers")
        if model is None or isinstance(model, str):
            return None
        from gpuinfer.models.model_object import LocalModel, PortableModel, title_of

        if options.get(weights) is not None:
            raise UsageError(f"{weights} go with the name of a model, and this one is an object that has its own.")
        if isinstance(model, type) or _is_factory(model):
            from gpuinfer.models.load import make_seeded

            model = make_seeded(model, dict(sizes()), setup.seed)
        local, title = LocalModel(model), title_of(model)
        if workers == 0 and backend == "inprocess":
            return cls(title, local, local.digest, workers)
        try:
            return cls(title, PortableModel.of(local), local.digest, workers)
        except UsageError as error:
            if workers is None and backend == "inprocess":
                return cls(title, local, local.digest, 0)
            said = str(error).replace('use backend="inprocess", which needs no other process', NO_PROCESS)
            raise UsageError(said.replace('use backend="inprocess"', NO_PROCESS)) from None


def _is_factory(model: Any) -> bool:
    """Whether it makes a model of so many actions and seats, rather than being one."""
    return inspect.isroutine(model) and bool({"actions", "seats"} & inspect.signature(model).parameters.keys())


def _game_sizes(options: Mapping[str, Any]) -> dict[str, int]:
    """What the game of these options says of a network for it."""
    kind = registry.load("workloads", "selfplay")
    names = ("game", "game_options", "players", "cards", "trump", "scoring")
    game = kind(None, **{name: options[name] for name in names if name in options}).game
    return {"features": game.features, "actions": game.actions, "seats": game.seats}


def _records_sizes(folders: Sequence[Path]) -> dict[str, int]:
    """The same, as records say it."""
    from gpuinfer.models.positions import sizes_of

    sizes = sizes_of(folders)
    return {"features": sizes.features, "actions": sizes.actions, "seats": sizes.seats}


def _plan_of(
    name: str,
    options: Mapping[str, Any],
    known: Set[str],
    setup: Setup,
    backend: tuple[str, Mapping[str, Any]],
    strategy: Callable[[Setup], Strategy],
    sources: Mapping[str, Any],
) -> RunPlan:
    """The workload of that name with these options, its backend and its strategy. `sources`: the models that are
    objects, as the workload takes them. Raises `UsageError`.
    """
    kind = registry.load("workloads", name)
    for option in options:
        if option not in kind.Options.model_fields:
            hint = option_hint(option, known)
            raise UsageError(
                f"there is no option '{option}'. {hint}{' ' if hint else ''}Options: {', '.join(sorted(known))}."
            )
    values = check(kind.Options, {key: GivenValue(value, f"{key}={value!r}") for key, value in options.items()}, name)
    workload = blame.make(kind, setup, {**values, **sources})
    if not workload.asks and backend[0] != "inprocess":
        raise UsageError(
            f'backend="{backend[0]}" would never be asked with these options. Leave it out, or name a model.'
        )
    setup = replace(setup, model=workload.model(), processes=workload.processes, deterministic=workload.deterministic)
    served, chosen = backend_of(backend[0], setup, backend[1]), strategy(setup)
    names = {"workload": name, "backend": backend[0], "strategy": registry_name(chosen)}
    return RunPlan(
        workload,
        served,
        chosen,
        {
            **names,
            "device": ",".join(setup.devices),
            "dtype": setup.dtype,
            "seed": setup.seed,
            name: workload.options.model_dump(mode="json"),
            "backends": {backend[0]: served.options.model_dump(mode="json")},
            "strategies": {names["strategy"]: chosen.options.model_dump(mode="json")},
        },
    )


def registry_name(strategy: Strategy) -> str:
    """What the strategy is called where it is installed."""
    record = blame.record_of(type(strategy))
    return type(strategy).__name__.lower() if record is None else record.name


def _as_mapping(options: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(options, str):
        return dict(pair.split("=", 1) for pair in options.split(",") if "=" in pair)
    return dict(options)


def _folders(records: GameRecords | str | Path | Sequence[GameRecords | str | Path]) -> list[Path]:
    """Where they are. Raises `UsageError` for records without a game."""
    several = [records] if isinstance(records, GameRecords | str | Path) else list(records)
    for one in several:
        if isinstance(one, GameRecords) and not len(one):
            raise UsageError(f"there are no games in {one!r}. Play some first: games.play(100).")
    return [one.path if isinstance(one, GameRecords) else Path(one) for one in several]


def _trained(plan: RunPlan, folder: Path) -> nn.Module:
    """The model of a training that is over, with the weights that it has left."""
    from gpuinfer.models.load import with_weights

    spec = plan.backend.setup.model
    if spec is None:
        raise UsageError('a training needs a model. Name one: model="blobnet-small".')
    return with_weights(replace(spec, weights=str(folder / TRAINED)), plan.backend.setup.seed).eval()
