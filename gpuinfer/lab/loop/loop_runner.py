"""What a loop does, step by step: for each the command, the folder that it goes on with, and the report that it leaves.

DIR/first.safetensors                    the first generation: untrained weights, or those of --weights
DIR/iteration-003/games                  records of self-play, with the weights of iteration 2; games.json its report
DIR/iteration-003/training               weights.safetensors, from the games of the last iterations; training.json
DIR/iteration-003/gate                   games against the network that plays, where the new one has to win; gate.json
DIR/iteration-003/match                  games of the network that plays against the first generation; match.json

A loop on its way: one command after the other, each in a process of its own, none twice.

A step's report is written at once when all of it is done, and a step that was stopped goes on with what lies in its
folder. So whatever is killed when, the next run does what is left and nothing else. A command ends with this process.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host import children
from gpuinfer.report import plotting

FIRST, WEIGHTS = "first.safetensors", "weights.safetensors"

Kind = Literal["games", "training", "gate", "match"]
KINDS: tuple[Kind, ...] = ("games", "training", "gate", "match")

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LoopStep:
    """One command. It is done once its report is there and says so."""

    kind: Kind
    iteration: int  # from 1
    words: Sequence[str]  # of the command line, after `gpuinfer`
    report: Path

    @property
    def log(self) -> Path:
        """What it says meanwhile."""
        return self.report.with_suffix(".log")


def done_report(path: Path) -> Report | None:
    """What a step has left; None where it is not done."""
    try:
        report = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return report if isinstance(report, dict) and report.get("status") == "done" else None


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """A loop in `folder`. `common` are words that every command gets, `play` those of self-play alone (what is played
    and how, and on which devices), `training` those of training."""

    folder: Path
    model: str
    iterations: int
    games: int  # of self-play, an iteration
    temperature_moves: int  # of each such game
    window: int  # iterations whose games are learnt from
    training_steps: int
    batch_size: int
    learning_rate: float
    evaluation_games: int
    evaluate_every: int  # iterations; 0: after the last one alone
    seed: int
    resign: float | None = None  # in self-play alone: a match is to say who wins
    resign_check: float | None = None
    gate: float | None = None  # the score at which a new network becomes the one that plays; None: each one does
    gate_games: int = 0
    play: Sequence[str] = ()
    training: Sequence[str] = ()
    common: Sequence[str] = ()

    def of(self, iteration: int) -> Path:
        return self.folder / f"iteration-{iteration:03d}"

    def weights(self, iteration: int) -> Path:
        """Those that an iteration has come to; of 0, the first generation's."""
        return self.folder / FIRST if iteration == 0 else self.of(iteration) / "training" / WEIGHTS

    def curve(self, iteration: int) -> Path:
        """Where its training says what the loss of each step was."""
        return self.of(iteration) / "training" / plotting.LOSS_FILE

    def playing(self, iteration: int) -> int:
        """The iteration whose network plays after this one: the newest that has won its gate, 0 for the first
        generation. Known once the gates up to here are done.
        """
        if self.gate is None:
            return iteration
        return next((one for one in range(iteration, 0, -1) if self.has_won(one)), 0)

    def has_won(self, iteration: int) -> bool:
        """Whether its network has won its gate."""
        report = done_report(self.of(iteration) / "gate.json")
        return self.gate is not None and report is not None and float(report["strength"]["score"]) >= self.gate

    def steps(self) -> Iterator[LoopStep]:
        """All that is to be done, in order. What a step is asked may depend on the gates before it: take one after the
        other.
        """
        for iteration in range(1, self.iterations + 1):
            yield from (self.step(kind, iteration) for kind in self.kinds(iteration))

    def kinds(self, iteration: int) -> list[Kind]:
        """Of the steps of an iteration, in order."""
        every = self.evaluate_every
        evaluated = iteration == self.iterations or bool(every and iteration % every == 0)
        left_out = {"gate": self.gate is None, "match": not evaluated}
        return [kind for kind in KINDS if not left_out.get(kind)]

    def step(self, kind: Kind, iteration: int) -> LoopStep:
        """One command. Training goes on from the network that was trained last, whether it has won or not, as AlphaGo
        Zero (Silver et al. 2017); each iteration plays other games, and each match has the same deals: what changes
        from one to the next is the network.
        """
        report = self.of(iteration) / f"{kind}.json"
        flags: dict[str, Any] = {"model": self.model, "out": report.with_suffix(""), "json": report}
        more: list[str] = []
        if kind == "training":
            flags |= {
                "weights": self.weights(iteration - 1),
                "steps": self.training_steps,
                "batch-size": self.batch_size,
                "learning-rate": f"{self.learning_rate:g}",
                "seed": self.seed + iteration,
            }
            window = range(max(1, iteration - self.window + 1), iteration + 1)
            more = [f"--records={self.of(one) / 'games'}" for one in window]
            more += ["--no-picture"]  # the loop draws one of all iterations
        elif kind == "games":
            flags |= {
                "weights": self.weights(self.playing(iteration - 1)),
                "games": self.games,
                "temperature-moves": self.temperature_moves,
                "seed": self.seed + iteration,
                "resign": self.resign,
                "resign-check": self.resign_check,
            }
        else:
            gate = kind == "gate"
            flags |= {
                "weights": self.weights(iteration if gate else self.playing(iteration)),
                "opponent-model": self.model,
                "opponent-weights": self.weights(self.playing(iteration - 1) if gate else 0),
                "games": self.gate_games if gate else self.evaluation_games,
                "noise": 0,
                "seed": self.seed + iteration if gate else self.seed,
            }
        command = ["train", *self.training] if kind == "training" else ["selfplay", *self.play]
        command += [f"--{name}={value}" for name, value in flags.items() if value is not None]
        return LoopStep(kind, iteration, [*command, *more, "--resume", *self.common], report)


