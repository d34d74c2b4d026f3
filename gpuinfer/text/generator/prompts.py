"""A prompt's tokens and limits, checked before it takes a slot, what a model without masks cannot honour included; a
prompt under way, and its rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from msgspec import structs

from gpuinfer.errors import BadPrompt, PromptTooLong
from gpuinfer.generation import Completion, Logprob, Prompt, Sampling, Unmasking
from gpuinfer.text.generator.adapter_versions import AdapterVersion
from gpuinfer.text.generator.answer import (
    PartEmitter,
    ResumedAnswer,
    VersionSpans,
    logprob_speller,
    resumed_answers,
    with_version,
)
from gpuinfer.text.generator.interfaces import (
    DetokenizerProtocol,
    Ints,
    LanguageProtocol,
    MatcherProtocol,
    WalkProtocol,
)
from gpuinfer.text.generator.page_pool import PrefixNode, pages_for
from gpuinfer.text.sampling import check_sampling
from gpuinfer.text.transformer import PAGE, Shape

NAMES = {"options": "decoder_options"}  # of fields that are called otherwise in a request


def refuse_masks(sampling: Sampling, shape: Shape) -> None:
    """Raises `BadPrompt`, which names the field, where masks are spoken of to a model that has none."""
    if sampling.unmasking is None or shape.masking is not None:
        return
    said = unmasking_field(sampling.unmasking)
    raise BadPrompt(
        f"{said} says how a diffusion model fills its masks in, and this is a {shape.family} model, which goes from "
        "left to right. Leave it out, or use a diffusion model."
    )


def unmasking_field(unmasking: Unmasking) -> str:
    """What is said of masks, by the name that a request has for it: the first of several."""
    plain, names = Unmasking(), Unmasking.__struct_fields__
    name = next((name for name in names if getattr(unmasking, name) != getattr(plain, name)), "")
    return f"`{NAMES.get(name, name)}`" if name else "`cfg_scale` or `decoder_options`"  # said, but nothing else


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A prompt that is known to fit. It takes `samples` slots."""

    tokens: Ints  # int32 [prompt tokens], at least one
    sampling: Sampling
    limit: int  # the most tokens of each answer: as asked, or what the context leaves
    samples: int
    first_sample: int
    key: str
    matcher: MatcherProtocol | None  # each sample works on a copy
    parts: bool = False  # the answers are given out while they grow
    begun: tuple[ResumedAnswer, ...] = ()  # of each sample, if any has begun
    adapter: str | None = None  # as the prompt asks for it: what it means is seen when it is added

    def computes(self, number: int) -> bool:
        """Whether the sample of this number needs any step at all."""
        if self.begun and self.begun[number].ending is not None:
            wanted = self.sampling
            return wanted.logprobs is not None or (number == 0 and wanted.prompt_logprobs is not None)
        return self.limit > 0 or self.sampling.prompt_logprobs is not None


