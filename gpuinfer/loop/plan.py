"""What a loop does, step by step: for each the command, the folder that it goes on with, and the report that it leaves.

DIR/first.safetensors                    the first generation: weights that nobody has trained, or those given
DIR/iteration-003/games                  records of self-play, with the weights of iteration 2; games.json its report
DIR/iteration-003/training               weights.safetensors, from the games of the last iterations; training.json
DIR/iteration-003/gate                   games against the network that plays, where the new one has to win; gate.json
DIR/iteration-003/match                  games of the network that plays against the first generation; match.json
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpuinfer.report import loss_curve

FIRST, WEIGHTS = "first.safetensors", "weights.safetensors"

Kind = Literal["games", "training", "gate", "match"]
KINDS: tuple[Kind, ...] = ("games", "training", "gate", "match")

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """One command. It is done once its report is there and says so."""

    kind: Kind
    iteration: int  # from 1
    words: Sequence[str]  # of the command line, after `gpuinfer`
    report: Path

    @property
    def log(self) -> Path:
        """What it says meanwhile."""
        return self.report.with_suffix(".log")


def reported(step: Step) -> Report | None:
    """What a step has left; None where it is not done."""
    try:
        report = json.loads(step.report.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return report if isinstance(report, dict) and report.get("status") == "done" else None


@dataclass(frozen=True, slots=True)
class Plan:
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

    @property
    def first(self) -> Path:
        return self.folder / FIRST

    def of(self, iteration: int) -> Path:
        return self.folder / f"iteration-{iteration:03d}"

    def weights(self, iteration: int) -> Path:
        """Those that an iteration has come to; of 0, the first generation's."""
        return self.first if iteration == 0 else self.of(iteration) / "training" / WEIGHTS

    def curve(self, iteration: int) -> Path:
        """Where its training says what the loss of each step was."""
        return self.of(iteration) / "training" / loss_curve.NAME

    def is_evaluated(self, iteration: int) -> bool:
        return iteration == self.iterations or bool(self.evaluate_every and iteration % self.evaluate_every == 0)

    def playing(self, iteration: int) -> int:
        """The iteration whose network plays after this one: the newest that has won its gate, 0 for the first
        generation. Known once the gates up to here are done.
        """
        if self.gate is None:
            return iteration
        return next((one for one in range(iteration, 0, -1) if self.has_won(one)), 0)

    def has_won(self, iteration: int) -> bool:
        """Whether its network has won its gate."""
        report = reported(self._step("gate", iteration, {}))
        return self.gate is not None and report is not None and float(report["strength"]["score"]) >= self.gate

    def steps(self) -> Iterator[Step]:
        """All that is to be done, in order. What a step is asked may depend on the gates before it: take one after the
        other.
        """
        for iteration in range(1, self.iterations + 1):
            for kind in KINDS:
                if (kind != "gate" or self.gate is not None) and (kind != "match" or self.is_evaluated(iteration)):
                    yield self.step(kind, iteration)

    def step(self, kind: Kind, iteration: int) -> Step:
        asked = {"games": self._games, "training": self._training, "gate": self._gate, "match": self._match}
        return self._step(kind, iteration, asked[kind](iteration))

    def _step(self, kind: Kind, iteration: int, words: Mapping[str, Any]) -> Step:
        report = self.of(iteration) / f"{kind}.json"
        command = ["train", *self.training] if kind == "training" else ["selfplay", *self.play]
        everyone = {"model": self.model, "out": report.with_suffix(""), "json": report}
        said = [f"--{name}={value}" for name, value in {**everyone, **words}.items()]
        if kind == "training":
            window = range(max(1, iteration - self.window + 1), iteration + 1)
            said += [f"--records={self.of(one) / 'games'}" for one in window]
            said += ["--no-picture"]  # the loop draws one of all iterations
        return Step(kind, iteration, [*command, *said, "--resume", *self.common], report)

    def _games(self, iteration: int) -> dict[str, Any]:
        """Other games in each iteration: their random numbers begin where no other's do."""
        words = {
            "weights": self.weights(self.playing(iteration - 1)),
            "games": self.games,
            "temperature-moves": self.temperature_moves,
            "seed": self.seed + iteration,
            "resign": self.resign,
            "resign-check": self.resign_check,
        }
        return {name: said for name, said in words.items() if said is not None}

    def _training(self, iteration: int) -> dict[str, Any]:
        """From the network that was trained last, whether it has won or not, as AlphaGo Zero (Silver et al. 2017)."""
        return {
            "weights": self.weights(iteration - 1),
            "steps": self.training_steps,
            "batch-size": self.batch_size,
            "learning-rate": f"{self.learning_rate:g}",
            "seed": self.seed + iteration,
        }

    def _gate(self, iteration: int) -> dict[str, Any]:
        against = self.weights(self.playing(iteration - 1))
        return self._against(against, self.weights(iteration), self.gate_games, self.seed + iteration)

    def _match(self, iteration: int) -> dict[str, Any]:
        """The same deals in each: what changes from one to the next is the network."""
        return self._against(self.first, self.weights(self.playing(iteration)), self.evaluation_games, self.seed)

    def _against(self, opponent: Path, weights: Path, games: int, seed: int) -> dict[str, Any]:
        """Without noise."""
        return {
            "weights": weights,
            "opponent-model": self.model,
            "opponent-weights": opponent,
            "games": games,
            "noise": 0,
            "seed": seed,
        }