STOP_S = 60.0  # for a command to keep what is finished, once it is asked to stop
USAGE, PARTIAL = 2, 3  # exit codes
MARGIN = "gpuinfer: "


def step_seconds(report: Report) -> float:
    """All of the command's last run: getting ready and working. Of games on nodes, during which training and matches
    go on: how long the loop has waited for them.
    """
    return float(report.get("waited_s", float(report["setup_s"]) + float(report["wall_s"])))


def run_step(step: LoopStep, program: Sequence[str], verbose: bool) -> Report:
    """Do what is left of a step: `program` and the step's words. Its report.

    The command holds our standard input's other end, and leaves when we do (`host/children.py`). Raises `UsageError`
    for what it refuses, `WorkError` when it fails, and `KeyboardInterrupt` when it was stopped, by us or by itself.
    """
    step.report.parent.mkdir(parents=True, exist_ok=True)
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "start_new_session": True}
    with step.log.open("ab") as log:
        begins = log.tell()
        streams |= {"stdout": subprocess.DEVNULL, "stderr": None} if verbose else {"stdout": log, "stderr": log}
        with subprocess.Popen([*program, *step.words], **streams) as process:
            try:
                code = process.wait()
            except KeyboardInterrupt:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
                    process.wait(STOP_S)
                raise
            finally:
                children.kill_program(process)
    if code == 0 and (report := done_report(step.report)) is not None:
        return report
    if code == PARTIAL:
        raise KeyboardInterrupt
    output = b""
    with contextlib.suppress(OSError):
        output = b"" if verbose else step.log.read_bytes()[begins:]
    raise _failure(step, code, output.decode("utf-8", "replace"))


def _failure(step: LoopStep, code: int, output: str) -> Exception:
    """What to raise for a command that ended with this code, after this output."""
    what = f"{step.kind} of iteration {step.iteration}"
    lines = output.strip().splitlines()
    begins = max((at for at, line in enumerate(lines) if line.startswith(MARGIN)), default=None)
    complaint = "\n".join(line.removeprefix(MARGIN).strip() for line in lines[begins:]) if begins is not None else ""
    if code == USAGE and complaint:
        return UsageError(f"{what}: {complaint}")
    if code < 0:
        complaint = f"it was ended by {signal.Signals(-code).name} (out of memory?)."
    after = f"The whole of it: {step.log}. What is finished is kept: the same command with --resume goes on."
    return WorkError(f"{what} failed: {complaint or f'it ended with code {code}.'}\n{after}")


def run_loop(
    steps: Iterable[LoopStep],
    verbose: bool,
    began: Callable[[LoopStep], None],
    ended: Callable[[LoopStep, Report, float], None],
    program: Sequence[str] = (sys.executable, "-m", "gpuinfer.lab.loop.loop_child"),
    *,
    games: Callable[[LoopStep], Report | None] | None = None,
) -> None:
    """All steps that are not done. `ended` gets the seconds that each took. `games` waits for those of self-play, where
    others than our commands play them: the report, None where they were there before. Raises what `run_step` does.
    """
    for step in steps:
        start = time.monotonic()
        if step.kind == "games" and games is not None:
            began(step)
            done = games(step)
            if done is None:
                continue
        elif done_report(step.report) is not None:
            continue
        else:
            began(step)
            done = run_step(step, program, verbose)
        ended(step, done, time.monotonic() - start)
