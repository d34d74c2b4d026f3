"""Let a network learn from its own games: self-play, training, self-play, and how strong it has become."""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from gpuinfer import api
from gpuinfer.api import ModelSpec, Setup, Workload
from gpuinfer.cli import flags, output
from gpuinfer.cli.problems import CHECK_FAILED, PARTIAL
from gpuinfer.config import blame, registry
from gpuinfer.config.options import check
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.units import duration, left_until, number, whole

if TYPE_CHECKING:
    from gpuinfer.config.settings import Settings
    from gpuinfer.division import Division
    from gpuinfer.lab.loop.cluster_games import ClusterGames
    from gpuinfer.lab.loop.loop_runner import LoopPlan, LoopStep, Report
    from gpuinfer.runtime.tracking import Tracking

NAME = "loop"
GATE_GAMES = 100  # unless somebody says how many
COMMON = (
    "device",
    "dtype",
    "seed",
    "json",
    "track",
    "quiet",
    "verbose",
    "config",
    "backend",
    "backend_options",
    "launcher",
    "launcher_options",
    "nodes_min",
    "deadline",
)
GAME = (
    "players",
    "cards",
    "trump",
    "scoring",
    "game_options",
)  # that self-play gives to the game, where they are given
OF_GAMES = ("simulations", "resign", "resign_check")  # what self-play may refuse
PLAY = (*GAME, "simulations", "exploration", "determinizations", "workers")
STALENESS = 1  # versions, of --asynchronous, unless somebody says how many
NO_PART = (
    "asynchronous",
    "max_staleness",
    "training_device",
    "iterations",
    "evaluate_every",
    "workers",
    "out",
    "resume",
    "fail_under",
)  # of what a loop's folder holds

TEXT = """Let a network learn from its own games: self-play, training, self-play, and how strong it has become.

Each iteration plays `--games` games with the newest weights, and trains on those of the last `--window` iterations.
At the end (and after each so many iterations, `--evaluate-every`) it plays against the first generation.
With `--gate 0.55` a new network plays only once it has won that share of games against the one that plays.
With `--launcher NAME -L nodes=8 --backend central` nodes play the games, and stay up from iteration to iteration.

`--resume` goes on where it was, whatever has ended it.
"""


class LoopOptions(api.Options):
    """The flags of `gpuinfer loop`."""

    game: str = Field("blob", description="the game, or module:Class", json_schema_extra={"kind": "games"})
    players: int | None = Field(None, description="players at the table, as in selfplay")
    cards: int | None = Field(None, description="cards dealt to each player, as in selfplay")
    trump: str | None = Field(None, description="turned, none, or a suit, as in selfplay")
    scoring: str | None = Field(None, description="blob or oh-hell, as in selfplay")
    game_options: str | None = Field(None, description="options of another game, as key=value,key=value")
    model: str = Field(
        "blobnet-small",
        description="blobnet, blobnet-small or module:factory",
        json_schema_extra={"names": ["blobnet", "blobnet-small"]},
    )
    weights: Path | None = Field(None, description="those of the first generation [drawn at random]")
    iterations: int = Field(10, ge=1, le=999, description="each plays and trains once")
    games: int = Field(400, ge=1, description="of self-play, in each iteration")
    simulations: int = Field(50, ge=1, le=10_000, description="simulations in each tree")
    exploration: float = Field(3.0, gt=0, le=1e6, description="c of PUCT, in self-play and in matches")
    temperature_moves: int = Field(16, ge=0, description="moves of a game of self-play that are drawn; not of a match")
    determinizations: int | None = Field(None, ge=1, le=1000, description="guesses at the hidden cards, as in selfplay")
    workers: int | None = Field(None, ge=1, le=1024, description="processes that play [one a core]")
    resign: float | None = Field(
        None,
        gt=0,
        le=1,
        description="resign games of self-play where all is worth minus this or less [never]",
    )
    resign_check: float | None = Field(
        None, ge=0, le=1, description="share of games of self-play without resignation [0.1]"
    )
    window: int = Field(4, ge=1, description="iterations whose games are learnt from, the newest ones")
    training_steps: int = Field(400, ge=1, description="batches that are learnt from, in each iteration")
    batch_size: int = Field(256, ge=1, description="moves in one of them")
    learning_rate: float = Field(1e-3, gt=0, le=10, description="of the training")
    training_device: str | None = Field(
        None, description="the device that trains, or several as cuda:0,cuda:1 [the first that plays]"
    )
    evaluation_games: int = Field(400, ge=2, description="of a match against the first generation")
    evaluate_every: int = Field(0, ge=0, description="iterations from one match to the next; 0: one at the end")
    gate: float | None = Field(
        None, ge=0, le=1, description="score at which a new network becomes the one that plays, as 0.55 [any]"
    )
    gate_games: int | None = Field(None, ge=2, description="of a new network against the one that plays [100]")
    asynchronous: bool = Field(
        False, description="with --launcher: nodes play on while the network is trained, with weights a little older"
    )
    max_staleness: int | None = Field(
        None,
        ge=1,
        le=999,
        description="with --asynchronous: iterations by which weights may be older [1]",
    )
    fail_under: float | None = Field(None, ge=0, le=1, description="exit with 4 when the last score is lower, as 0.75")
    out: Path | None = Field(None, description="the folder for all of it")
    resume: bool = Field(False, description="go on with what is in --out")


