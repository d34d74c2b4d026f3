"""What generators have in common, in whatever order they write: prompts from `add` to their answers, weights, adapters.

`Generator` goes from left to right, `DiffusionGenerator` fills masks in.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from msgspec import structs

from gpuinfer.api import TextRoofline
from gpuinfer.errors import BackendError, BadPrompt, GpuinferError, UsageError
from gpuinfer.generation import Completion, Generation, Logprob, Part, Prompt
from gpuinfer.models.out_of_memory import first_line
from gpuinfer.text import text_roofline
from gpuinfer.text.generator.adapter_versions import AdapterVersion, AdapterVersions, check_name, weights_name
from gpuinfer.text.generator.answer import (
    MOST_PARTS_S,
    NO_COMPLETION,
    PartEmitter,
    ResumedAnswer,
    VersionSpans,
    completion,
    versions_until,
)
from gpuinfer.text.generator.prompts import Prepared, PromptWork
from gpuinfer.text.language import IncrementalDetokenizer, Language
from gpuinfer.text.language.list_walks import ListedMatcher
from gpuinfer.text.text_options import MAX_ADAPTERS
from gpuinfer.text.text_roofline import StepExtent
from gpuinfer.text.transformer import Adapter, Decoder, Weights

Finished = Sequence[tuple[Hashable, Generation | Exception]]
Parts = Sequence[tuple[Hashable, Part]]


@dataclass(frozen=True, slots=True)
class Stepped:
    """What one step did."""

    finished: Finished
    parts: Parts = ()  # of answers that are read while they grow; they come before `finished`
    rows: int = 0  # that took part
    tokens: int = 0  # that went through the decoder
    prompt_tokens: int = 0  # of them, those of prompts
    cached: int = 0  # prompt tokens that another prompt had computed
    recomputed: int = 0  # of `tokens`, those computed again after their pages were taken away
    waited: int = 0  # rows that began to wait for pages
    preempted: int = 0  # rows whose pages were taken away: their tokens are computed again later
    output_tokens: int = 0  # drawn
    held: bool = False  # prompts were cut, or waited, as the step was full
    echoing: bool = False  # it was full because of the logits that prompts' log-probabilities need
    proposed: int = 0  # of `tokens`, those that were proposed to come next
    accepted: int = 0  # of them, those that were drawn
    spared_s: float = 0.0  # how much longer steps without proposals would have taken, as far as is known
    positions: int = 0  # of all canvases in the step, those of guidance too; 0 where the model goes from left to right
    committed: int = 0  # masks that became tokens; `output_tokens` are those that an answer has in the end
    idle: int = 0  # of `rows`, those that committed nothing
    extent: StepExtent | None = None  # of what the decoder computed, from which the least cost follows


class AnswerRow(Protocol):
    """One sample of a prompt, as far as its answer goes."""

    number: int
    slot: int
    begun: ResumedAnswer | None
    growing: IncrementalDetokenizer | None
    given: PartEmitter | None
    walk: ListedMatcher | None

    @property
    def work(self) -> PromptWork[Any]: ...
    @property
    def logprobs(self) -> Sequence[Any] | None: ...
    @property
    def versions(self) -> VersionSpans: ...


R = TypeVar("R", bound=AnswerRow)


class AnswerTracker(ABC, Generic[R]):
    """Follows prompts to their answers. `finished` gathers answers and failures until `take`, `parts` what is given out
    before that.
    """

    def __init__(self, language: Language, most_parts_s: float, give_back: Callable[[AdapterVersion], None]) -> None:
        """`give_back` is called with the adapter of each answer that is complete, failed or cancelled."""
        self._language, self._most_parts_s, self._give_back = language, most_parts_s, give_back
        self._parts_due = 0.0  # when parts are given out next
        self.version = ""  # of the weights: "" are those of the start
        self.works: dict[Hashable, PromptWork[R]] = {}  # prompts under way, by ticket
        self.finished: list[tuple[Hashable, Generation | Exception]] = []
        self.parts: list[tuple[Hashable, Part]] = []

    @abstractmethod
    def _release(self, row: R) -> None:
        """Free the row's slot and pages."""

    @abstractmethod
    def _release_all(self, work: PromptWork[R]) -> None:
        """Free the slots and pages of all of a prompt's rows."""

    @abstractmethod
    def _change_row(self, row: R, work: PromptWork[R]) -> None:
        """The last of the work's versions computes this row from now on."""

    @abstractmethod
    def _has_begun(self, row: R) -> bool:
        """Whether some token of the row has been computed."""

    def begin(self, work: PromptWork[R]) -> None:
        """Track a prompt from now on."""
        work.versions = (weights_name(work.adapter, self.version),)
        self.works[work.ticket] = work

    def take(self) -> tuple[Finished, Parts]:
        """What has been gathered since the last call."""
        finished, parts = self.finished, self.parts
        self.finished, self.parts = [], []
        return finished, parts

    def change_version(self, version: str) -> None:
        """Other weights compute from the next step on. If no token of a prompt has been computed, the prompt is
        attributed to the new weights alone.
        """
        self.version = version
        for work in self.works.values():
            name = weights_name(work.adapter, version)
            work.versions = (*work.versions, name) if any(map(self._has_begun, work.rows)) else (name,)
            for row in work.rows:
                self._change_row(row, work)

    def fail(self, work: PromptWork[R], error: Exception) -> None:
        """Give up on all of a prompt's rows."""
        if self.withdraw(work):
            if not isinstance(error, GpuinferError):
                cause = f"{type(error).__name__}: {first_line(error)}"
                error = BackendError(f"the model failed on this prompt ({cause}). Leave it out, or report it.")
            self.finished.append((work.ticket, error))

    def withdraw(self, work: PromptWork[R]) -> bool:
        """Stop computing a prompt. False when it was not under way."""
        known = self.works.pop(work.ticket, None) is not None
        self._release_all(work)
        work.rows = []
        if known and work.adapter is not None:
            self._give_back(work.adapter)
        return known

    def conclude(self, row: R, now: float) -> None:
        """Finish a row that draws no token: its answer is known, or none is wanted."""
        begun, sampling = row.begun, row.work.prepared.sampling
        processed = () if sampling.processed_logprobs else None
        if begun is None or begun.ending is None:
            nodes = None if row.walk is None else ()
            versions = versions_until(row.versions, 0)
            answer = structs.replace(NO_COMPLETION, versions=versions, processed=processed, nodes=nodes)
        else:
            answer = completion(
                self._language,
                sampling,
                row.growing,
                begun.tokens.tolist(),
                cast(Sequence[Logprob] | None, row.logprobs),
                begun.ending,
                begun.versions,
                None if processed is None else begun.processed,
                row.walk,
            )
        self.finish(row, answer, None if row.given is None else row.given.finish(answer), now)

    def finish(self, row: R, answer: Completion, last: Part | None, now: float) -> None:
        """Write a row's answer down, with the `last` part of one that is read while it grows; free the row's slot."""
        work = row.work
        work.completions[row.number] = answer
        if last is not None:
            self.parts.append((work.ticket, last))
        self._release(row)
        work.left -= 1
        if not work.left:
            self._complete(work, now)

    def _complete(self, work: PromptWork[R], now: float) -> None:
        del self.works[work.ticket]
        work.rows = []  # a work and its rows refer to each other: without this only a collection would free them
        answer = Generation(
            completions=tuple(cast(list[Completion], work.completions)),
            prompt_tokens=len(work.prepared.tokens),
            cached_tokens=work.cached,
            prompt_logprobs=None if work.echo is None else tuple(work.echo),
            first_token_s=work.first_token - work.started,
            seconds=now - work.started,
            versions=work.versions,
        )
        self.finished.append((work.ticket, answer))
        if work.adapter is not None:
            self._give_back(work.adapter)


