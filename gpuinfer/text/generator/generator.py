"""Continuous batching: each step takes every row one token further, and prompts by the chunk beside them.

A finished row's slot is taken by the next prompt in the very next step (Yu et al. 2022, "Orca"); chunks of long prompts
go beside rows that answer (Agrawal et al. 2024, "Sarathi-Serve").
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from gpuinfer.api import TextRoofline
from gpuinfer.errors import BackendDied, BadPrompt
from gpuinfer.generation import Generation, Logprob, Prompt
from gpuinfer.models.out_of_memory import first_line, is_out_of_memory
from gpuinfer.models.pinned_memory import queued
from gpuinfer.text.generator.adapter_versions import weights_name
from gpuinfer.text.generator.admission import SlotAdmission
from gpuinfer.text.generator.answer import NO_COMPLETION
from gpuinfer.text.generator.apply_step import StepApplier
from gpuinfer.text.generator.composer import Echo, LaunchedStep, PromptChunk, StepComposer, StepPlan
from gpuinfer.text.generator.embedding_queue import POOLINGS, EmbeddingQueue
from gpuinfer.text.generator.fault_isolation import FaultIsolation, model_died, row_failed
from gpuinfer.text.generator.page_pool import Ints
from gpuinfer.text.generator.prompts import Prepared, PromptWork, SampleRow, prepare
from gpuinfer.text.generator.slot_table import SlotTable
from gpuinfer.text.generator.slotted import SlottedGenerator, Stepped
from gpuinfer.text.generator.speculation import Proposer, Speculation, StepTimes
from gpuinfer.text.language import Language
from gpuinfer.text.sampling import Sampler
from gpuinfer.text.sampling.sampler import PendingDraw
from gpuinfer.text.text_options import SPECULATE_TOKENS
from gpuinfer.text.text_roofline import step_extent
from gpuinfer.text.transformer import PAGE, Decoder

logger = logging.getLogger("gpuinfer")


class Generator(SlottedGenerator[SampleRow]):
    """Generates from left to right. Give it to a `Driver`, or step it yourself.

    On CUDA a step is composed and launched while the device works on the one before, whose tokens it takes from where
    they are drawn (`_may_go_ahead` says when not); only then are the tokens of the one before read and written down.

    `enter` is called with the station of the time ledger: "prefill" (a step that is mostly prompt), "forward",
    "constrain", "sample", "reply". On CUDA sampling is queued behind the forward, and both count as the forward, as do
    constraints, and what the host does while the device is at work.
    """

    def __init__(
        self,
        decoder: Decoder,
        language: Language,
        *,
        seed: int,
        end_tokens: Sequence[int],
        step_tokens: int,
        threads: int,
        deterministic: bool,
        gather_steps: int = 0,
        pooling: str = "last",
        sampler: Sampler | None = None,
        compiled_sampling: bool = True,
        **common: Any,
    ) -> None:
        """`pooling`: of embeddings, where a prompt leaves it to the model. `common`: see `SlottedGenerator`."""
        super().__init__(decoder, language, **common)
        vocabulary = decoder.shape.vocabulary
        how: dict[str, Any] = {
            "seed": seed,
            "end_tokens": end_tokens,
            "threads": threads,
            "deterministic": deterministic,
            "compiled": compiled_sampling,
        }
        self.sampler = sampler or Sampler(decoder.slots, vocabulary, decoder.device, **how)
        self._table = SlotTable(decoder.slots, decoder.length, vocabulary, end_tokens)
        self._composer = StepComposer(self._table, step_tokens, gather_steps)
        self._admission = SlotAdmission(decoder, self._table, self.sampler, language, self._composer.changed)
        self._embeddings = EmbeddingQueue(decoder, self._admission.pages, step_tokens, pooling)
        self._pooling = pooling
        self._embedded_last = False  # the last step was one of embeddings: it is the turn of answers
        self.answers: StepApplier = StepApplier(
            self._table,
            self._admission,
            self._composer,
            language,
            lambda station: self.enter(station),
            self._most_parts_s,
            self._adapters.give_back,
        )
        self.speculation: Speculation | None = None
        self._faults: FaultIsolation[SampleRow] = FaultIsolation(self._table.rows, self.facts.get("model"))
        self._masks = np.full((decoder.slots, -(-vocabulary // 32)), -1, np.int32)
        self._reported = (0, 0, 0)  # the admission's `cached`, `waited` and `preempted` at the last report
        self._queued = decoder.device.type == "cuda"
        self._under_way: LaunchedStep | None = None  # a step that has been launched before the last one was settled
        self._device_waits = False  # it had finished all that was launched when the last step was begun
        self._stepped: LaunchedStep | None = None  # a step that has been settled, and not reported

    def speculate(
        self,
        proposer: Callable[[SlotTable], Proposer],
        most: int = SPECULATE_TOKENS,
        times: StepTimes | None = None,
    ) -> None:
        """From now on steps take tokens along that a proposer for these slots proposes, at most so many of a row. No
        answer changes by it, if the decoder gives a token the same logits whatever goes with it. `times`: what is known
        of how long steps take; None: nothing is.
        """
        self.speculation = Speculation(self._table, proposer(self._table), most, times or StepTimes())
        self._admission.lookahead = most

    def keep_apart(self) -> None:
        """From now on no prompt takes over what another prompt had computed. No answer changes by it."""
        self._admission.shares_prefixes = False

    @property
    def free_slots(self) -> int:
        return self._admission.free

    @property
    def busy(self) -> bool:
        return super().busy or self._stepped is not None or len(self._embeddings) > 0

    def prepare(
        self, prompts: Sequence[Prompt], enter: Callable[[str], None] = lambda station: None
    ) -> list[Prepared | Exception]:
        found: list[Prepared | Exception] = []
        for one in prepare(self.language, prompts, self.decoder, enter, self._adapters.refuse_unknown):
            if isinstance(one, Prepared) and one.embed == "model" and self._pooling not in POOLINGS:
                what = f"the model's folder pools states by {self._pooling}, which is not computed here"
                found.append(BadPrompt(f"{what}. Use a model with pooling by the mean, or by the last token."))
            else:
                found.append(one)
        return found

    def _add(self, work: PromptWork[SampleRow], now: float) -> None:
        if work.prepared.embed is not None:
            work.versions = (weights_name(work.adapter, self.answers.version),)
            self._embeddings.add(work)
            return
        self.answers.begin(work)
        for number in range(work.prepared.samples):
            if not work.prepared.computes(number):
                self.answers.conclude(SampleRow(self.language, work, number), now)
        if work.left:
            try:
                self._admission.add(work)
            except Exception as error:  # noqa: BLE001  of this prompt's own making
                self.answers.fail(work, error)

    def cancel(self, ticket: Hashable) -> bool:
        work = self._embeddings.cancel(ticket)
        if work is None:
            return super().cancel(ticket)
        if work.adapter is not None:
            self._adapters.give_back(work.adapter)
        return True

    def step(self) -> Stepped:
        answering = super().busy or self._stepped is not None
        if len(self._embeddings) and not (answering and self._embedded_last):
            self._embedded_last = True
            if (stepped := self._embed()) is not None or not answering:
                return stepped or Stepped(*self.answers.take())
        self._embedded_last = False
        return self._answer()

    def _embed(self) -> Stepped | None:
        """A step of embeddings. None: rows have all the pages."""
        self.enter("prefill")
        done = self._embeddings.step()
        if done is None:
            return None
        self.enter("reply")
        now, (finished, parts) = time.perf_counter(), self.answers.take()
        outcomes = list(finished)
        for work, vector in done.finished:
            if work.adapter is not None:
                self._adapters.give_back(work.adapter)
            if isinstance(vector, Exception):
                outcomes.append((work.ticket, vector))
                continue
            answer = Generation(
                completions=(NO_COMPLETION,),
                prompt_tokens=len(work.prepared.tokens),
                first_token_s=now - work.started,
                seconds=now - work.started,
                versions=work.versions,
                embedding=vector.astype("<f4").tobytes(),
            )
            outcomes.append((work.ticket, answer))
        return Stepped(outcomes, parts, rows=done.rows, tokens=done.tokens, prompt_tokens=done.tokens)

    def _answer(self) -> Stepped:
        step, self._stepped = self._stepped, None
        if step is None:
            under_way = self._under_way  # a device that has finished it waits for the host until the next launch
            self._device_waits = under_way is not None and (under_way.drawing is None or under_way.drawing.ready)
            if self._device_waits:
                self.enter("reply")
            step, self._under_way = self._under_way or self._launched(), None
            if step is None:
                return Stepped(*self.answers.take())
            self._under_way = self._launched(step) if not step.plan.proposals and self._may_go_ahead() else None
            self._settle(step)
        return self._outcome(step)

    def _outcome(self, step: LaunchedStep) -> Stepped:
        """The report of a settled step."""
        plan = step.plan
        before, counts = self._reported, (self._admission.cached, self._admission.waited, self._admission.preempted)
        self._reported = counts
        return Stepped(
            *self.answers.take(),
            rows=plan.rows,
            tokens=len(plan.step.tokens),
            prompt_tokens=plan.prompt_tokens,
            cached=counts[0] - before[0],
            recomputed=plan.recomputed,
            waited=counts[1] - before[1],
            preempted=counts[2] - before[2],
            output_tokens=step.drawn,
            proposed=plan.proposed,
            accepted=step.drawn - len(plan.draws) if plan.proposals else 0,
            spared_s=step.spared_s,
            held=step.held,
            echoing=step.echoing,
            extent=step.extent,
        )

    def _may_go_ahead(self) -> bool:
        """Whether the next step can be composed before the tokens are known that the last one draws: the decoder reads
        them where they are drawn, and nothing else depends on them; and no other model has the device after this step.
        """
        table, faults = self._table, self._faults
        if not (self.goes_ahead and self.decoder.reads_drawn) or faults.only is not None or faults.most is not None:
            return False
        depends = table.listed or self.sampler.remembers or (table.constrained & table.decodes).any()
        if self.speculation is not None and not depends:
            rows = int(np.count_nonzero(table.decodes))
            depends = self.speculation.pays(rows, self._composer.room_for_proposals(rows))
        return not depends and not self._admission.must_preempt

    def _launched(self, before: LaunchedStep | None = None) -> LaunchedStep | None:
        """The next step, launched; `before`: the one that is under way. None: there is nothing to compute, or it
        failed. Then nothing has changed, and with a step `before` it is tried again when that has been settled.
        """
        self._admission.place()
        plan = self._compose()
        if plan is None:
            return None
        proposing = time.perf_counter()
        if self.speculation is not None and before is None:
            plan = self._speculated(plan, self.speculation)
        began = time.perf_counter()
        try:
            drawing, echoes, logits = self._run(plan, None if before is None else before.drawing)
        except Exception as error:  # noqa: BLE001  whose fault it is must be found out
            if before is None:
                rows = [row for slot in plan.slots if (row := self._table.rows[slot]) is not None]
                error = error.with_traceback(None)  # its frames hold on to the memory
                guilty = self._faults.failed(rows, len(plan.step.tokens), error)
                if guilty is not None:
                    self.answers.fail_row(guilty, row_failed(error), error)
            else:
                logger.debug("a step could not be launched ahead (%s): it is tried again", first_line(error))
            return None
        self.answers.advance(plan)
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
            logits=logits if plan.proposals else None,
            began=began,
            proposing_s=began - proposing,
            drawn=len(plan.draws),
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
        self._faults.passed()
        self.answers.settle(step, kept, drawn, time.perf_counter(), last=self._under_way is None)
        if step.plan.proposals:
            self._settle_proposed(step)
        if self.speculation is not None and self._under_way is None and not step.plan.chunks:
            self._note_seconds(step, self.speculation.times)
        self.answers.give_out(time.perf_counter())

    def _settle_proposed(self, step: LaunchedStep) -> None:
        """Go on along each row's proposed tokens while they are those that are drawn: one more token each, from logits
        that are there, as if each were a step.
        """
        plan, table, logits = step.plan, self._table, step.logits
        if logits is None or plan.picks is None or self.speculation is None:
            return
        drawn = np.zeros(len(plan.draws), np.int64)
        ended = np.zeros(len(plan.draws), np.bool_)
        lengths = np.array([len(one.tokens) for one in plan.proposals])
        for number in range(int(lengths.max())):
            ended |= table.epoch[plan.draws] != step.epochs
            going = np.flatnonzero(~ended & (drawn == number) & (lengths > number))
            expected = np.array([plan.proposals[row].tokens[number] for row in going.tolist()], np.int32)
            going = going[table.last[plan.draws[going]] == expected]
            if not len(going):
                break
            drawn[going] += 1
            slots, places = plan.draws[going], plan.picks[going] + np.int32(number + 1)
            found = self._drawing(logits, slots, places).finish()
            self.enter("reply")
            self.answers.settle_proposed(slots, found, time.perf_counter())
        step.drawn += int(drawn.sum())
        self._admission.advanced()
        self.speculation.settled(plan.draws, plan.proposals, drawn, ended)

    def _note_seconds(self, step: LaunchedStep, times: StepTimes) -> None:
        """Learn from how long a step of decoding rows has taken."""
        tokens, rows, seconds = len(step.plan.step.tokens), len(step.plan.draws), time.perf_counter() - step.began
        if step.plan.proposals:
            plain = float(times.of(np.array([rows]))[0]) if times.known else seconds
            step.spared_s = plain * step.drawn / rows - seconds - step.proposing_s
        times.took(tokens, seconds)

    def _settle_all(self) -> None:
        """Settle the step under way, if any."""
        step, self._under_way = self._under_way, None
        if step is not None:
            self._settle(step)
            self._stepped = step

    def update(self, version: str, weights: object) -> None:
        self._settle_all()
        self._admission.forget()
        super().update(version, weights)
        self._embeddings.restart(version)

    def _adapter_gone(self, number: int) -> None:
        self._admission.pages.tree.forget(number)

    @property
    def pages_in_use(self) -> int:
        return self._admission.pages.in_use

    def drop_cached(self) -> int:
        return self._admission.pages.evict_unused()

    def return_memory(self) -> None:
        self._settle_all()
        self._admission.pages.return_memory()
        self.decoder.drop_graphs()

    def resize(self, slots: int, pages: int) -> tuple[int, int]:
        self._settle_all()
        admission, held = self._admission, self._admission.pages
        admission.most = slots
        if self.decoder.pages_go_back:
            admission.preempt(pages)
            held.limit(pages)
        elif pages != held.pool.pages and not len(self._embeddings):  # whose pages cannot be taken away
            before = held.pool.pages
            admission.preempt_all()
            try:
                held.renew(pages)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                held.renew(before)
        return slots, held.pool.pages - held.pool.withheld

    def measure(self, rows: int, seconds: float) -> TextRoofline:
        self._settle_all()
        self._admission.forget()  # the pages that it kept are written over
        return super().measure(rows, seconds)

    def close(self) -> None:
        with contextlib.suppress(BackendDied):
            self._settle_all()  # graphs at work must not be freed
        if self.speculation is not None:
            self.speculation.close()
        self.sampler.close()
        self.decoder.close()

    def _speculated(self, plan: StepPlan, speculation: Speculation) -> StepPlan:
        """The plan with proposed tokens, if it is a step of decoding rows alone, and any are worth their while."""
        faults, rows = self._faults, len(plan.decoding)
        if plan.chunks or faults.only is not None or faults.most is not None:
            return plan
        self.enter("forward")  # of a draft
        proposals = speculation.proposals(plan.decoding, self._composer.room_for_proposals(rows))
        return plan if proposals is None else self._composer.with_proposals(plan, proposals)

    def _compose(self) -> StepPlan | None:
        faults, prefilling = self._faults, self._admission.prefilling
        while (only := faults.only) is not None:
            plan = self._composer.compose(prefilling, faults.most, only)
            if plan is not None:
                return plan
            faults.passed()  # none of them has anything to compute now
        return self._composer.compose(prefilling, faults.most, None)

    def _run(self, plan: StepPlan, before: PendingDraw | None) -> tuple[PendingDraw | None, list[Echo], Tensor]:
        """The step's draw, log-probabilities of prompts, and logits. After a failure the same step can be run again."""
        self.enter("prefill" if 2 * plan.prompt_tokens > len(plan.step.tokens) else "forward")
        logits = self.decoder.forward(plan.step if before is None else replace(plan.step, drawn=before.tokens))
        if not self._queued and any(chunk.echoes for chunk in plan.chunks):
            self.enter("sample")
        echoes = [self._echo(chunk, logits) for chunk in plan.chunks if chunk.echoes]
        copies = [  # of the partial last page of a prompt, for each of its followers
            (int(self._table.pages[chunk.row.slot, chunk.end // PAGE]), spare)
            for chunk in plan.chunks
            if chunk.last
            for spare in chunk.row.spares
        ]
        if copies:
            self.decoder.copy_pages(*map(list, zip(*copies, strict=True)))
        if not len(plan.draws):
            return None, echoes, logits
        return self._drawing(logits, plan.draws, plan.picks), echoes, logits

    def _drawing(self, logits: Tensor, slots: Ints, picks: Ints | None) -> PendingDraw:
        """The draw of these slots' next tokens, each from the logits that `picks` says; None: as they come."""
        masks, rules = self._masked(slots), None
        if self._table.listed and self._table.walks is not None:
            if not self._queued:
                self.enter("constrain")
            rules = self._table.walks.rules(slots)  # of rows with lists, which need no mask
        if not self._queued:
            self.enter("sample")
        if picks is not None:
            logits = logits.index_select(0, queued(picks, logits.device))
        if rules is None:
            return self.sampler.begin(logits, slots, masks)
        return self.sampler.begin(logits, slots, masks, rules)

    def _masked(self, slots: Ints) -> Ints | None:
        """Masks of constrained rows, made while the forward is under way on another device. None: there are none."""
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

    def _echo(self, chunk: PromptChunk, logits: Tensor) -> Echo:
        """Log-probabilities of the tokens after those that are echoed, as far as they are known."""
        row, sampling = chunk.row, chunk.row.work.prepared.sampling
        place = chunk.end - chunk.echoes + 1
        tokens = row.known[place : chunk.end + 1]
        logits = logits[chunk.logits : chunk.logits + len(tokens)]
        count = min(max(len(row.work.prepared.tokens) - place, 0), len(tokens))  # that are of the prompt

        def described(logits: Tensor, tokens: Ints, wanted: int | None) -> Sequence[Logprob]:
            return [] if wanted is None or not len(tokens) else self.sampler.given_logprobs(logits, tokens, wanted)

        of_prompt = described(logits[:count], tokens[:count], sampling.prompt_logprobs)
        return of_prompt, described(logits[count:], tokens[count:], sampling.logprobs)