def execute(values: Mapping[str, Any]) -> int:
    """Do what is left of the loop, show and write it. The exit code: 3 stopped, 4 too weak, else 0."""
    from gpuinfer.cli.building import merge
    from gpuinfer.cli.workload import log_to_people, open_tracking
    from gpuinfer.host.files import RecordFolder
    from gpuinfer.lab.loop import loop_summary

    merged = merge(NAME, values)
    options, common = LoopOptions(**check(LoopOptions, merged.table(NAME), NAME)), merged.common
    destination = output.Destination(common.report)
    log_to_people(common.verbose)
    if options.gate_games is not None and options.gate is None:
        raise UsageError(f"--gate-games {options.gate_games}: no gate is asked for. Add --gate 0.55.")
    if options.out is None:
        raise UsageError("a loop needs a folder for its games and weights. Add --out DIR.")
    config = [("--config", merged.file)] if merged.file is not None else []
    output.refuse_shared({"--json": common.report}, [*output.named_places(options, written=("out",)), *config])
    spec, sources = _network(options, common.seed)
    if "," in str(options.out):
        raise UsageError(f"--out {options.out}: training reads several folders parted by commas. Give one without.")
    plan = _plan(options, options.out, merged, values.get("backend_options") or [])
    nodes = _nodes(options, plan, merged)
    _refuse_what_training_refuses(plan, spec, merged, options.training_device or _one_of(common.devices))
    settings, command = options.model_dump(mode="json"), flags.spelled(NAME, values)
    tracking = open_tracking(NAME, common, {NAME: settings, **common.model_dump(include={"device", "dtype", "seed"})})
    folder = RecordFolder(options.out, "gpuinfer.loop-folder/1", "")
    kept = {name: value for name, value in options.model_dump(mode="json").items() if name not in NO_PART}
    digest = hashlib.sha256(options.weights.read_bytes()).hexdigest() if options.weights else None
    folder.claim({**kept, "weights": digest, "seed": common.seed, "dtype": common.dtype, **sources}, options.resume)
    if not (
        first := plan.weights(0)
    ).exists():  # the first generation, once: what comes later begins with no other weights
        from gpuinfer.models.load import write_weights

        write_weights(spec, common.seed, first)
    ended, error = "failed", None
    try:
        ended = _follow(plan, common.verbose > 0, common.quiet, tracking, nodes)
    except (UsageError, WorkError) as caught:
        error = caught
    finally:
        document = loop_summary.loop_document(plan, settings, command, ended)
        if error is None:
            destination.write(document)
        else:
            destination.write_failed(document, error)
        loop_summary.write_loop(plan, document)
        folder.release()
        with tracking:
            tracking.finish(ended, loop_summary.tracked_summary(document, error))
    if document["iterations"]:
        from gpuinfer.cli.screen.display import comparison, show_page

        page, title = loop_summary.loop_page(document, {}), f"loop · {options.game} · {options.model}"
        notes = [("strength", page.verdict), *loop_summary.strength_lines(document)]
        if document["staleness"]:
            notes += [("weights older", f"{loop_summary.staleness_words(document['staleness'])} iterations")]
        notes += [("weights", document["weights"])] if document["weights"] else []
        notes += [("written", f"{options.out}/loop.html, and beside it JSON, Markdown and the plot")]
        show_page(replace(page, notes=notes), title, on_stderr=destination.stdout)
        for table in page.more:
            comparison(table.title, table.columns, table.rows, [], on_stderr=destination.stdout)
    if error is not None:
        raise error
    if ended == "partial":
        return PARTIAL
    score = document["strength"]["score"]
    if options.fail_under is None or score >= options.fail_under:
        return 0
    print(
        f"gpuinfer: --fail-under {options.fail_under:g} does not hold: the last score is {score:.3f}.", file=sys.stderr
    )
    return CHECK_FAILED


