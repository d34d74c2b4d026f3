"""Generators side by side: our own and other people's, each in a child process, at several batch sizes, in turn.

`sequential` asks our own for one prompt at a time, `batched` for all of them at once; both are one child. Only one
child is at work at a time, and it is at rest before the next one is asked.

The prompts of a comparison of generators, as tokens: each run gets its own, and all generators the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from gpuinfer.api import Progress, Setup
from gpuinfer.errors import BadPrompt, UsageError, WorkError
from gpuinfer.generation import Unmasking
from gpuinfer.lab.bench.measurement import Variant, reason
from gpuinfer.lab.bench.series import Measured, SeriesOutcome, SeriesPlan
from gpuinfer.lab.peers.peer_process import PROGRAMS, PeerProcess, Ran, python_of
from gpuinfer.report import report
from gpuinfer.runtime.run import RunPlan
from gpuinfer.serving.openai.prompt_rows import prompts_of
from gpuinfer.stats import Snapshot

SHORTEST, LONGEST = 8, 24  # tokens of a prompt that is drawn


@dataclass(frozen=True)
class DrawnPrompts:
    """Random tokens, new in every run: no generator gains from a cache of earlier ones."""

    vocabulary: int
    end_tokens: tuple[int, ...]
    seed: int
    shortest: int = SHORTEST
    longest: int = LONGEST
    alike: int = 0  # of these tokens, those with which all prompts of a run begin

    def of(self, repeat: int, count: int) -> list[list[int]]:
        import numpy as np

        random = np.random.default_rng([self.seed, repeat, count])
        usable = np.setdiff1d(np.arange(self.vocabulary), self.end_tokens)
        lengths = random.integers(self.shortest, self.longest + 1, count) - self.alike
        beginning = random.choice(usable, self.alike).tolist()
        return [beginning + random.choice(usable, length).tolist() for length in lengths]


@dataclass(frozen=True)
class FilePrompts:
    """Those of a file, in its order: a run goes on where the last one of its batch size ended, and where the file ends
    it begins again.
    """

    tokens: Sequence[Sequence[int]]

    @property
    def longest(self) -> int:
        return max(map(len, self.tokens))

    def of(self, repeat: int, count: int) -> list[list[int]]:
        start = repeat * count
        return [list(self.tokens[(start + number) % len(self.tokens)]) for number in range(count)]


Prompts = DrawnPrompts | FilePrompts


def prompts_from_file(path: Path, language: Any, most: int) -> FilePrompts:
    """The first `most` rows of a file such as `generate` takes. Raises `UsageError` for what cannot be a prompt."""
    rows = list(islice(prompts_of(path, "--prompts", strict=False), most))
    if not rows:
        raise UsageError(f"--prompts {path} holds no prompts. Give one JSON object a line.")
    tokens = language.encode(rows)
    for number, one in enumerate(tokens, 1):
        if isinstance(one, BadPrompt):
            raise UsageError(f"--prompts {path}, row {number}: {one}")
    return FilePrompts([one.tolist() for one in tokens])


def needed(sequences: int, repeats: int) -> int:
    """How many rows of a file all runs of so many sequences take, and the warm-up, which has its own where there are
    enough.
    """
    return sequences * (repeats + 1)


METRIC = "output_tokens_per_s"
SEQUENTIAL = "sequential"
ONE_BY_ONE = 4  # prompts of a run of `sequential`: its speed does not depend on how many there are
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class GeneratorCell:
    """One generator at one batch size."""

    generator: str
    batch_size: int

    @property
    def name(self) -> str:
        return SEQUENTIAL if self.generator == SEQUENTIAL else f"{self.generator}, batch size {self.batch_size}"

    def prompts(self, sequences: int | None) -> int:
        """Of a run, in all: `sequences`, else one batch, or a few one by one."""
        return sequences or (ONE_BY_ONE if self.generator == SEQUENTIAL else self.batch_size)


@dataclass(frozen=True)
class Contest:
    """What all of them do."""

    model: str  # for our own
    names: Sequence[str]
    batch_sizes: Sequence[int]
    new_tokens: int
    prompts: Prompts
    setup: Setup  # device, number format, seed
    folder: Path | None = None  # the model for the others, a Hugging Face folder; None: they cannot read it
    weights: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    unmasking: Unmasking | None = None  # of a diffusion model, for our own
    pythons: Mapping[str, str] = field(default_factory=dict)  # where a peer has one of its own
    command: str = "gpuinfer"  # what a cell's own flags are appended to
    sequences: int | None = None  # of a run; None: as many as its batch size

    @property
    def length(self) -> int:
        """Positions that a row needs."""
        return self.prompts.longest + self.new_tokens

    def cells(self) -> Iterator[GeneratorCell]:
        """Those of one batch size side by side."""
        for batch_size in self.batch_sizes:
            for name in self.names:
                if name != SEQUENTIAL:
                    yield GeneratorCell(name, batch_size)
                elif batch_size == self.batch_sizes[0]:
                    yield GeneratorCell(name, 1)

    def order(self, name: str) -> dict[str, Any]:
        """What its child is to load."""
        ours = PROGRAMS[name].ours
        return {
            "model": self.model if ours else str(self.folder),
            "weights": self.weights,
            "arguments": dict(self.arguments),
            "unmasking": msgspec.to_builtins(self.unmasking) if ours else None,
            "dtype": self.setup.dtype,
            "device": self.setup.device,
            "seed": self.setup.seed,
            "rows": max(self.batch_sizes),
            "length": self.length,
        }


class Generators:
    """Runs every cell as often as the plan says. A generator that cannot be had is left out and harms no other."""

    def __init__(
        self, work: Contest, series_plan: SeriesPlan, logs: Path, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self.outcome = SeriesOutcome([])
        self.versions: dict[str, str] = {}
        self._work, self._plan, self._logs, self._say = work, series_plan, logs, say
        self._children: dict[str, PeerProcess] = {}

    def run(self) -> SeriesOutcome:
        """All runs, or those until the user stops it: Ctrl-C, SIGTERM."""
        with ExitStack() as ends:
            try:
                for name in self._work.names:
                    self._load(name, ends)
                cells = [cell for cell in self._work.cells() if cell.generator in self._children]
                self.outcome.variants = [cell_variant(cell, self._work) for cell in cells]
                self._say("warming up")
                tokens = min(WARM_UP_TOKENS, self._work.new_tokens)
                for one in cells:
                    try:
                        self._ask(one, self._work.prompts.of(self._plan.repeats, one.prompts(None)), tokens)
                    except WorkError as error:
                        self.outcome.failed[one.name] = f"warming up: {reason(error)}"
                for repeat in range(self._plan.repeats):
                    for cell in cells:
                        self._measure(cell, repeat)
            except KeyboardInterrupt:
                self.outcome.stopped = True
        return self.outcome

    def _load(self, name: str, ends: ExitStack) -> None:
        """Start its child; sequential and batched share one."""
        program = PROGRAMS[name]
        for other, child in self._children.items():
            if PROGRAMS[other] is program:
                self._children[name], self.versions[name] = child, self.versions[other]
                return
        if self._work.folder is None and not program.ours:
            self.outcome.skipped[name] = f"{name} reads folders of Hugging Face, and this model is none"
            return
        self._say(f"{name}: loading the model")
        try:
            child = PeerProcess(
                program.package, program.command(python_of(name, self._work.pythons)), self._logs / f"{name}.log"
            )
            ends.callback(child.close)
            self.versions[name] = child.load(self._work.order(name))
            self._children[name] = child
        except WorkError as error:
            why = reason(error).removeprefix(f"{program.package}: ").rstrip(".")
            cure = f" Install it (pip install {program.package}), or name a Python that has it: --python {name}=PATH."
            self.outcome.skipped[name] = f"{why}." + ("" if program.ours else cure)

    def _measure(self, cell: GeneratorCell, repeat: int) -> None:
        if cell.name in self.outcome.failed:
            return
        doing = f"repeat {repeat + 1} of {self._plan.repeats}"
        prompts = self._work.prompts.of(repeat, cell.prompts(self._work.sequences))
        try:
            ran = self._ask(cell, prompts, self._work.new_tokens)
        except WorkError as error:
            self.outcome.failed[cell.name] = f"{doing}: {reason(error)}"
            return
        self._say(f"{cell.name} · {doing}: {ran.tokens / ran.seconds:,.0f} tokens/s")
        self.outcome.runs.append(measured_cell(cell, repeat, prompts, ran, self._work))

    def _ask(self, cell: GeneratorCell, prompts: list[list[int]], new_tokens: int) -> Ran:
        child = self._children[cell.generator]
        ran = child.run(prompts, new_tokens, at_once=cell.batch_size)
        child.rest()
        return ran


def cell_variant(cell: GeneratorCell, work: Contest) -> Variant:
    """The cell as something to compare. It is no run of ours, so nothing builds it."""

    def build(seed: int) -> RunPlan:
        raise NotImplementedError(cell.name)

    settings = {"generator": cell.generator, "batch_size": str(cell.batch_size)}
    return Variant(cell.name, build, settings, cell_command(cell, work))


def cell_command(cell: GeneratorCell, work: Contest) -> str:
    """What runs this cell by itself."""
    if not PROGRAMS[cell.generator].ours:
        more = "" if work.sequences is None else f" --num-sequences {work.sequences}"
        return f"gpuinfer bench generate{work.command} --compare {cell.generator} --batch-sizes {cell.batch_size}{more}"
    return (
        f"gpuinfer generate{work.command} --input FILE --batch-size {cell.batch_size} "
        f"--max-new-tokens {work.new_tokens} --temperature 0 --ignore-eos"
    )


def measured_cell(
    cell: GeneratorCell, repeat: int, prompts: Sequence[Sequence[int]], ran: Ran, work: Contest
) -> Measured:
    """One run of a cell."""
    settings = {"generator": cell.generator, "batch_size": cell.batch_size, "new_tokens": work.new_tokens}
    return measured_generation(cell.name, repeat, prompts, ran, work.setup, cell.generator, settings)


def measured_generation(
    name: str,
    repeat: int,
    prompts: Sequence[Sequence[int]],
    ran: Ran,
    setup: Setup,
    backend: str,
    settings: Mapping[str, Any],
) -> Measured:
    """One run, with a report of as much as is known of it."""
    counts = {"input_tokens": float(sum(map(len, prompts))), "output_tokens": float(ran.tokens)}
    made = report.build(
        report.Run(
            workload="generate",
            backend=backend,
            strategy="none",
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            setup_s=0.0,
            wall_s=ran.seconds,
            status="done",
            setup=setup,
            snapshot=Snapshot(),
            progress=Progress(len(prompts), len(prompts), "rows", counts=counts),
            settings=settings,
        )
    )
    rows_per_s = len(prompts) / ran.seconds
    return Measured(name, repeat, setup.seed, METRIC, ran.tokens / ran.seconds, made, rows_per_s)
