"""The ways to ask a diffusion model. Each must give the answers that a prompt gets alone, but for caches that change
what is computed: for each of them the check counts the tokens that it changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import msgspec
import numpy as np

from gpuinfer.errors import WorkError
from gpuinfer.generation import Completion, Prompt, Sampling, Unmasking
from gpuinfer.lab.verify.divergence import AnswerDivergence, Difference
from gpuinfer.lab.verify.probed_answers import IDLE_STEPS, SAMPLES, SOME, Answers, RouteOptions, VerifyQuestion
from gpuinfer.lab.verify.verify_setup import Item, VerifySetup
from gpuinfer.serving.openai.sampling_fields import unmasking_of

APPROXIMATE = ("prefix", "dual", "vicinity")  # caches of models whose tokens see those after them
Check = tuple[str, Callable[[], Difference]]
Answered = list[Completion]  # by the number of the ask


@dataclass(frozen=True, slots=True)
class DiffusionRoute:
    """One answer. Those of one item, sampling and sample are compared."""

    item: Item
    sampling: Sampling
    sample: int = 0
    samples: int = 1

    @property
    def prompt(self) -> Prompt:
        return Prompt(
            tokens=tuple(self.item.tokens.tolist()),
            sampling=self.sampling,
            samples=self.samples,
            first_sample=self.sample,
            key=f"verify-{hash(self.item.tokens.tobytes())}",
        )


class DiffusionChecks:
    """All checks of one rig, in their order."""

    def __init__(self, opened: VerifySetup) -> None:
        options = opened.options
        self._rig = opened
        self._own = unmasking_of(options) or Unmasking()
        self._likeliest = self._sampling(0.0)
        self._asks = [DiffusionRoute(item, self._likeliest) for item in opened.items]
        self._alone: Answered = []

    def _sampling(self, temperature: float, **changed: object) -> Sampling:
        return Sampling(
            max_tokens=self._rig.options.new_tokens,
            temperature=temperature,
            top_p=1.0 if temperature == 0.0 else 0.95,
            ignore_eos=True,
            logprobs=0,
            unmasking=msgspec.structs.replace(self._own, **changed),
        )

    def answer_alone(self) -> Answered:
        """Ask each prompt alone: what all else is compared with."""
        self._alone = self._one_by_one(self._asks)
        return self._alone

    def checks(self) -> Iterator[Check]:
        """After `answer_alone`."""
        options, count = self._rig.options, len(self._asks)
        slots, some = self._rig.generator.slots, min(SOME, self._rig.generator.slots)
        for size in options.batch_sizes:
            places = [i % count for i in range(max(size, count))]
            yield f"{size} at once = alone", partial(self._against_alone, places, size, f"{size} at once")
        order = np.random.default_rng(self._rig.setup.seed).permutation(count).tolist()
        yield "any order = alone", partial(self._against_alone, order, some, "another order")
        yield "any company = alone", partial(self._in_company, some)
        drawn = [DiffusionRoute(item, self._sampling(0.9)) for item in self._rig.items]
        yield "drawn, at once = alone", partial(self._drawn, drawn, some)
        if (samples := min(SAMPLES, slots // self._width)) > 1:
            yield f"{samples} samples = one by one", partial(self._several, drawn, samples, some)
        if self._rig.decoder.shape.masking.block is not None:  # type: ignore[union-attr]  # it is a diffusion model
            yield "exact cache = none", partial(self._cached, "exact", "none", some)
            return
        for cache in APPROXIMATE:
            yield f"{cache} cache ~ none", partial(self._cached, cache, "none", some)

    @property
    def _width(self) -> int:
        """Slots of one answer: one that is guided has a second canvas."""
        return 2 if self._own.cfg_scale else 1

    def _against_alone(self, places: Sequence[int], rows: int, side: str) -> Difference:
        """The prompts at these places, so many rows at once."""
        asks = [self._asks[place] for place in places]
        return self._compared(
            asks, [self._alone[place] for place in places], self._at_once(asks, rows), (side, "alone")
        )

    def _in_company(self, some: int) -> Difference:
        """Between each two rows one that is filled in otherwise, and is of another length."""
        other = msgspec.structs.replace(
            self._sampling(1.0, decoder="random", steps=None, threshold=None, options={}),
            max_tokens=max(1, self._rig.options.new_tokens // 2),
        )
        mixed = [ask for one in self._asks for ask in (DiffusionRoute(one.item, other), one)]
        return self._compared(self._asks, self._alone, self._at_once(mixed, some)[1::2], ("other company", "alone"))

    def _drawn(self, asks: Sequence[DiffusionRoute], some: int) -> Difference:
        return self._compared(asks, self._one_by_one(asks), self._at_once(asks, some), ("at once", "alone"))

    def _several(self, asks: Sequence[DiffusionRoute], samples: int, some: int) -> Difference:
        singly = [DiffusionRoute(one.item, one.sampling, sample) for one in asks for sample in range(samples)]
        several = [DiffusionRoute(one.item, one.sampling, 0, samples) for one in asks]
        together = self._at_once(several, max(some, samples * self._width))
        return self._compared(singly, self._at_once(singly, 1), together, ("several samples", "one by one"))

    def _cached(self, cache: str, other: str, some: int) -> Difference:
        """An exact cache changes nothing; for an approximate one the check reports how many tokens it changes."""
        sides = []
        for one in (cache, other):
            sampling = self._sampling(0.0, cache=one)
            sides.append(self._at_once([DiffusionRoute(item, sampling) for item in self._rig.items], some))
        finding = self._compared(self._asks, sides[1], sides[0], (cache, other))
        if cache in APPROXIMATE:
            finding.status, finding.divergences = "told", []
            tokens = [(a, b) for x, y in zip(*sides, strict=True) for a, b in zip(x.tokens, y.tokens, strict=True)]
            changed = sum(a != b for a, b in tokens)
            finding.compared, finding.unit = len(tokens), "tokens"
            finding.why = f"{changed} of {len(tokens):,} tokens differ ({changed / max(1, len(tokens)):.1%})"
        return finding

    def _one_by_one(self, asks: Sequence[DiffusionRoute]) -> Answered:
        return [answer for ask in asks for answer in self._at_once([ask], 1)]

    def _at_once(self, asks: Sequence[DiffusionRoute], rows: int) -> Answered:
        """So many rows under way, or as many as one of them needs."""
        generator = self._rig.generator
        waiting = deque(enumerate(generator.prepare([ask.prompt for ask in asks])))
        found: dict[int, tuple[Completion, ...]] = {}
        under_way = idle = 0
        while waiting or generator.busy:
            while waiting:
                number, prepared = waiting[0]
                if isinstance(prepared, Exception):
                    raise WorkError(f"a prompt was refused: {prepared}") from prepared
                if prepared.samples > generator.free_slots or (under_way and under_way + prepared.samples > rows):
                    break
                generator.add(number, prepared)
                under_way += prepared.samples
                waiting.popleft()
            stepped = generator.step()
            for ticket, outcome in stepped.finished:
                if isinstance(outcome, Exception):
                    raise WorkError(f"a prompt failed: {outcome}") from outcome
                found[cast(int, ticket)] = outcome.completions
                under_way -= asks[cast(int, ticket)].samples * self._width
            idle = 0 if stepped.tokens or stepped.finished else idle + 1
            if idle > IDLE_STEPS:
                raise WorkError("the generator goes on without doing anything. Please report this.")
        return [one for number in range(len(asks)) for one in found[number]]

    def _compared(
        self, asks: Sequence[DiffusionRoute], known: Answered, others: Answered, sides: tuple[str, str]
    ) -> Difference:
        """On the CPU a row's bits depend on nothing else. On a GPU the order of sums may, and near-ties fall otherwise:
        that fails where the same bits are demanded.
        """
        finding = Difference("", compared=len(others))
        for number, (ask, one, other) in enumerate(zip(asks, known, others, strict=True)):
            mine, theirs = _chosen_tokens(one), _chosen_tokens(other)
            if mine != theirs:
                finding.divergences.append(_parting(ask, number, mine, theirs, sides))
            for (first, sure), (second, surer) in zip(mine, theirs, strict=True):
                if first != second:
                    break
                finding.difference = max(finding.difference, abs(sure - surer))
        if finding.divergences:
            exact = self._rig.decoder.device.type == "cpu" or self._rig.setup.deterministic
            finding.status, finding.why = "fails" if exact else "told", finding.divergences[0].why
        return finding


Chosen = list[tuple[int, float]]


def _chosen_tokens(answer: Completion) -> Chosen:
    """Each token with its log-probability at the step that committed it."""
    return [(token, told.chosen.logprob) for token, told in zip(answer.tokens, answer.logprobs or (), strict=True)]


def _parting(
    ask: DiffusionRoute, number: int, mine: Chosen, theirs: Chosen, sides: tuple[str, str]
) -> AnswerDivergence:
    """The first token in which two answers differ, or the first whose log-probability does."""
    place = next(i for i, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1])
    (first, sure), (second, surer) = mine[place], theirs[place]
    changed = sum(a[0] != b[0] for a, b in zip(mine, theirs, strict=True))
    why = f"{sides[1]} has token {first} there ({sure:.4g}), {sides[0]} token {second} ({surer:.4g}); "
    why += f"{changed} of {len(mine)} tokens differ"
    return AnswerDivergence(ask.item.text, number, ask.sample, place, (first, second), {}, tie=False, why=why)


def half_filled(opened: VerifySetup, answers: Answered) -> Answers:
    """Canvases on which every other token of an answer is still a mask, for `positions.sequences`: it leaves the last
    token of an answer out, so that they have one more.
    """
    mask = opened.decoder.shape.masking.mask_token  # type: ignore[union-attr]  # it is a diffusion model
    asks = [VerifyQuestion(item, number) for number, item in enumerate(opened.items)]
    canvases = [
        tuple(token if place % 2 else mask for place, token in enumerate((*answer.tokens, mask))) for answer in answers
    ]
    return Answers(RouteOptions("half filled in", asks, Sampling()), [[canvas] for canvas in canvases])