def _network(options: LoopOptions, seed: int) -> tuple[ModelSpec, dict[str, Any]]:
    """The network that learns; and digests of its source and the game's rules. Raises `UsageError` where there is none,
    and for whatever self-play refuses.
    """
    given = {name: value for name in GAME if (value := getattr(options, name)) is not None}
    workload = registry.load("workloads", "selfplay")
    given |= {name: getattr(options, name) for name in ("game", "model", "weights", *OF_GAMES)}
    made = blame.make(workload, Setup(seed=seed), given)
    spec: ModelSpec | None = made.model()
    if spec is None:
        raise UsageError(f"--model {options.model} is no network, and has nothing to learn. Name one, such as blobnet.")
    deciding = made.deciding_settings()
    return spec, {name: deciding[name] for name in ("rules", "network", "opponent_network")}


def _refuse_what_training_refuses(plan: LoopPlan, spec: ModelSpec, merged: Settings, device: str) -> None:
    """Now, and not after the games of the first iteration. Raises `UsageError`."""
    from gpuinfer.cli.building import merge, served, setup_of

    if merged.common.dtype == "float16":
        raise UsageError(
            "--dtype float16: gradients vanish in it. Use bfloat16, which has the range of float32, or float32."
        )
    given = {"records": [str(plan.folder)], "out": plan.folder, "steps": plan.training_steps, "config": merged.file}
    given |= {name: getattr(plan, name) for name in ("model", "batch_size", "learning_rate")}
    settings = merge("train", {**given, "backend": "inprocess", "device": device, "dtype": merged.common.dtype})
    workload = registry.load("workloads", "train")
    blame.make(workload, Setup(seed=plan.seed), settings.options("workloads", "train", workload))
    served("train", replace(setup_of(settings.common), model=replace(spec, kind="gradients")), settings)


def _one_of(devices: Sequence[str]) -> str:
    """The device that trains, where none is named for it."""
    return next((one for one in devices if one != "all"), "auto")


def _nodes(options: LoopOptions, plan: LoopPlan, merged: Settings) -> ClusterGames | None:
    """What plays the games on nodes; None where our own commands do. Raises `UsageError` for what cannot be."""
    common = merged.common
    if options.max_staleness is not None and not options.asynchronous:
        raise UsageError(f"--max-staleness {options.max_staleness}: weights are never older. Add --asynchronous.")
    if common.launcher is None:
        if unused := next((flag for flag in ("asynchronous",) if getattr(options, flag)), None):
            raise UsageError(f"--{unused} applies to games on nodes only. Add --launcher NAME, or leave it out.")
        return None
    if common.backend != "central" and options.workers != 0:
        raise UsageError(
            f"--launcher {common.launcher}: worker processes of --backend {common.backend} have a model of their own, "
            "which new weights do not reach. Add --backend central, which is one server on each node."
        )
    import msgspec

    from gpuinfer.cli.building import around, setup_of
    from gpuinfer.cli.cluster_run import job_of, nodes_plan
    from gpuinfer.lab.loop.cluster_games import ClusterGames

    workload = registry.load("workloads", "selfplay")
    given = {name: value for name in (*GAME, *PLAY) if (value := getattr(options, name)) is not None}
    given |= {name: getattr(options, name) for name in ("game", "model", "temperature_moves")}
    given |= {name: value for name in ("resign", "resign_check") if (value := getattr(options, name)) is not None}

    def of_iteration(iteration: int) -> Workload:
        """Self-play up to the end of this iteration, with its folder."""
        own = {"games": iteration * plan.games, "out": plan.of(iteration) / "games", "resume": True}
        made: Workload = blame.make(workload, setup_of(common), {**given, **own})
        return made

    def records_of(iteration: int) -> Division:
        division = of_iteration(iteration).division()
        division.first = (iteration - 1) * plan.games
        return division

    whole = of_iteration(plan.iterations)
    job = job_of("selfplay", around("selfplay", whole, merged), merged)
    return ClusterGames(
        plan,
        records_of=records_of,
        settings=lambda: whole.deciding(""),
        job=msgspec.structs.replace(job, roofline=False),
        nodes=nodes_plan(merged),
        max_staleness=(options.max_staleness or STALENESS) if options.asynchronous else 0,
    )


