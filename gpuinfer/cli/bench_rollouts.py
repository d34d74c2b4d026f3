"""`gpuinfer bench rollouts`: the cases of rollouts, one after another, and the steps of decoding between tags.

With `--compare` backends or settings of ours are compared as elsewhere, on the same default rollouts.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuinfer.cli import flags
from gpuinfer.cli.comparison_end import comparison_flag, concluded, repeats_flag
from gpuinfer.cli.comparison_progress import ComparisonProgress, interruptible
from gpuinfer.cli.grid import whole_numbers
from gpuinfer.config import registry
from gpuinfer.config.options import out_of_place
from gpuinfer.errors import UsageError, WorkError

if TYPE_CHECKING:
    from gpuinfer.lab.bench.measurement import Variant
    from gpuinfer.lab.bench.series import SeriesOutcome, SeriesPlan
    from gpuinfer.lab.rollouts_bench.recorded_games import RecordedAnswers, RecordedCall
    from gpuinfer.lab.rollouts_bench.rollouts_cases import RolloutsCase, RolloutsVariant, SelectedCases
    from gpuinfer.rollouts.record import Group

TARGET = "rollouts"
DIPLOMACY, ELSE = "diplomacy", "blob-text"  # the environment of the default, where it is installed, and otherwise
DEFAULTS = {"groups": "8", "samples_per_group": "6", "batch_size": "42"}
SHORT = {"horizon": "1", "max_new_tokens": "256", "ignore_eos": "true"}  # of Diplomacy, by a model of random weights
LINE = "begin=\n"  # a model of random weights never says a tag, but a line it does end
REPEATS = 1
NOT_HERE = ("seconds", "warmup", "apply")  # of bench's own flags
TRAINERS = ("trainer_seconds", "listen", "steps")  # flags that bring a trainer: only the case of the buffer has one
GAME, RECORD = "one game", "the record"

Values = Mapping[str, Any]


def rollouts_flags() -> flags.Parameters:
    """The flags of `bench rollouts` alone."""
    from gpuinfer.lab.rollouts_bench.rollouts_cases import CASES

    names = ",".join(CASES)
    return {
        "cases": comparison_flag("cases", str | None, "A,B", f"What to compare. [default: {names}]"),
        "engines": comparison_flag(
            "engines", str, "N,N", "Engines behind a router. [default: 1,2,3,4]", default="1,2,3,4"
        ),
        "depths": comparison_flag("depths", str, "N,N", "Depths of the buffer. [default: 1,2,3,4]", default="1,2,3,4"),
        "processor": comparison_flag(
            "processor", bool, "", "Measure decoding between tags, and nothing else.", default=False
        ),
        "repeats": repeats_flag(REPEATS),
    }


def with_defaults(values: Values) -> dict[str, Any]:
    """The flags of `rollouts`, where none were given those of a run that shows something."""
    found = dict(values)
    if not any(found.get(name) for name in ("model", "checkpoint", "dcp_path")):
        found["model"] = "tiny"
    if found.get("env") is None:
        found["env"] = DIPLOMACY if DIPLOMACY in registry.names("environments") else ELSE
    usual = dict(DEFAULTS)
    if found["env"] == DIPLOMACY and found.get("model") == "tiny":
        usual |= SHORT
        found["env_option"] = found.get("env_option") or [LINE]
    return found | {name: amount for name, amount in usual.items() if found.get(name) is None}


def execute(values: Values, own: Values) -> dict[str, Any]:
    """All cases; the document. Raises `UsageError` when none of them can begin."""
    from gpuinfer.cli.building import merge
    from gpuinfer.cli.comparison_end import refuse_records
    from gpuinfer.cli.grid import parts
    from gpuinfer.cli.workload import log_to_people
    from gpuinfer.lab.rollouts_bench.rollouts_cases import CASES, SelectedCases, named_cases

    if own["processor"]:
        from gpuinfer.cli.building import merge
        from gpuinfer.lab.bench import bench_document
        from gpuinfer.lab.bench.comparison import compare_variants
        from gpuinfer.lab.bench.series import SeriesOutcome, SeriesPlan
        from gpuinfer.lab.rollouts_bench.constraint_speed import measure_constraints
        from gpuinfer.lab.rollouts_bench.rollouts_tables import processor_document

        series_plan = SeriesPlan(
            own["repeats"], None, None, merge(TARGET, values).common.seed, roofline=False, parity=False
        )
        began, nothing = datetime.now(UTC).isoformat(timespec="seconds"), SeriesOutcome([])
        made = bench_document.bench_document(TARGET, nothing, compare_variants(nothing), series_plan, began)
        return processor_document(made, [one.row() for one in measure_constraints()])
    for key in NOT_HERE:
        if own[key]:
            raise UsageError(
                f"{flags.flag(key)} is no part of the cases of rollouts, which run to their end. "
                "Leave it out, or compare backends: --compare inprocess,central."
            )
    refuse_records(TARGET, values)
    makers = named_cases(parts(own["cases"]) if own["cases"] else list(CASES))
    wanted = SelectedCases(
        whole_numbers("engines", own["engines"], 64, "1,2,4"), whole_numbers("depths", own["depths"], 64, "1,2,4")
    )
    values = with_defaults(values)
    common = merge(TARGET, values).common
    log_to_people(common.verbose)
    with tempfile.TemporaryDirectory(prefix="gpuinfer-bench-") as scratch, interruptible():
        cases = Cases(values, common, own["repeats"], Path(scratch))
        cases.begin(recorded=any(make(wanted).after for make in makers))
        wanted = cases.fitted(wanted)
        return cases.run([make(wanted) for make in makers])


@dataclass
class Cases:
    """Runs cases one after another. A case that cannot begin is left out, with a sentence."""

    values: Values
    common: Any
    repeats: int
    scratch: Path
    game: Group | None = None  # one game alone
    recorded: Sequence[RecordedCall] = ()
    said: Mapping[str, RecordedAnswers] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _steps: dict[str, Path] = field(default_factory=dict)  # of each way that has some, those of its last run

    def begin(self, recorded: bool) -> None:
        """Play the whole for its prompts, if they are wanted; then one game for its tokens and its time. What compiles
        does it now.
        """
        from gpuinfer.lab.rollouts_bench.recorded_games import calls, recorded_answers

        if recorded:
            played = self._record(RECORD, {})
            self.recorded, self.said = calls(played), recorded_answers(played)
        groups = self._record(GAME, {"groups": "1", "samples_per_group": "1"})
        self.game = groups[0] if groups else None

    def fitted(self, wanted: SelectedCases) -> SelectedCases:
        """With a trainer that a depth of one cannot keep up with, unless its time was given."""
        from gpuinfer.lab.rollouts_bench.rollouts_cases import STARVED

        if self.common.backend != "fleet":
            wanted = replace(wanted, backend=self.common.backend)
        if (given := self.values.get("trainer_seconds")) is not None:
            return replace(wanted, trainer_s=float(given))
        seconds = wanted.trainer_s if self.game is None else self.game.seconds / STARVED
        return replace(wanted, trainer_s=seconds)

    def _record(self, name: str, changes: Mapping[str, str]) -> list[Group]:
        from gpuinfer.lab.bench.measurement import Rooflines, measure_run
        from gpuinfer.lab.bench.series import RunKind, SeriesStep
        from gpuinfer.lab.rollouts_bench.rollouts_cases import RolloutsVariant
        from gpuinfer.rollouts import files

        folder = self.scratch / f"record{next(self._numbers)}"
        variant = self._variant(name, RolloutsVariant(name, {**changes, "out": str(folder)}))
        with ComparisonProgress(f"bench {TARGET}", self.common).step(SeriesStep(variant, RunKind.WARM_UP)) as watch:
            report = measure_run(variant, self.common.seed, None, Rooflines(False), watch).report
        if report["status"] == "partial":
            raise KeyboardInterrupt
        return list(files.read(folder))

    def run(self, cases: Sequence[RolloutsCase]) -> dict[str, Any]:
        from gpuinfer.lab.bench.series import SeriesPlan
        from gpuinfer.lab.rollouts_bench.rollouts_tables import game_section, rollouts_document, steps_section
        from gpuinfer.rollouts.steps import read_steps

        series_plan = SeriesPlan(self.repeats, None, None, self.common.seed, roofline=False, parity=False)
        found, left_out = [], dict[str, str]()
        for case in cases:
            try:
                document, stopped = self._one(case, series_plan)
            except UsageError as error:
                left_out[case.name] = " ".join(str(error).split())
                continue
            found.append((case, document))
            if stopped:
                break
        if not found:
            raise UsageError("\n".join(["none of these can run here.", *list(left_out.values())[:2]]))
        document = rollouts_document(found, left_out)
        if self.game is not None:
            document["rollouts"]["game"] = game_section(self.game.games[0])
        document["rollouts"]["steps"] = [
            steps_section(name, list(read_steps(path))) for name, path in self._steps.items() if path.exists()
        ]
        return document

    def _one(self, case: RolloutsCase, series_plan: SeriesPlan) -> tuple[dict[str, Any], bool]:
        from gpuinfer.lab.bench.series import Series
        from gpuinfer.lab.rollouts_bench.rollouts_cases import full_name

        began = datetime.now(UTC).isoformat(timespec="seconds")
        progress = ComparisonProgress(f"bench {TARGET}", self.common)
        series = Series([self._variant(full_name(case, way), way) for way in case.ways], series_plan, progress.step)
        progress.watch(series)
        outcome: SeriesOutcome = series.run()
        return concluded(TARGET, outcome, series_plan, began), outcome.stopped

    def _variant(self, name: str, way: RolloutsVariant) -> Variant:
        from gpuinfer.cli.variants import variant, with_choices

        chosen = {(flag, ""): value for flag, value in way.flags.items()}
        chosen |= {("backend_options", key): value for key, value in way.backend.items()}
        alone = {} if way.steps else dict.fromkeys(TRAINERS)
        own = with_choices({**self.values, **alone}, chosen)
        given = {key: value for key, value in own.items() if value is not None}
        own |= dict.fromkeys(out_of_place(registry.load("workloads", TARGET).Options, given))
        made = variant(TARGET, own, {}, timed=False)
        return replace(
            made, name=name, settings={**way.flags, **way.backend}, build=lambda seed: self._build(name, way, own, seed)
        )

    def _build(self, name: str, way: RolloutsVariant, own: Values, seed: int) -> Any:
        """A run of this way, made anew; of a trainer's steps each run has a file."""
        from gpuinfer.cli.building import around, build, merge
        from gpuinfer.lab.rollouts_bench.recorded_games import ForcedReplay, Replay

        more: dict[str, Any] = {"seed": str(self.common.seed if way.led or way.recorded else seed)}
        if way.steps:
            self._steps[name] = self.scratch / f"steps{next(self._numbers)}.jsonl"
            more["steps"] = str(self._steps[name])
        merged = merge(TARGET, {**own, **more})
        plan = build(TARGET, merged)
        if not (way.replayed or way.led):
            return plan
        if not self.recorded:
            raise WorkError("nothing was recorded that could be asked again.")
        if way.led:
            return around(TARGET, ForcedReplay(plan.workload, self.said), merged)
        workload: Any = plan.workload
        replay = Replay(workload.setup, workload.model(), workload.sampling, self.recorded)
        return around(TARGET, replay, merged)
