"""The perplexity of a text: of a model as it is, and as it is with options that change its numbers."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.generation import Generation, Prompt, Sampling
from gpuinfer.lab.presenter import Page, Table
from gpuinfer.lab.verify.probed_answers import IDLE_STEPS
from gpuinfer.lab.verify.verify_setup import VerifyOptions, model_of
from gpuinfer.report.report import environment

if TYPE_CHECKING:
    from gpuinfer.text.generator import Generator
    from gpuinfer.text.text_options import TorchModelOptions

SLOTS = 4  # windows at once
AS_IT_IS = "as it is"
Window = tuple[tuple[int, ...], int]
"""Tokens that go through the model together, and how many of them only come before those that are scored."""


@dataclass(frozen=True, slots=True)
class MeasuredPerplexity:
    """e to the mean negative log-probability of the scored tokens; `weights_bytes` are estimated."""

    name: str
    perplexity: float
    computed_in: str
    weights: str
    weights_bytes: int
    seconds: float


@dataclass
class PerplexityComparison:
    """Measures the model as it is, and with the options in `tuning` that were given, if any were."""

    options: VerifyOptions
    setup: Setup
    tuning: TorchModelOptions
    say: Callable[[str], None] = lambda line: None
    measured: list[MeasuredPerplexity] = field(default_factory=list)
    _facts: dict[str, Any] = field(default_factory=dict)
    _began: str = ""
    _from: float = 0.0

    @property
    def change_percent(self) -> float | None:
        """By how much the options raise the perplexity."""
        if len(self.measured) < 2:
            return None
        before, after = self.measured
        return 100 * (after.perplexity / before.perplexity - 1)

    def run(self) -> None:
        """Raises `UsageError` for a model or a text that has no perplexity, `WorkError` when the work fails."""
        from gpuinfer.text.generator.setup import checked_context
        from gpuinfer.text.language import open_language
        from gpuinfer.text.text_options import TorchModelOptions

        self._began, self._from = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
        spec, checkpoint = model_of(self.options)
        if checkpoint.shape.masking is not None:
            raise UsageError("--perplexity is for models that write from left to right, and this one fills masks in.")
        path, given = self.options.perplexity, self.tuning.model_fields_set
        assert path is not None
        context = checked_context(checkpoint.shape, self.tuning.context)
        (tokens,) = open_language(checkpoint.language, checkpoint.shape).encode([Prompt(text=text_of(path))])
        if isinstance(tokens, Exception):
            raise UsageError(f"--perplexity {path}: {tokens}")
        if len(tokens) < 2 or context < 2:
            raise UsageError(
                f"--perplexity {path}: {len(tokens)} tokens, in windows of {context}: a token is scored after another "
                "one. Give a longer text, or a larger -B context."
            )
        windows = list(scored_windows(tuple(tokens.tolist()), context))
        self._facts = {
            "fingerprint": checkpoint.fingerprint,
            "family": checkpoint.shape.family,
            "tokens": len(tokens),
            "scored": len(tokens) - 1,
            "context": context,
            "windows": len(windows),
        }
        ways = [(AS_IT_IS, TorchModelOptions(context=context, slots=SLOTS, threads=self.tuning.threads))]
        changed = {name: value for name in sorted(given) if (value := getattr(self.tuning, name)) is not None}
        if changed.keys() - {"context", "threads"}:
            name = " ".join(f"{key}={value}" for key, value in changed.items())
            slots = self.tuning.slots or SLOTS
            ways.append((name, self.tuning.model_copy(update={"context": context, "slots": slots})))
        for name, tuning in ways:
            self.say(f"the perplexity of {path}, {name} …")
            self.measured.append(self._measure(name, spec, tuning, windows))

    def _measure(
        self, name: str, spec: ModelSpec, tuning: TorchModelOptions, windows: Sequence[Window]
    ) -> MeasuredPerplexity:
        from gpuinfer.text.generator import Generator, open_generator

        began = time.perf_counter()
        generator = open_generator(spec, self.setup, tuning)
        try:
            assert isinstance(generator, Generator)
            logprobs = [one for window in window_logprobs(generator, windows) for one in window]
            facts: Mapping[str, Any] = generator.facts
        finally:
            generator.close()
        return MeasuredPerplexity(
            name=name,
            perplexity=math.exp(min(-math.fsum(logprobs) / len(logprobs), 700.0)),
            computed_in=facts["computes_in"],
            weights=facts["weights"],
            weights_bytes=facts["estimated_weights_bytes"],
            seconds=time.perf_counter() - began,
        )

    def document(self) -> dict[str, Any]:
        """The report, `gpuinfer.verify/1`, with no checks and `perplexity`."""
        return {
            "schema": "gpuinfer.verify/1",
            "model": self.options.model or str(self.options.checkpoint or self.options.dcp_path),
            "started_at": self._began,
            "wall_s": time.perf_counter() - self._from,
            "status": "done" if self.measured else "partial",
            "holds": bool(self.measured),
            "settings": self.options.model_dump(mode="json"),
            "environment": environment(self.setup, {}),
            "checks": [],
            "perplexity": {
                **self._facts,
                "file": str(self.options.perplexity),
                "measured": [asdict(one) for one in self.measured],
                "change_percent": self.change_percent,
            },
        }


def text_of(path: Path) -> str:
    """Raises `UsageError` for a file that is not there or is no text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"--perplexity {path}: byte {error.start} is not UTF-8. Give a text file.") from None
    except OSError as error:
        raise UsageError(f"--perplexity {path}: {error.strerror}. Give a text file that exists.") from None


