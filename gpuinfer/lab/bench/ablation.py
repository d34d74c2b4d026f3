"""What each part of fast generation brings by itself: the whole, and the whole without one part, in turns.

Each run has a child process of its own, so that one model is in memory at a time. Prompts begin alike, and answers are
drawn, as of thousands of matches that are continued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpuinfer.api import Setup
from gpuinfer.errors import WorkError
from gpuinfer.lab.bench.comparison import NOISE_UNKNOWN
from gpuinfer.lab.bench.generators import (
    METRIC,
    WARM_UP_TOKENS,
    DrawnPrompts,
    Prompts,
    measured_generation,
)
from gpuinfer.lab.bench.measurement import Variant, interval, ratio, reason
from gpuinfer.lab.bench.series import SeriesOutcome, SeriesPlan
from gpuinfer.lab.peers.peer_process import OURS, PeerProcess, Ran
from gpuinfer.runtime.run import RunPlan
from gpuinfer.text.transformer import PAGE

WHOLE = "whole"
BATCH_SIZE, NEW_TOKENS = 8, 32
PROMPT_TOKENS, ALIKE = 64, 48  # of a drawn prompt: all, and those that all prompts begin with
DRAWING = {"temperature": 0.8, "top_k": 200}  # as nanoGPT's sample.py draws


@dataclass(frozen=True)
class OptimizationPart:
    """A part of the whole: how it is switched off, and why it cannot be, where it is not at work here.

    `order`: the fields of its child's order that differ from the whole's; `at_once`: prompts under way, None for all.
    """

    name: str
    means: str  # with it, and without
    order: Mapping[str, Any] = field(default_factory=dict)
    at_once: int | None = None
    absent: str = ""


@dataclass(frozen=True)
class Facts:
    """What decides which parts are at work."""

    device: str  # cpu, or cuda
    cores: int
    kernels: bool  # of our own, for this model in its number format
    dtype: str
    options: Mapping[str, Any]  # of the backend, as they were passed
    batch_size: int
    alike: int  # tokens that two prompts begin with, at most


def optimization_parts(facts: Facts) -> list[OptimizationPart]:
    """All parts, in the order of the table."""
    options, on_cuda = facts.options, facts.device == "cuda"
    rounded, mode = options.get("weights"), options.get("compile")
    threads = options.get("threads") or facts.cores
    plain = (
        "" if facts.dtype != "float32" or rounded else "float32 throughout: add --dtype bfloat16, or -B weights=int8"
    )
    if mode:
        compiled = OptimizationPart(
            "compile", "torch.compile → torch's operations", {"options": {"compile": False}, "without": ["kernels"]}
        )
    else:
        absent = "" if facts.kernels else "torch computes this model here: add -B compile=true"
        compiled = OptimizationPart(
            "compile", "kernels of our own → torch's operations", {"without": ["kernels"]}, absent=absent
        )
    one_core = "the device computes" if on_cuda else "one thread computes" if threads < 2 else ""
    graphs = "a CPU has no CUDA graphs" if not on_cuda else "-B graphs=false" if not options.get("graphs", True) else ""
    return [
        OptimizationPart("KV cache", "kept → all tokens computed anew for each", {"without": ["prefixes", "kv"]}),
        OptimizationPart(
            "prefix cache",
            "beginnings computed once → for each prompt",
            {"without": ["prefixes"]},
            absent="" if facts.alike >= PAGE else f"no two prompts begin with the same {PAGE} tokens",
        ),
        OptimizationPart(
            "batch",
            f"{facts.batch_size} rows at once → one",
            at_once=1,
            absent="" if facts.batch_size > 1 else "one row at once: give --batch-sizes 8",
        ),
        compiled,
        OptimizationPart(
            "graphs", "a step is one CUDA graph → kernel by kernel", {"options": {"graphs": False}}, absent=graphs
        ),
        OptimizationPart("threads", f"{threads} → 1", {"options": {"threads": 1}}, absent=one_core),
        OptimizationPart(
            "dtype",
            f"{rounded or facts.dtype} → float32",
            {"dtype": "float32", "options": {"weights": None}},
            absent=plain,
        ),
        OptimizationPart("sampling", "compiled → torch's operations", {"without": ["sampling"]}),
    ]


@dataclass(frozen=True)
class Ablation:
    """What all runs do."""

    order: Mapping[str, Any]  # what a child is to load
    parts: Sequence[OptimizationPart]
    prompts: Prompts
    batch_size: int
    sequences: int  # of a run
    new_tokens: int
    setup: Setup
    python: str
    command: str  # that repeats this

    def cells(self) -> Iterator[OptimizationPart]:
        """The whole, and it without each part that is at work."""
        yield OptimizationPart(WHOLE, "")
        yield from (part for part in self.parts if not part.absent)


class AblationRuns:
    """Runs every cell as often as the plan says, in turns. One that fails harms no other."""

    def __init__(self, work: Ablation, plan: SeriesPlan, logs: Path, say: Callable[[str], None]) -> None:
        self.outcome = SeriesOutcome([])
        self._work, self._plan, self._logs, self._say = work, plan, logs, say

    def run(self) -> SeriesOutcome:
        """All runs, or those until the user stops it: Ctrl-C, SIGTERM."""
        cells = list(self._work.cells())
        self.outcome.variants = [_variant(cell, self._work) for cell in cells]
        try:
            for repeat in range(self._plan.repeats):
                for cell in cells:
                    self._measure(cell, repeat)
        except KeyboardInterrupt:
            self.outcome.stopped = True
        return self.outcome

    def _measure(self, cell: OptimizationPart, repeat: int) -> None:
        work, name = self._work, variant_name(cell)
        if name in self.outcome.failed:
            return
        doing = f"repeat {repeat + 1} of {self._plan.repeats}"
        prompts = work.prompts.of(repeat, work.sequences)
        try:
            ran = self._ran(cell, prompts, repeat)
        except WorkError as error:
            self.outcome.failed[name] = f"{doing}: {reason(error)}"
            return
        self._say(f"{name} · {doing}: {ran.tokens / ran.seconds:,.1f} tokens/s")
        settings = {"part": cell.name, "batch_size": work.batch_size, "new_tokens": work.new_tokens}
        self.outcome.runs.append(measured_generation(name, repeat, prompts, ran, work.setup, "inprocess", settings))

    def _ran(self, cell: OptimizationPart, prompts: list[list[int]], repeat: int) -> Ran:
        """Load the model in a child of its own, warm it up with other prompts, and run."""
        work = self._work
        options = {**work.order["options"], **cell.order.get("options", {})}
        at_once = cell.at_once or work.batch_size
        child = PeerProcess(OURS.package, OURS.command(work.python), self._logs / f"{variant_name(cell)}.log")
        try:
            child.load({**work.order, **cell.order, "options": options})
            warming = work.prompts.of(self._plan.repeats + repeat, min(at_once, len(prompts)))
            child.run(warming, min(WARM_UP_TOKENS, work.new_tokens), at_once)
            child.rest()
            return child.run(prompts, work.new_tokens, at_once)
        finally:
            child.close()


def variant_name(part: OptimizationPart) -> str:
    return WHOLE if part.name == WHOLE else f"without {part.name}"


def _variant(cell: OptimizationPart, work: Ablation) -> Variant:
    def build(seed: int) -> RunPlan:
        raise NotImplementedError(cell.name)

    return Variant(variant_name(cell), build, {"part": cell.name}, work.command)


def ablation_document(document: dict[str, Any], work: Ablation, outcome: SeriesOutcome) -> dict[str, Any]:
    """The document of the runs, with what each part brings: the whole's speed over that without it, pair by pair."""
    rates: dict[str, dict[int, float]] = {}
    for one in outcome.runs:
        rates.setdefault(one.variant, {})[one.repeat] = one.rate
    whole = rates.get(WHOLE, {})
    rows = []
    for part in work.parts:
        without = rates.get(variant_name(part), {})
        both = sorted(whole.keys() & without.keys())
        found = ratio([whole[one] for one in both], [without[one] for one in both]) if both else None
        rows.append(
            {
                "part": part.name,
                "means": part.means,
                "without": interval(list(without.values())).median if without else None,
                "brings": found.median if found else None,
                "ci95": found.ends if found else None,
                "why_not": part.absent or outcome.failed.get(variant_name(part)),
            }
        )
    document["ablation"] = {
        "metric": METRIC,
        "whole": interval(list(whole.values())).median if whole else None,
        "ci95": interval(list(whole.values())).ends if whole else None,
        "batch_size": work.batch_size,
        "num_sequences": work.sequences,
        "new_tokens": work.new_tokens,
        "prompt_tokens": work.prompts.longest,
        "parts": rows,
    }
    document["winner"], document["ties"], document["why"] = None, [], ""
    document["command"], document["verdict"] = work.command, _verdict(rows)
    return document


