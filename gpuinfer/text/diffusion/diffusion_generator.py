"""Masked diffusion: each step computes some positions of every row, and makes some of their masks tokens.

A row enters its next block as soon as it is done with one, and the next prompt takes a finished row's slot in the very
next step. Rows of all lengths share a step without padding, by positions of their own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from gpuinfer.config import blame
from gpuinfer.errors import BackendError, BadPrompt, UsageError, WorkError
from gpuinfer.generation import Prompt
from gpuinfer.models.out_of_memory import first_line, is_out_of_memory
from gpuinfer.models.pinned_memory import queued
from gpuinfer.text.diffusion.apply_unmasking import Unmasker, UnmaskingApplier
from gpuinfer.text.diffusion.canvas import CanvasComposer, CanvasRow, CanvasSlots, CanvasStepPlan, CanvasTurn
from gpuinfer.text.diffusion.scoring import Asked, Blender, Scored, Scorer, guided
from gpuinfer.text.diffusion.unmasking_decoder import UnmaskingDecoder
from gpuinfer.text.diffusion.unmasking_plan import (
    CanvasLayout,
    Choose,
    PlannedPrompt,
    UnmaskingPlan,
    decoder_for,
    laid_out,
    plan_of,
    planned_prompt,
)
from gpuinfer.text.generator.fault_isolation import FaultIsolation, row_failed
from gpuinfer.text.generator.prompts import Prepared, PromptWork, prepare, refuse_unfit
from gpuinfer.text.generator.slotted import SlottedGenerator, Stepped
from gpuinfer.text.language import Language
from gpuinfer.text.text_roofline import step_extent
from gpuinfer.text.transformer import Decoder


class DiffusionGenerator(SlottedGenerator[CanvasRow]):
    """Fills masks in. Give it to a `Driver`, or step it yourself. It launches no step
    ahead, whatever `goes_ahead` says.

    `enter` is called with the station of the time ledger: "prefill" (a step that is mostly prompt, for the first time),
    "forward", "sample", "reply".
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
        choose: Choose = decoder_for,
        **common: Any,
    ) -> None:
        """`choose` finds unmasking decoders: by default those that are installed. `common`: see `SlottedGenerator`."""
        shape = decoder.shape
        if shape.masking is None:
            raise UsageError(f"a model of family {shape.family} fills no masks in: it goes from left to right.")
        super().__init__(decoder, language, **common)
        mask_token = shape.masking.mask_token
        self._attention, self._choose = shape.masking.block, choose
        self._scorer = Scorer(
            shape.vocabulary,
            decoder.device,
            threads=threads,
            seed=seed,
            end_tokens=end_tokens,
            mask_token=mask_token,
        )
        self._slots = CanvasSlots(decoder.slots, decoder.length, mask_token, decoder.pages)
        self._composer = CanvasComposer(self._slots, shape, step_tokens)
        self._unmasker = Unmasker(self._slots)
        self._blender = Blender(decoder, mask_token, threads)
        self.answers: UnmaskingApplier = UnmaskingApplier(
            self._slots, language, shape.vocabulary, end_tokens, self._most_parts_s, self._adapters.give_back
        )
        self._waited = 0  # rows that waited for pages, as of the last step
        self._faults: FaultIsolation[CanvasRow] = FaultIsolation(self._slots.rows, self.facts.get("model"))

    @property
    def free_slots(self) -> int:
        return self._slots.free

    @property
    def pages_in_use(self) -> int:
        pool = self._slots.pool
        return pool.pages - pool.withheld - len(pool)

    def drop_cached(self) -> int:
        return 0  # canvases share nothing

    def return_memory(self) -> None:
        if self.decoder.pages_go_back:
            self.decoder.give_back(self._slots.pool.free_pages)
        self.decoder.drop_graphs()

    def resize(self, slots: int, pages: int) -> tuple[int, int]:
        """See `SlottedGenerator.resize`. Canvases keep their pages, and slots are as many as there are pages for."""
        pool = self._slots.pool
        if self.decoder.pages_go_back:
            more = pool.pages - pages - pool.withheld
            if more < 0:
                pool.restore(-more)
            else:
                self.decoder.give_back(pool.withhold(min(more, len(pool))))
        return self.slots, pool.pages - pool.withheld

    def prepare(
        self, prompts: Sequence[Prompt], enter: Callable[[str], None] = lambda station: None
    ) -> list[Prepared | Exception]:
        plans: list[UnmaskingPlan | WorkError] = []
        for prompt in prompts:
            try:
                plans.append(plan_of(prompt, self.decoder.shape, self._choose, self.slots))
            except WorkError as problem:
                plans.append(problem)
        good = [prompt for prompt, plan in zip(prompts, plans, strict=True) if isinstance(plan, UnmaskingPlan)]
        ready = iter(prepare(self.language, good, self.decoder, enter, self._adapters.refuse_unknown))
        return [self._ready(next(ready), plan) if isinstance(plan, UnmaskingPlan) else plan for plan in plans]

    def add(self, ticket: Hashable, prepared: Prepared) -> None:
        if not isinstance(prepared, PlannedPrompt):
            raise ValueError("this prompt was prepared for a model that goes from left to right.")
        super().add(ticket, prepared)

    def _add(self, work: PromptWork[CanvasRow], now: float) -> None:
        prepared = work.prepared
        assert isinstance(prepared, PlannedPrompt)
        self.answers.begin(work)
        layout = self._layout(prepared, prepared.plan)
        for number in range(prepared.samples):
            row = CanvasRow(self.language, work, number, prepared.plan, layout)
            if prepared.computes(number):
                work.rows.append(row)
                self._slots.add(row)
            else:
                self.answers.conclude(row, now)

    def step(self) -> Stepped:
        self._begin(self._slots.place())
        plan = self._compose()
        if plan is None:
            return Stepped(*self.answers.take())
        try:
            logits, scored, asked = self._run(plan)
        except Exception as error:  # noqa: BLE001  whose fault it is must be found out
            self._after_failure(plan, error.with_traceback(None))  # its frames hold on to the memory
            return Stepped(*self.answers.take())
        self.enter("reply")
        self._faults.passed()
        for turn in plan.turns:
            turn.row.passed(turn.last, decided=bool(len(turn.asked)))
        committed = self._unmask(asked, scored)
        self._blend(asked, logits)
        before, self._waited = self._waited, self._slots.waited
        useful = self.answers.settle([turn.row for turn in asked], time.perf_counter())
        return Stepped(
            *self.answers.take(),
            rows=len(plan.turns),
            tokens=len(plan.step.tokens),
            prompt_tokens=plan.prompt_tokens,
            output_tokens=useful,
            held=plan.held,
            positions=plan.positions,
            committed=sum(committed),
            idle=committed.count(0),
            waited=self._slots.waited - before,
            extent=step_extent(plan.step),
        )

    def close(self) -> None:
        self._scorer.close()
        self._blender.close()
        self.decoder.close()

    def _ready(self, prepared: Prepared | BadPrompt, plan: UnmaskingPlan) -> PlannedPrompt | BadPrompt:
        if isinstance(prepared, BadPrompt):
            return prepared
        try:
            refuse_unfit(self._layout(prepared, plan).end, self.decoder.pages, plan.slots)
        except BadPrompt as problem:
            return problem
        return planned_prompt(prepared, plan)

    def _layout(self, prepared: Prepared, plan: UnmaskingPlan) -> CanvasLayout:
        return laid_out(len(prepared.tokens), prepared.limit, plan.block, self._attention, self.decoder.length)

    def _begin(self, rows: Sequence[CanvasRow]) -> None:
        """Call `begin` of the rows' decoders."""
        for row in rows:
            try:
                with blame.calling_within(row.plan.decoder, "begin"):
                    row.kept = row.plan.decoder.begin()
            except Exception as error:  # noqa: BLE001  a plugin's: its row fails alone
                self.answers.fail(row.work, error)

    def _compose(self) -> CanvasStepPlan | None:
        faults = self._faults
        while (only := faults.only) is not None:
            plan = self._composer.compose(faults.most, only)
            if plan is not None:
                return plan
            faults.passed()
        return self._composer.compose(faults.most, None)

    def _run(self, plan: CanvasStepPlan) -> tuple[Tensor, Scored, list[CanvasTurn]]:
        """The step's logits, their scores, and the turns that they belong to."""
        self.enter("prefill" if 2 * plan.prompt_tokens > len(plan.step.tokens) else "forward")
        logits = self.decoder.forward(plan.step)
        self.enter("sample")
        asked = [turn for turn in plan.turns if len(turn.asked)]
        for turn in asked:
            if turn.row.twin >= 0:
                count = len(turn.asked)
                own, twin = logits.narrow(0, turn.logits, count), logits.narrow(0, turn.twin_logits, count)
                guided(own, twin, turn.row.plan.scale)
        self._adjust(asked, logits)
        needs = frozenset[Any]().union(*(turn.row.plan.decoder.needs for turn in asked))
        scored = self._scorer.score(logits[: plan.outputs], [_asked(turn) for turn in asked], needs)
        for found in (scored.tokens, scored.confidence, scored.margin, scored.entropy):
            if found is not None:
                found.setflags(write=False)  # decoders are shown parts of it
        return logits, scored, asked

    def _adjust(self, asked: list[CanvasTurn], logits: Tensor) -> None:
        """Let decoders change logits. An exception fails the row."""
        for turn in asked.copy():
            if type(turn.row.plan.decoder).adjust is UnmaskingDecoder.adjust:
                continue
            row, decoder = turn.row, turn.row.plan.decoder
            try:
                places = queued(turn.logits + np.searchsorted(turn.asked, row.masks), logits.device)
                own = logits[places].cpu()
                values = own.numpy()
                with blame.calling_within(decoder, "adjust"):
                    decoder.adjust(row.kept, row.masks - row.layout.prompt, values)
                if np.isnan(values).any() or (values == np.inf).any():
                    raise blame.failure(decoder, "adjust left NaN or +inf in the logits")
                logits[places] = own.to(logits.device)
            except Exception as error:  # noqa: BLE001  a plugin's: its row fails alone
                self.answers.fail(row.work, error)
                asked.remove(turn)

    def _unmask(self, asked: Sequence[CanvasTurn], scored: Scored) -> list[int]:
        """How many tokens each of these rows commits."""
        committed = []
        for number, turn in enumerate(asked):
            if not self._slots.has(turn.row):  # another sample of its prompt has failed just now
                continue
            try:
                if number in scored.bad:
                    raise scored.bad[number]
                committed.append(self._unmasker.unmask(turn, scored, number))
            except Exception as error:  # noqa: BLE001  its neighbours go on
                self.answers.fail(turn.row.work, error)
        return committed

    def _blend(self, asked: Sequence[CanvasTurn], logits: Tensor) -> None:
        """Embeddings of the remaining masks for the next step, where their decoder blends them."""
        for turn in asked:
            row = turn.row
            if type(row.plan.decoder).blend is UnmaskingDecoder.blend or not row.step or not self._slots.has(row):
                continue
            decoder = row.plan.decoder
            try:
                with blame.calling_within(decoder, "blend"):
                    share = float(decoder.blend(row.kept, row.step))  # of the expected embedding, added to masks
                if not math.isfinite(share):
                    raise blame.failure(decoder, f"blend returned {share}")
                places = turn.logits + np.searchsorted(turn.asked, row.masks)
                row.blended = self._blender.blended(logits, places, share) if share else None
            except Exception as error:  # noqa: BLE001  a plugin's, or memory: its row fails alone
                self.answers.fail(row.work, error)

    def _after_failure(self, plan: CanvasStepPlan, error: Exception) -> None:
        rows = [turn.row for turn in plan.turns]
        if len(rows) == 1 and is_out_of_memory(error):
            too_large = BackendError(
                f"out of memory on a single row of {len(plan.step.tokens)} positions: {first_line(error)}. Ask for "
                "fewer tokens or a shorter block, or use fewer slots (-B slots=N), a shorter context (--context N), "
                "or --dtype bfloat16."
            )
            self.answers.fail(rows[0].work, too_large)
            return
        guilty = self._faults.failed(rows, len(plan.step.tokens), error)
        if guilty is not None:
            self.answers.fail(guilty.work, row_failed(error))


def _asked(turn: CanvasTurn) -> Asked:
    """The turn's masks as the scorer takes them; its tokens too where they may be edited."""
    row, ready = turn.row, turn.row.work.prepared
    sample = ready.first_sample + row.number
    return Asked(ready.sampling, ready.key, sample, turn.logits, turn.asked - row.layout.prompt, row.steps_done)
