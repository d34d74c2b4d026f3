"""Continuous batching: each step takes every row one token further, and prompts by the chunk beside them.

A finished row's slot is taken by the next prompt in the very next step (Yu et al. 2022, "Orca"); chunks of long prompts
go beside rows that answer (Agrawal et al. 2024, "Sarathi-Serve").
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuinfer.api import TextRoofline
from gpuinfer.errors import BackendDied, BadPrompt, UsageError
from gpuinfer.generation import Generation, Logprob, Part, Prompt
from gpuinfer.models.out_of_memory import first_line
from gpuinfer.models.pinned_memory import queued
from gpuinfer.text import text_roofline
from gpuinfer.text.generator.adapter_versions import AdapterVersions, check_name
from gpuinfer.text.generator.admission import SlotAdmission
from gpuinfer.text.generator.answer import MOST_PARTS_S
from gpuinfer.text.generator.apply_step import StepApplier
from gpuinfer.text.generator.composer import Echo, LaunchedStep, PromptChunk, StepComposer, StepPlan
from gpuinfer.text.generator.driver import Stepped
from gpuinfer.text.generator.fault_isolation import FaultIsolation, model_died, row_failed
from gpuinfer.text.generator.interfaces import DrawingProtocol, Ints, LanguageProtocol, SamplerProtocol
from gpuinfer.text.generator.prompts import Prepared, PromptWork, SampleRow, prepare
from gpuinfer.text.generator.slot_table import SlotTable
from gpuinfer.text.sampling.slot_settings import TokenRules
from gpuinfer.text.text_options import MAX_ADAPTERS
from gpuinfer.text.text_roofline import step_extent
from gpuinfer.text.transformer import PAGE, Adapter, Decoder, Weights

logger = logging.getLogger("gpuinfer")


class Generator:
    """`protocol.TextGenerator` from left to right. Give it to a `Driver`, or step it yourself.

    On CUDA a step is composed and launched while the device works on the one before, whose tokens it takes from where
    they are drawn (`_may_go_ahead` says when not); only then are the tokens of the one before read and written down.

    `enter` is told what is going on: "prefill" (a step that is mostly prompt), "forward", "constrain", "sample",
    "reply". On CUDA sampling is queued behind the forward, and both count as the forward, as do constraints, and what
    the host does while the device is at work.
    """

    def __init__(
        self,
        decoder: Decoder,
        language: LanguageProtocol,
        *,
        seed: int,
        end_tokens: Sequence[int],
        step_tokens: int,
        threads: int,
        deterministic: bool,
        gather_steps: int = 0,
        sampler: SamplerProtocol | None = None,
        facts: Mapping[str, Any] | None = None,
        read: Callable[[str], Weights] | None = None,
        read_adapter: Callable[[str], Adapter] | None = None,
        max_adapters: int = MAX_ADAPTERS,
        most_parts_s: float = MOST_PARTS_S,
    ) -> None:
        """`read` finds other weights for the same model (`read_weights`), `read_adapter` adapters; if any."""
        vocabulary = decoder.shape.vocabulary
        self.decoder, self.language = decoder, language
        self.sampler = sampler or _sampler(decoder, seed, end_tokens, threads, deterministic)
        self.facts: Mapping[str, Any] = facts or {}
        self._read, self._read_adapter = read, read_adapter
        self.enter: Callable[[str], None] = lambda station: None
        self.goes_ahead = True
        self._table = SlotTable(decoder.slots, decoder.length, vocabulary, end_tokens)
        self._composer = StepComposer(self._table, step_tokens, gather_steps)
        self._admission = SlotAdmission(decoder, self._table, self.sampler, language, self._composer.changed)
        self._settling = StepApplier(
            self._table,
            self._admission,
            self._composer,
            language,
            lambda station: self.enter(station),
            most_parts_s,
            lambda adapter: self._adapters.give_back(adapter),
        )
        self._adapters = AdapterVersions(decoder, max_adapters, self._admission.forget_adapter)
        self._troubles: FaultIsolation[SampleRow] = FaultIsolation(self._table, self.facts.get("model"))
        self._masks = np.full((decoder.slots, -(-vocabulary // 32)), -1, np.int32)
        self._counted = (0, 0, 0)  # what steps have told of `Admission.cached`, `waited` and `preempted`
        self._queued = decoder.device.type == "cuda"
        self._under_way: LaunchedStep | None = None  # a step that has been launched before the last one was settled
        self._device_waits = False  # it had finished all that was launched when the last step was begun
        self._stepped: LaunchedStep | None = None  # one that has been settled, and not reported

    @property
    def device(self) -> torch.device:
        return self.decoder.device  # type: ignore[no-any-return]

    @property
    def slots(self) -> int:
        return self._table.slots

    @property
    def free_slots(self) -> int:
        return self._admission.free

    @property
    def busy(self) -> bool:
        return bool(self._settling.works) or bool(self._settling.finished) or self._stepped is not None

    def prepare(
        self, prompts: Sequence[Prompt], enter: Callable[[str], None] = lambda station: None
    ) -> list[Prepared | Exception]:
        return list(prepare(self.language, prompts, self.decoder, enter, self._adapters.refuse_unknown))

    def add(self, ticket: Hashable, prepared: Prepared) -> None:
        if ticket in self._settling.works:
            raise ValueError(f"ticket {ticket!r} is in use.")
        if prepared.samples > self.free_slots:
            raise ValueError(f"{prepared.samples} samples and {self.free_slots} free slots: wait for `free_slots`.")
        now = time.perf_counter()
        try:
            adapter = None if prepared.adapter is None else self._adapters.take(prepared.adapter)
        except BadPrompt as error:  # it has been unloaded since the prompt was prepared
            self._settling.finished.append((ticket, error))
            return
        work = PromptWork(ticket, prepared, now, adapter)
        self._settling.begin(work, now)
        if work.left:
            self._admission.add(work)

    def cancel(self, ticket: Hashable) -> bool:
        work = self._settling.works.get(ticket)
        if work is not None:
            self._settling.withdraw(work)
        return work is not None

    def step(self) -> Stepped:
        step, self._stepped = self._stepped, None
        if step is None:
            self._enter_host()
            step, self._under_way = self._under_way or self._launched(), None
            if step is None:
                return Stepped(*self._taken())
            self._under_way = self._launched(step) if self._may_go_ahead() else None
            self._settle(step)
        return self._outcome(step)

    def _enter_host(self) -> None:
        """Find out whether the device has finished all that was launched. Then it waits for the host now, and for what
        the host does until the next step is launched.
        """
        step = self._under_way
        self._device_waits = step is not None and (step.drawing is None or step.drawing.ready)
        if self._device_waits:
            self.enter("reply")

    def _outcome(self, step: LaunchedStep) -> Stepped:
        """What a step did that has been settled."""
        plan = step.plan
        before, counts = self._counted, (self._admission.cached, self._admission.waited, self._admission.preempted)
        self._counted = counts
        return Stepped(
            *self._taken(),
            rows=plan.rows,
            tokens=len(plan.step.tokens),
            prompt_tokens=plan.prompt_tokens,
            cached=counts[0] - before[0],
            recomputed=plan.recomputed,
            waited=counts[1] - before[1],
            preempted=counts[2] - before[2],
            output_tokens=len(plan.draws),
            held=step.held,
            echoing=step.echoing,
            extent=step.extent,
        )

    def _may_go_ahead(self) -> bool:
        """Whether the next step can be composed before the tokens are known that the last one draws: the decoder reads
        them where they are drawn, and nothing else depends on them; and no other model has the device after this step.
        """
        table, troubles = self._table, self._troubles
        if not (self.goes_ahead and self.decoder.reads_drawn) or troubles.only is not None or troubles.most is not None:
            return False
        depends = table.listed or self.sampler.remembers or (table.constrained & table.decodes).any()
        return not depends and not self._admission.must_preempt

    def _launched(self, before: LaunchedStep | None = None) -> LaunchedStep | None:
        """The next step, launched; `before`: the one that is under way. None: there is nothing to compute, or it
        failed. Then nothing has changed, and with a step `before` it is tried again when that has been settled.
        """
        for work, error in self._admission.place():
            self._settling.fail(work, error)
        plan = self._compose()
        if plan is None:
            return None
        try:
            drawing, echoes = self._run(plan, None if before is None else before.drawing)
        except Exception as error:  # noqa: BLE001  whose fault it is must be found out
            if before is None:
                self._after_failure(plan, error.with_traceback(None))  # its frames hold on to the memory
            else:
                logger.debug("a step could not be launched ahead (%s): it is tried again", first_line(error))
            return None
        self._settling.advance(plan)
        table, held = self._table, self._composer.left
        return LaunchedStep(
            plan,
            drawing,
            echoes,
            positions=table.filled[plan.draws],
            epochs=table.epoch[plan.draws],
            extent=step_extent(plan.step, plan.again),
            held=held and len(plan.step.tokens) >= self._composer.step_tokens,
            echoing=held and any(chunk.echoes for chunk in plan.chunks),
        )

    def _settle(self, step: LaunchedStep) -> None:
        """Wait for what it draws, and write it down. Raises `BackendDied` when the device never comes to it."""
        kept = self._table.epoch[step.plan.draws] == step.epochs
        try:
            drawn = None if step.drawing is None else step.drawing.finish(kept)
        except Exception as error:
            raise model_died(error) from error
        if self._under_way is None or self._device_waits:  # else the device is at work on what is under way
            self.enter("reply")
        self._troubles.passed()
        self._settling.settle(step, kept, drawn, time.perf_counter(), last=self._under_way is None)

    def _settle_all(self) -> None:
        """No step is under way any more."""
        step, self._under_way = self._under_way, None
        if step is not None:
            self._settle(step)
            self._stepped = step

    def read_weights(self, place: str) -> object:
        if self._read is None:
            raise UsageError("this model has no files that its weights could be exchanged for. Start another model.")
        return self.decoder.pack(self._read(place))

    def update(self, version: str, weights: object) -> None:
        self._settle_all()
        self.decoder.swap(weights)
        self._admission.forget()
        self._settling.change_version(version)

    @property
    def adapters(self) -> Sequence[str]:
        return self._adapters.known

    def read_adapter(self, name: str, place: str) -> object:
        if self._read_adapter is None:
            raise UsageError("this model takes no adapters. Start another model.")
        check_name(name)
        self._adapters.refuse_full(name)
        return self.decoder.pack_adapter(self._read_adapter(place))

    def load_adapter(self, name: str, version: str, adapter: object) -> None:
        self._adapters.load(name, version, adapter)

    def unload_adapter(self, name: str) -> None:
        self._adapters.unload(name)

    def measure(self, rows: int, seconds: float) -> TextRoofline:
        self._settle_all()
        self._admission.forget()  # the pages that it kept are written over
        return text_roofline.measure_roofline(self.decoder, rows, int(self.facts.get("step_tokens") or rows), seconds)

    def use(self, threads: int) -> None:
        self.decoder.use(threads)

    def rest(self) -> None:
        self.decoder.rest()

    def close(self) -> None:
        with contextlib.suppress(BackendDied):
            self._settle_all()  # graphs at work must not be freed
        self.sampler.close()
        self.decoder.close()

    def _compose(self) -> StepPlan | None:
        troubles, prefilling = self._troubles, self._admission.prefilling
        while (only := troubles.only) is not None:
            plan = self._composer.compose(prefilling, troubles.most, only)
            if plan is not None:
                return plan
            troubles.passed()  # none of them has anything to compute now
        return self._composer.compose(prefilling, troubles.most, None)

    def _run(self, plan: StepPlan, before: DrawingProtocol | None) -> tuple[DrawingProtocol | None, list[Echo]]:
        """What the step draws, and log-probabilities of prompts. What it changes, the same step changes alike again."""
        self.enter("prefill" if 2 * plan.prompt_tokens > len(plan.step.tokens) else "forward")
        logits = self.decoder.forward(plan.step if before is None else replace(plan.step, drawn=before.tokens))
        masks, rules = self._masked(plan.draws), self._ruled(plan.draws)
        if not self._queued:
            self.enter("sample")
        echoes = self._echoes(plan, logits)
        self._copy_for_followers(plan.chunks)
        if not len(plan.draws):
            return None, echoes
        if plan.picks is not None:
            logits = logits.index_select(0, queued(plan.picks, logits.device))
        if rules is None:
            return self.sampler.begin(logits, plan.draws, masks), echoes
        return self.sampler.begin(logits, plan.draws, masks, rules), echoes

    def _copy_for_followers(self, chunks: Sequence[PromptChunk]) -> None:
        """The last page of their prompt, which is not full: each of them goes on in its own."""
        sources: list[int] = []
        targets: list[int] = []
        for chunk in chunks:
            if chunk.last and chunk.row.spares:
                last = self._table.pages[chunk.row.slot, chunk.end // PAGE]
                sources += [int(last)] * len(chunk.row.spares)
                targets += chunk.row.spares
        if targets:
            self.decoder.copy_pages(sources, targets)

    def _masked(self, slots: Ints) -> Ints | None:
        """What the constraints allow, while the forward is under way on another device. None: there are none."""
        table = self._table
        constrained = np.flatnonzero(table.constrained[slots])
        if not len(constrained):
            return None
        if not self._queued:
            self.enter("constrain")
        masks = self._masks[: len(slots)]
        masks.fill(-1)
        for i in constrained.tolist():
            row = table.rows[slots[i]]
            if row is not None and row.matcher is not None:
                row.matcher.mask(masks[i])
        return masks

    def _ruled(self, slots: Ints) -> TokenRules | None:
        """The same for lists, whose rows need no mask."""
        table = self._table
        if not table.listed or table.walks is None or not len(slots):
            return None
        if not self._queued:
            self.enter("constrain")
        return table.walks.rules(slots)

    def _echoes(self, plan: StepPlan, logits: Tensor) -> list[Echo]:
        return [self._echo(chunk, logits) for chunk in plan.chunks if chunk.echoes]

    def _echo(self, chunk: PromptChunk, logits: Tensor) -> Echo:
        """What the model thought of the tokens after those that are echoed, as far as they are known."""
        row, sampling = chunk.row, chunk.row.work.prepared.sampling
        place = chunk.end - chunk.echoes + 1
        tokens = row.known[place : chunk.end + 1]
        logits = logits[chunk.logits : chunk.logits + len(tokens)]
        count = min(max(len(row.work.prepared.tokens) - place, 0), len(tokens))  # that are of the prompt

        def told(logits: Tensor, tokens: Ints, wanted: int | None) -> Sequence[Logprob]:
            return [] if wanted is None or not len(tokens) else self.sampler.given_logprobs(logits, tokens, wanted)

        of_prompt = told(logits[:count], tokens[:count], sampling.prompt_logprobs)
        return of_prompt, told(logits[count:], tokens[count:], sampling.logprobs)

    def _after_failure(self, plan: StepPlan, error: Exception) -> None:
        rows = [row for slot in plan.slots if (row := self._table.rows[slot]) is not None]
        guilty = self._troubles.failed(rows, len(plan.step.tokens), error)
        if guilty is not None:
            self._settling.fail_row(guilty, row_failed(error), error)

    def _taken(self) -> tuple[Sequence[tuple[Hashable, Generation | Exception]], Sequence[tuple[Hashable, Part]]]:
        settling = self._settling
        finished, parts = settling.finished, settling.parts
        settling.finished, settling.parts = [], []
        return finished, parts


def _sampler(
    decoder: Decoder, seed: int, end_tokens: Sequence[int], threads: int, deterministic: bool
) -> SamplerProtocol:
    from gpuinfer.text.sampling import Sampler as OwnSampler

    if not decoder.slots:
        raise UsageError("the decoder has no slots. Use -B slots=1 or more.")
    sampler: SamplerProtocol = OwnSampler(
        decoder.slots,
        decoder.shape.vocabulary,
        decoder.device,
        seed=seed,
        end_tokens=end_tokens,
        threads=threads,
        deterministic=deterministic,
    )
    return sampler