def _verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the parts bring, the most first; and those of which the noise leaves it open."""
    measured = sorted((one for one in rows if one["brings"]), key=lambda one: -one["brings"])
    if not measured:
        return "Nothing was measured that can be compared."
    if any(one["ci95"] is None for one in measured):
        gains = ", ".join(f"{one['part']} {one['brings']:.2f}×" for one in measured)
        return f"Alone, each brought: {gains}; but {NOISE_UNKNOWN}. Add --repeats 3."
    clear = [one for one in measured if not one["ci95"][0] <= 1 <= one["ci95"][1]]
    open_ones = [one["part"] for one in measured if one not in clear]
    gains = ", ".join(f"{one['part']} {one['brings']:.2f}×" for one in clear)
    found = [f"Alone, each brings: {gains}."] if clear else []
    found += [f"The noise leaves open what these bring: {', '.join(open_ones)}."] if open_ones else []
    return " ".join(found)


def drawn_prompts(vocabulary: int, end_tokens: tuple[int, ...], seed: int, room: int) -> DrawnPrompts:
    """Random tokens, `room` at most, new in every run, of which all of a run begin alike."""
    tokens = max(1, min(PROMPT_TOKENS, room))
    alike = ALIKE * tokens // PROMPT_TOKENS
    return DrawnPrompts(vocabulary, end_tokens, seed, tokens, tokens, alike)


def shared_beginning(prompts: Prompts, sequences: int) -> int:
    """The most tokens that two prompts of a run begin with."""
    rows = sorted(prompts.of(0, sequences))
    return max((_common(one, other) for one, other in pairwise(rows)), default=0)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