def _plan(options: LoopOptions, folder: Path, merged: Settings, backend_options: Sequence[str]) -> LoopPlan:
    from gpuinfer.lab.loop.loop_runner import LoopPlan

    common = merged.common
    play = [f"--game={options.game}"]
    play += [f"{flags.flag(name)}={value}" for name in PLAY if (value := getattr(options, name)) is not None]
    play += [f"--device={common.device}", f"--backend={common.backend}"]
    play += [word for one in backend_options for word in ("-B", one)]
    training = [f"--device={options.training_device or _one_of(common.devices)}", "--backend=inprocess"]
    everyone = ["--no-roofline", "--no-trial", "--no-live", "--track=none", f"--dtype={common.dtype}"]
    everyone += [f"--config={merged.file}"] if merged.file is not None else []
    everyone += ["--quiet"] if not common.verbose else []
    names = (
        "model",
        "iterations",
        "games",
        "temperature_moves",
        "window",
        "training_steps",
        "batch_size",
        "learning_rate",
    )
    return LoopPlan(
        folder=folder,
        **{name: getattr(options, name) for name in (*names, "evaluation_games", "evaluate_every")},
        seed=common.seed,
        resign=options.resign,
        resign_check=options.resign_check,
        gate=options.gate,
        gate_games=options.gate_games or GATE_GAMES,
        play=play,
        training=training,
        common=everyone,
    )


def _follow(plan: LoopPlan, verbose: bool, quiet: bool, tracking: Tracking, nodes: ClusterGames | None = None) -> str:
    """All steps; how they ended: done or partial."""
    from gpuinfer.cli.comparison_progress import interruptible
    from gpuinfer.lab.loop.loop_figures import LossFollower, step_figures
    from gpuinfer.lab.loop.loop_runner import run_loop
    from gpuinfer.lab.loop.loop_times import LoopTimes, times_line

    tracking.start()
    losses = LossFollower(plan, tracking.log if tracking.wanted else None)
    line, times = _Line(replaced=not verbose and sys.stderr.isatty()), LoopTimes(plan)

    def say(step: LoopStep, what: str, end: str = "\n") -> None:
        if not quiet:
            seconds = times.seconds_left()
            rest = f" · {left_until(seconds)}" if seconds else ""
            line.say(f"iteration {step.iteration} of {plan.iterations} · {what}{rest}", end)

    def ended(step: LoopStep, report: Report, seconds: float) -> None:
        times.ended(step, seconds)
        losses.ended(step)
        if nodes is not None:
            nodes.step_ended(step)
        tracking.log(step.iteration, step_figures(step, report, plan.has_won(step.iteration)))
        won = f": it {'plays from now on' if plan.has_won(step.iteration) else 'does not play'}"
        say(step, _told(step, report, seconds) + (won if step.kind == "gate" else ""))
        if step.kind == plan.kinds(step.iteration)[-1] and (time := times.document()) is not None and not quiet:
            line.say(f"  an iteration: {times_line(time)} · {time['projection']}", "\n")

    def began(step: LoopStep) -> None:
        losses.began(step)
        if verbose:
            say(step, f"{step.kind} …")
        elif line.replaced:
            say(step, f"{step.kind} … (tail -f {shlex.quote(str(step.log))})", end="")

    try:
        with interruptible(), line, losses, nodes or contextlib.nullcontext():
            run_loop(plan.steps(), verbose, began, ended, games=None if nodes is None else nodes.games)
    except KeyboardInterrupt:
        print("gpuinfer: stopped, and what is finished is kept. The same with --resume goes on.", file=sys.stderr)
        return "partial"
    return "done"


class _Line(contextlib.AbstractContextManager["_Line"]):
    """Lines on standard error; on a terminal, what is under way gives place to what has come of it."""

    def __init__(self, replaced: bool) -> None:
        self.replaced = replaced
        self._open = False

    def say(self, text: str, end: str) -> None:
        print("\r\x1b[K" * self._open + text, end=end, file=sys.stderr, flush=True)
        self._open = not end

    def __exit__(self, *_: object) -> None:
        if self._open:
            print(file=sys.stderr)


def _told(step: LoopStep, report: Report, seconds: float) -> str:
    """What came of a step, in a line."""
    from gpuinfer.lab.loop.loop_summary import final_loss
    from gpuinfer.report.game_statistics import in_elo, in_score, in_share

    said = f"{step.kind} in {duration(seconds)}"
    if step.kind == "training":
        loss = final_loss(report)
        return said if loss is None else f"{said}: loss {number(loss)}"
    if step.kind == "games":
        said = f"{said}: {whole(report['progress']['done'])}"
        if (found := report.get("resignation")) is not None:
            said += f", {in_share(found)} resigned" + (f"\n  {found['advice']}" if found["advice"] else "")
        return said
    strength = report["strength"]
    against = "the first generation" if step.kind == "match" else "the network that plays"
    return f"{said}: {in_score(strength)}, {in_elo(strength)} over {against}"


app = flags.command(NAME, flags.of(LoopOptions, NAME), COMMON, TEXT, execute)