def scored_windows(tokens: tuple[int, ...], context: int) -> Iterator[Window]:
    """Windows of `context` tokens, each half of that after the one before. Each token but the first is scored once: in
    the first window that has it, where at least half a window comes before it, but for those of the first window.
    """
    half, scored_to = max(1, context // 2), 1
    for begin in range(0, len(tokens), half):
        end = min(begin + context, len(tokens))
        if end > scored_to:
            yield tokens[begin:end], scored_to - begin
            scored_to = end


def window_logprobs(generator: Generator, windows: Sequence[Window]) -> list[list[float]]:
    """The log-probabilities of the scored tokens of each window."""
    prompts = [
        Prompt(tokens=tokens, sampling=Sampling(max_tokens=0, prompt_logprobs=0, prompt_logprob_start=start))
        for tokens, start in windows
    ]
    waiting, idle = deque(enumerate(prompts)), 0
    found: dict[int, list[float]] = {}
    while waiting or generator.busy:
        while waiting and generator.free_slots:
            number, prompt = waiting.popleft()
            (prepared,) = generator.prepare([prompt])
            if isinstance(prepared, Exception):
                raise WorkError(f"a window of the text was refused: {prepared}") from prepared
            generator.add(number, prepared)
        stepped = generator.step()
        for ticket, outcome in stepped.finished:
            if not isinstance(outcome, Generation):
                raise WorkError(f"a window of the text failed: {outcome}")
            start = windows[int(str(ticket))][1]
            after = (outcome.prompt_logprobs or ())[start:]
            found[int(str(ticket))] = [one.chosen.logprob for one in after if one is not None]
        idle = 0 if stepped.tokens or stepped.finished else idle + 1
        if idle > IDLE_STEPS:
            raise WorkError("the generator goes on without doing anything. Please report this.")
    return [found[number] for number in range(len(windows))]


COLUMNS = ("model", "perplexity", "change", "weights", "computed in", "took")


def perplexity_page(document: Mapping[str, Any]) -> Page:
    """A line for the model as it is, and one for what the options make of it."""
    found = document["perplexity"]
    rows, change = [], found["change_percent"]
    for number, one in enumerate(found["measured"]):
        rows.append(
            (
                one["name"],
                f"{one['perplexity']:.4f}",
                "" if number == 0 or change is None else f"{change:+.2f} %",
                f"{one['weights']}, {one['weights_bytes'] / 1e6:,.0f} MB",
                one["computed_in"],
                f"{one['seconds']:.1f} s",
            )
        )
    verdict = "Add -B weights=int8, or another option, to see what it changes."
    if change is not None:
        verdict = f"{found['measured'][1]['name']} changes the perplexity by {change:+.2f} %."
    title = (
        f"verify · {document['model']} · {found['scored']:,} tokens of {found['file']}, windows of {found['context']}"
    )
    return Page(title, verdict, None, Table(COLUMNS, rows), notes=[("verdict", verdict)])