class SlottedGenerator(ABC, Generic[R]):
    """Answers prompts, a step at a time, in a fixed number of slots, whatever the order in which answers are written.
    All calls come from one thread, but for those that say otherwise.

    `facts` are estimated and actual sizes, for reports. `enter` is called with a station of the time ledger when it
    begins. `goes_ahead`, set before each step: whether a further one may be at work on the device when `step` returns.
    """

    answers: AnswerTracker[R]

    def __init__(
        self,
        decoder: Decoder,
        language: Language,
        *,
        facts: Mapping[str, Any] | None = None,
        read: Callable[[str], Weights] | None = None,
        read_adapter: Callable[[str], Adapter] | None = None,
        max_adapters: int = MAX_ADAPTERS,
        most_parts_s: float = MOST_PARTS_S,
    ) -> None:
        """`read` reads other weights for the same model (`read_weights`), `read_adapter` adapters; None: refused.
        `most_parts_s`: parts of answers that are given out in a second, to all readers.

        Raises `UsageError` for a decoder without slots.
        """
        if not decoder.slots:
            raise UsageError("the decoder has no slots. Use -B slots=1 or more.")
        self.decoder, self.language = decoder, language
        self.facts: Mapping[str, Any] = facts or {}
        self.enter: Callable[[str], None] = lambda station: None
        self.goes_ahead = True
        self._read, self._read_adapter, self._most_parts_s = read, read_adapter, most_parts_s
        self._adapters = AdapterVersions(decoder, max_adapters, self._adapter_gone)

    @property
    def device(self) -> torch.device:
        """The device that it computes on."""
        return self.decoder.device  # type: ignore[no-any-return]

    @property
    def slots(self) -> int:
        """How many rows can be under way at once."""
        return self.decoder.slots

    @property
    @abstractmethod
    def free_slots(self) -> int:
        """How many more rows may be added."""

    @property
    def busy(self) -> bool:
        """Whether there is anything for a step to do."""
        return bool(self.answers.works) or bool(self.answers.finished)

    @abstractmethod
    def prepare(
        self, prompts: Sequence[Prompt], enter: Callable[[str], None] = lambda station: None
    ) -> list[Prepared | Exception]:
        """Prompts ready to be added, or the `BadPrompt` that refuses one. From any thread; `enter` is called with what
        that thread does: "understand" or "constrain".
        """

    @abstractmethod
    def step(self) -> Stepped:
        """Compute the next step, and report it; where steps are launched ahead, the one before it.

        Raises `BackendDied` when the model cannot go on; what is wrong with one row fails that row alone.
        """

    @abstractmethod
    def close(self) -> None:
        """Free threads and memory."""

    def add(self, ticket: Hashable, prepared: Prepared) -> None:
        """Take one of `free_slots` for each sample. A later step finishes the answer.

        Raises `ValueError` when the ticket is in use or there are too few slots.
        """
        if ticket in self.answers.works:
            raise ValueError(f"ticket {ticket!r} is in use.")
        if prepared.samples > self.free_slots:
            raise ValueError(f"{prepared.samples} samples and {self.free_slots} free slots: wait for `free_slots`.")
        now = time.perf_counter()
        try:
            adapter = None if prepared.adapter is None else self._adapters.take(prepared.adapter)
        except BadPrompt as error:  # it has been unloaded since the prompt was prepared
            self.answers.finished.append((ticket, error))
            return
        self._add(PromptWork[R](ticket, prepared, now, adapter), now)

    @abstractmethod
    def _add(self, work: PromptWork[R], now: float) -> None:
        """Begin to answer a prompt; a sample that needs no step is complete at once."""

    def cancel(self, ticket: Hashable) -> bool:
        """Stop computing this answer: its slots are free at once. False when it is finished or unknown."""
        work = self.answers.works.get(ticket)
        return work is not None and self.answers.withdraw(work)

    def read_weights(self, place: str) -> object:
        """Other weights for the same model, as `update` takes them. From any thread. Raises `UsageError`."""
        if self._read is None:
            raise UsageError("this model has no files that its weights could be exchanged for. Start another model.")
        return self.decoder.pack(self._read(place))

    def update(self, version: str, weights: object) -> None:
        """Compute with these weights from the next step on, and name them `version` in answers.

        Answers under way go on with their cached keys and values, which serve no other prompt.
        """
        self.decoder.swap(weights)
        self.answers.change_version(version)

    @property
    def adapters(self) -> Sequence[str]:
        """The values that `Prompt.adapter` may have: names, and names with versions. From any thread."""
        return self._adapters.known

    def read_adapter(self, name: str, place: str) -> object:
        """The adapter in the folder `place`, as `load_adapter` takes it, to be loaded as `name`. From any thread.
        Raises `UsageError`.
        """
        if self._read_adapter is None:
            raise UsageError("this model takes no adapters. Start another model.")
        check_name(name)
        self._adapters.refuse_full(name)
        return self.decoder.pack_adapter(self._read_adapter(place))

    def load_adapter(self, name: str, version: str, adapter: object) -> None:
        """From now on `name` means this adapter in prompts that are added, and so does `name@version` while it is
        loaded. Answers under way keep theirs. Raises `UsageError`, with nothing changed.
        """
        self._adapters.load(name, version, adapter)

    def unload_adapter(self, name: str) -> None:
        """Prompts may not use it any more; answers under way keep it. Raises `UsageError` for an unknown name."""
        self._adapters.unload(name)

    def _adapter_gone(self, number: int) -> None:
        """No answer is computed with this adapter any more."""

    @property
    @abstractmethod
    def pages_in_use(self) -> int:
        """Pages of the cache that rows have, or that are kept for rows to come."""

    @abstractmethod
    def drop_cached(self) -> int:
        """Keep nothing for rows to come that no row needs now; how many pages that frees. Between two steps."""

    @abstractmethod
    def return_memory(self) -> None:
        """Give the memory of free pages back, where it can go page by page. Between two steps."""

    @abstractmethod
    def resize(self, slots: int, pages: int) -> tuple[int, int]:
        """Have at most so many slots and pages in use from now on, never more than it was opened with; how many there
        are then. Rows that have more pages give them back, and are computed again. Between two steps.
        """

    def measure(self, rows: int, seconds: float) -> TextRoofline:
        """What this machine reaches with the model at best: see `text_roofline.measure_roofline`. Only while nothing is
        under way; the prefix cache is emptied. Raises `UsageError` for a model that cannot be measured.
        """
        return text_roofline.measure_roofline(self.decoder, rows, int(self.facts.get("step_tokens") or rows), seconds)

    def use(self, threads: int) -> None:
        """Compute with at most so many threads from the next step on, beside other models that have the other cores."""
        self.decoder.use(threads)

    def rest(self) -> None:
        """Another model has the device until the next step."""
        self.decoder.rest()