class PromptLimits(Protocol):
    """What a decoder holds at most: all that a prompt is checked against."""

    @property
    def shape(self) -> Shape: ...
    @property
    def slots(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def pages(self) -> int: ...


Enter = Callable[[str], None]
MOST_SAMPLES = 1 << 32  # of one prompt, in all its parts: random numbers tell no more apart


def prepare(
    language: LanguageProtocol,
    prompts: Sequence[Prompt],
    decoder: PromptLimits,
    enter: Enter = lambda station: None,
    refuse_adapter: Callable[[str], None] = lambda name: None,
) -> list[Prepared | BadPrompt]:
    """Each prompt made ready for this decoder, or why that cannot be. The sampler checks the rest as it is admitted.

    Thread-safe. Tokenizing and compiling constraints happen here, so it is no work for an event loop. `enter` is told
    which it is: "understand" or "constrain". `refuse_adapter` raises `BadPrompt` for one that is not loaded.
    """
    return [
        tokens
        if isinstance(tokens, BadPrompt)
        else _prepare_one(language, prompt, tokens, decoder, enter, refuse_adapter)
        for prompt, tokens in zip(prompts, language.encode(prompts), strict=True)
    ]


def _prepare_one(
    language: LanguageProtocol,
    prompt: Prompt,
    tokens: Ints,
    decoder: PromptLimits,
    enter: Enter,
    refuse_adapter: Callable[[str], None],
) -> Prepared | BadPrompt:
    sampling, length = prompt.sampling, decoder.length
    matcher: MatcherProtocol | None = None
    begun: tuple[ResumedAnswer, ...] = ()
    try:
        if prompt.adapter is not None:
            refuse_adapter(prompt.adapter)
        refuse_masks(sampling, decoder.shape)
        _check(prompt, decoder)
        if len(tokens) + min(1, sampling.max_tokens) > length:
            tokens = _truncated(prompt, tokens, decoder)
        limit = min(sampling.max_tokens, length - len(tokens))
        refuse_unfit(len(tokens) + limit, decoder.pages)
        if sampling.constraint is not None:
            enter("constrain")
            matcher = language.matcher(sampling.constraint)
        if prompt.begun:
            begun = resumed_answers(language, prompt, limit, decoder.shape.vocabulary, matcher)
        enter("understand")
    except BadPrompt as problem:
        enter("understand")
        return problem
    samples, first_sample, key = prompt.samples, prompt.first_sample, prompt.key
    return Prepared(tokens, sampling, limit, samples, first_sample, key, matcher, begun=begun, adapter=prompt.adapter)


def _check(prompt: Prompt, decoder: PromptLimits) -> None:
    sampling, slots = prompt.sampling, decoder.slots
    if not sampling.max_tokens or prompt.begun:  # the sampler may not see it
        check_sampling(structs.replace(sampling, max_tokens=max(1, sampling.max_tokens)), decoder.shape.vocabulary)
    if not 1 <= prompt.samples <= slots:
        raise BadPrompt(f"{prompt.samples} samples of one prompt, and there are {slots} slots. Ask for 1 to {slots}.")
    if not 0 <= prompt.first_sample < MOST_SAMPLES:
        raise BadPrompt(f"first_sample is {prompt.first_sample}. Use a number from 0 to {MOST_SAMPLES - 1}.")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise BadPrompt(
            f"min_tokens is {sampling.min_tokens} and max_tokens {sampling.max_tokens}. "
            "Use 0 ≤ min_tokens ≤ max_tokens."
        )


def refuse_unfit(positions: int, pages: int, canvases: int = 1) -> None:
    """Raises `BadPrompt` for a row that all pages of the cache would not hold."""
    if canvases * pages_for(positions) > pages:
        raise BadPrompt(
            f"prompt and answer may come to {positions} tokens{' twice, as it is guided' if canvases > 1 else ''}, and "
            f"the cache holds {pages * PAGE} in {pages} pages. Ask for fewer tokens (max_tokens), shorten the prompt, "
            f"or start with -B pages={canvases * pages_for(positions)} or more."
        )


def _truncated(prompt: Prompt, tokens: Ints, decoder: PromptLimits) -> Ints:
    """What is kept of a prompt that does not fit: it leaves room for `max_tokens`, but never takes less than half of
    the context for that.
    """
    length, most = decoder.length, decoder.shape.positions
    if prompt.truncate is None:
        short = "Shorten it, or use --truncate left or right"
        cure = f"{short}, or a longer context (--context N, up to the model's {most})."
        raise PromptTooLong(
            f"the prompt has {len(tokens)} tokens and the context {length}, one of them at least for the answer. "
            + (cure if length < most else f"The model was made for no more. {short}.")
        )
    keep = max(length - prompt.sampling.max_tokens, length // 2, 1)
    return tokens[len(tokens) - keep :].copy() if prompt.truncate == "left" else tokens[:keep].copy()


NEVER = sys.maxsize
NO_TOKENS: Ints = np.zeros(0, np.int32)


class SampleRow:
    """One sample of a prompt: it has a slot from its placement until its answer is complete, and pages of the cache but
    while it waits for them.
    """

    __slots__ = (
        "age", "alone", "begun", "computed", "draws", "echoed_from", "first", "followers", "found", "given", "growing",
        "known", "logprobs", "matcher", "node", "number", "owner", "resumed", "shared", "slot", "spares", "versions",
        "waited", "walk", "work",
    )  # fmt: skip

    def __init__(self, work: PromptWork, number: int) -> None:
        prepared = work.prepared
        self.work, self.number, self.slot = work, number, -1
        self.begun = prepared.begun[number] if prepared.begun else None
        ended = self.begun is not None and self.begun.ending is not None
        self.known = prepared.tokens  # int32: prompt, and what its answer has begun with
        if self.begun is not None and len(self.begun.tokens):
            self.known = np.concatenate([prepared.tokens, self.begun.tokens])
        self.first = len(self.known) - ended  # so many tokens it goes through at first
        self.draws = prepared.limit > 0 and not ended  # tokens of its own after them
        self.echoed_from = self._echoed_from()  # the place from which on their logits are wanted too
        self.growing: DetokenizerProtocol | None = None  # for stop strings
        self.given: PartEmitter | None = None  # where the answer is given out while it grows
        self.matcher: MatcherProtocol | None = None
        self.walk: WalkProtocol | None = (
            None  # instead of a matcher: where it begins; where it is stands in the slots' arrays
        )
        self.logprobs: list[Logprob] | None = None
        self.versions = self._versions()  # of the weights that have drawn its answer, and will the next token
        self.followers: tuple[SampleRow, ...] = ()  # rows that go through the same: they copy it
        self.age = -1  # how many rows came before it
        self.owner: SampleRow | None = None  # whose prefill it waits for
        self.shared = 0  # how many positions of the owner are wanted
        self.node: PrefixNode | None = None  # of the prefix tree: its last page there; None while it has no pages
        self.spares: list[int] = []  # pages that its followers will have
        self.found = 0  # so many of its positions others had computed when it got its pages
        self.alone = False  # it takes nothing over that others have computed, and leaves them nothing
        self.waited = False  # for pages
        self.computed = 0  # so many of its positions have been computed, when it last had to give its pages back
        self.resumed = False  # the tokens that it goes through are those of an answer that goes on

    @property
    def may_share(self) -> int:
        """How many of its first tokens others may have computed for it: not the last one, nor those whose logits are
        wanted.
        """
        return 0 if self.alone else min(self.first - 1, self.echoed_from)

    def suspend(self, filled: int, answer: Ints | None) -> None:
        """It has lost its pages, which held `filled` positions, and goes through these tokens once more. `answer`: all
        tokens of prompt and answer, if it was past its first ones.
        """
        self.computed = max(self.computed, filled)
        if answer is not None:
            self.known, self.first, self.resumed = answer, len(answer) - 1, True
            self.echoed_from, self.followers = NEVER, ()
        elif filled > self.echoed_from:
            self.echoed_from = filled  # what came before has been told

    def _echoed_from(self) -> int:
        prepared = self.work.prepared
        if self.number == 0 and prepared.sampling.prompt_logprobs is not None:
            return min(max(0, prepared.sampling.prompt_logprob_start - 1), len(prepared.tokens) - 1)
        begun = len(self.known) > len(prepared.tokens)
        return len(prepared.tokens) - 1 if begun and prepared.sampling.logprobs is not None else NEVER

    def _versions(self) -> VersionSpans:
        now = self.work.versions[-1]
        return ((0, now),) if self.begun is None else with_version(self.begun.versions, len(self.begun.tokens), now)


def row_of(language: LanguageProtocol, work: PromptWork, number: int) -> SampleRow:
    """The sample of this number, with all that watches its answer, where its begun tokens have led."""
    row, prepared = SampleRow(work, number), work.prepared
    sampling, tokens = prepared.sampling, NO_TOKENS if row.begun is None else row.begun.tokens
    if sampling.stop or prepared.parts:
        growing = language.growing(sampling.stop, not sampling.skip_special_tokens, prepared.parts)
        characters = growing.begin(tokens.tolist())
        row.growing = growing if sampling.stop else None
        if prepared.parts:
            before, spell = (characters, len(tokens)), logprob_speller(language, sampling)
            row.given = PartEmitter(number, growing, pushed=bool(sampling.stop), before=before, spell=spell)
    matcher = prepared.matcher if row.begun is None else row.begun.matcher
    if isinstance(matcher, WalkProtocol):
        row.walk = matcher
    else:
        row.matcher = None if matcher is None else matcher.copy()
    row.logprobs = None if sampling.logprobs is None else []
    return row


class PromptWork:
    """One prompt: its first row goes through the prompt, the others copy that, and each draws its own answer. Samples
    that have begun differ: each goes through its own tokens.
    """

    __slots__ = (
        "adapter", "cached", "completions", "echo", "first_token", "left", "prepared", "rows", "started", "ticket",
        "versions",
    )  # fmt: skip

    def __init__(
        self, ticket: Hashable, prepared: Prepared, started: float, adapter: AdapterVersion | None = None
    ) -> None:
        self.ticket, self.prepared, self.started, self.adapter = ticket, prepared, started, adapter
        self.rows: list[SampleRow] = []  # those that compute; empty until it is placed
        self.left = prepared.samples
        self.completions: list[Completion | None] = [None] * prepared.samples
        self.cached = 0
        self.echo: list[Logprob | None] | None = None  # of the prompt's tokens
        self.first_token = started
        self.versions: tuple[str, ...] = ()  # of the weights that have computed it

    @property
    def adapter_number(self) -> int:
        """As steps name it; 0: none."""
        return 0 if self.adapter is None else self.adapter.number
