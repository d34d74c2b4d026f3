"""Prompts: checked and tokenized before they take a slot (`prepare`), and under way (`PromptWork` with its
`SampleRow`s).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from msgspec import structs

from gpuinfer.errors import BadPrompt, PromptTooLong
from gpuinfer.generation import Completion, Logprob, Prompt, Sampling, Unmasking
from gpuinfer.text.generator.adapter_versions import AdapterVersion
from gpuinfer.text.generator.answer import (
    Matcher,
    PartEmitter,
    ResumedAnswer,
    VersionSpans,
    logprob_speller,
    resumed_answers,
    with_version,
)
from gpuinfer.text.generator.page_pool import Ints, PrefixNode, pages_for
from gpuinfer.text.language import IncrementalDetokenizer, Language
from gpuinfer.text.language.list_walks import ListedMatcher
from gpuinfer.text.sampling import check_sampling
from gpuinfer.text.transformer import PAGE, Masking

NAMES = {"options": "decoder_options"}  # of fields that are called otherwise in a request


class PromptShape(Protocol):
    """What prompts are checked against of a model: our own shape of it, or what another engine says."""

    @property
    def family(self) -> str: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def positions(self) -> int: ...  # the longest context it was made for
    @property
    def masking(self) -> Masking | None: ...


def refuse_masks(sampling: Sampling, shape: PromptShape) -> None:
    """Raises `BadPrompt`, which names the field, for options of unmasking where the model has no masks."""
    if sampling.unmasking is None or shape.masking is not None:
        return
    said = unmasking_field(sampling.unmasking)
    raise BadPrompt(
        f"{said} says how a diffusion model fills its masks in, and this is a {shape.family} model, which goes from "
        "left to right. Leave it out, or use a diffusion model."
    )


def unmasking_field(unmasking: Unmasking) -> str:
    """The first field of `unmasking` that a request has set, by its name there."""
    plain, names = Unmasking(), Unmasking.__struct_fields__
    name = next((name for name in names if getattr(unmasking, name) != getattr(plain, name)), "")
    return f"`{NAMES.get(name, name)}`" if name else "`cfg_scale` or `decoder_options`"  # said, but nothing else


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A prompt that has been checked. It takes `samples` slots."""

    tokens: Ints  # int32 [prompt tokens], at least one
    sampling: Sampling
    limit: int  # the most tokens of each answer: as asked, or what the context leaves
    samples: int
    first_sample: int
    key: str
    matcher: Matcher | None  # each sample works on a copy
    parts: bool = False  # the answers are given out while they grow
    begun: tuple[ResumedAnswer, ...] = ()  # of each sample, if any has begun
    adapter: str | None = None  # as the prompt names it: the version is looked up when the prompt is added
    embed: str | None = None  # `Prompt.embed`

    def computes(self, number: int) -> bool:
        """Whether the sample of this number needs any step at all."""
        if self.begun and self.begun[number].ending is not None:
            wanted = self.sampling
            return wanted.logprobs is not None or (number == 0 and wanted.prompt_logprobs is not None)
        return self.limit > 0 or self.sampling.prompt_logprobs is not None


class PromptLimits(Protocol):
    """A decoder's sizes, against which a prompt is checked."""

    @property
    def shape(self) -> PromptShape: ...
    @property
    def slots(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def pages(self) -> int: ...


Enter = Callable[[str], None]
MOST_SAMPLES = 1 << 32  # of one prompt, in all its parts: random numbers tell no more apart


def prepare(
    language: Language,
    prompts: Sequence[Prompt],
    decoder: PromptLimits,
    enter: Enter = lambda station: None,
    refuse_adapter: Callable[[str], None] = lambda name: None,
) -> list[Prepared | BadPrompt]:
    """Each prompt made ready for this decoder, or the error that refuses it. The sampler checks the rest at admission.

    Thread-safe. Tokenizing and compiling constraints may take long: not for an event loop's thread. `enter` is called
    with what is done: "understand" or "constrain". `refuse_adapter` raises `BadPrompt` for one that is not loaded.
    """
    return [
        tokens
        if isinstance(tokens, BadPrompt)
        else _prepare_one(language, prompt, tokens, decoder, enter, refuse_adapter)
        for prompt, tokens in zip(prompts, language.encode(prompts), strict=True)
    ]


def _prepare_one(
    language: Language,
    prompt: Prompt,
    tokens: Ints,
    decoder: PromptLimits,
    enter: Enter,
    refuse_adapter: Callable[[str], None],
) -> Prepared | BadPrompt:
    sampling, length = prompt.sampling, decoder.length
    matcher: Matcher | None = None
    begun: tuple[ResumedAnswer, ...] = ()
    try:
        if prompt.adapter is not None:
            refuse_adapter(prompt.adapter)
        refuse_masks(sampling, decoder.shape)
        refuse_embedding(prompt, decoder)
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
    return Prepared(
        tokens, sampling, limit, samples, first_sample, key, matcher,
        begun=begun, adapter=prompt.adapter, embed=prompt.embed,
    )  # fmt: skip


def _check(prompt: Prompt, decoder: PromptLimits) -> None:
    sampling, slots = prompt.sampling, decoder.slots
    if not sampling.max_tokens or prompt.begun:  # the sampler may not see the prompt
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


def refuse_embedding(prompt: Prompt, decoder: PromptLimits) -> None:
    """Raises `BadPrompt` where the prompt wants an embedding and this decoder has none."""
    if prompt.embed is None:
        return
    if decoder.shape.masking is not None:
        raise BadPrompt("this is a diffusion model, which has no embeddings. Use one that goes from left to right.")
    if not hasattr(decoder, "states"):
        raise BadPrompt(
            "embeddings cannot be had of this model as it is run here: it computes nothing, lies in stages on several "
            "devices, or its engine keeps what it computes to itself. Use --backend inprocess without -B parallel."
        )
    if prompt.samples != 1:
        raise BadPrompt(f"{prompt.samples} samples of an embedding, of which there is one. Ask for one.")


def refuse_unfit(positions: int, pages: int, canvases: int = 1) -> None:
    """Raises `BadPrompt` for a row that has more positions than all pages of the cache."""
    if canvases * pages_for(positions) > pages:
        raise BadPrompt(
            f"prompt and answer may come to {positions} tokens{' twice, as it is guided' if canvases > 1 else ''}, and "
            f"the cache holds {pages * PAGE} in {pages} pages. Ask for fewer tokens (max_tokens), shorten the prompt, "
            f"or start with -B pages={canvases * pages_for(positions)} or more."
        )


def _truncated(prompt: Prompt, tokens: Ints, decoder: PromptLimits) -> Ints:
    """The part of a prompt that fits: it leaves room for `max_tokens`, but keeps at least half of the context."""
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
    """One sample of a prompt: it has a slot until its answer is complete, and pages of the cache unless it waits for
    them.
    """

    __slots__ = (
        "age", "alone", "begun", "computed", "draws", "echoed_from", "first", "followers", "found", "given", "growing",
        "known", "logprobs", "matcher", "node", "number", "owner", "resumed", "shared", "slot", "spares", "versions",
        "waited", "walk", "work",
    )  # fmt: skip

    def __init__(self, language: Language, work: PromptWork[SampleRow], number: int) -> None:
        prepared = work.prepared
        sampling, prompt = prepared.sampling, len(prepared.tokens)
        self.work, self.number, self.slot = work, number, -1
        self.begun = prepared.begun[number] if prepared.begun else None
        self.known = prepared.tokens  # int32: prompt, and the tokens that its answer has begun with
        self.versions: VersionSpans = ((0, work.versions[-1]),)  # of the weights that draw its answer
        if self.begun is not None:
            self.known = np.concatenate([prepared.tokens, self.begun.tokens])
            self.versions = with_version(self.begun.versions, len(self.begun.tokens), work.versions[-1])
        ended = self.begun is not None and self.begun.ending is not None
        self.first = len(self.known) - ended  # how many tokens are prefilled
        self.draws = prepared.limit > 0 and not ended  # whether it draws tokens after them
        self.echoed_from = NEVER  # the position from which on the logits of prefilled tokens are wanted too
        if number == 0 and sampling.prompt_logprobs is not None:
            self.echoed_from = min(max(0, sampling.prompt_logprob_start - 1), prompt - 1)
        elif len(self.known) > prompt and sampling.logprobs is not None:
            self.echoed_from = prompt - 1
        # `growing` looks for stop strings, `given` gives the answer out while it grows
        self.growing, self.given = answer_watchers(language, prepared, number)
        matcher = prepared.matcher if self.begun is None else self.begun.matcher
        self.matcher: Matcher | None = None
        self.walk: ListedMatcher | None = None  # of a list: `SlotTable.walks` moves it on
        if matcher is not None:  # checked first: a Protocol check of None takes 8 µs, as much as all the rest
            if isinstance(matcher, ListedMatcher):
                self.walk = matcher
            else:
                self.matcher = matcher.copy()
        self.logprobs: list[Logprob] | None = None if sampling.logprobs is None else []
        self.followers: tuple[SampleRow, ...] = ()  # rows with the same tokens: they copy what this one computes
        self.age = -1  # how many rows came before it
        self.owner: SampleRow | None = None  # the row whose prefill it waits for
        self.shared = 0  # how many positions of the owner are wanted
        self.node: PrefixNode | None = None  # of the prefix tree: its last page there; None while it has no pages
        self.spares: list[int] = []  # pages that its followers will have
        self.found = 0  # so many of its positions others had computed when it got its pages
        self.alone = False  # it takes nothing over that others have computed, and leaves them nothing
        self.waited = False  # for pages
        self.computed = 0  # so many of its positions had been computed when it last gave its pages back
        self.resumed = False  # the tokens that are prefilled are those of an answer that goes on

    @property
    def may_share(self) -> int:
        """How many of its prefilled tokens another row may have computed: not the last one, nor those whose logits are
        wanted.
        """
        return 0 if self.alone else min(self.first - 1, self.echoed_from)

    def suspend(self, filled: int, answer: Ints | None) -> None:
        """Its pages, which held `filled` positions, are taken away: its tokens are prefilled once more. `answer`: all
        tokens of prompt and answer, if it was past its prefill.
        """
        self.computed = max(self.computed, filled)
        if answer is not None:
            self.known, self.first, self.resumed = answer, len(answer) - 1, True
            self.echoed_from, self.followers = NEVER, ()
        elif filled > self.echoed_from:
            self.echoed_from = filled  # what came before has been given out


def answer_watchers(
    language: Language, prepared: Prepared, number: int
) -> tuple[IncrementalDetokenizer | None, PartEmitter | None]:
    """For the sample of this number: what looks for stop strings, and what gives the answer out while it grows; each
    None where it is not wanted. Both begin behind the tokens that the sample has begun with.
    """
    sampling = prepared.sampling
    if not sampling.stop and not prepared.parts:
        return None, None
    tokens = prepared.begun[number].tokens if prepared.begun else NO_TOKENS
    growing, given = language.detokenizer(sampling.stop, not sampling.skip_special_tokens, prepared.parts), None
    characters = growing.begin(tokens.tolist())
    if prepared.parts:
        before, spell = (characters, len(tokens)), logprob_speller(language, sampling)
        given = PartEmitter(number, growing, pushed=bool(sampling.stop), before=before, spell=spell)
    return growing if sampling.stop else None, given


R = TypeVar("R")


class PromptWork(Generic[R]):
    """One prompt under way, and its `rows`: those of its samples that compute.

    From left to right the first row goes through the prompt and the others copy what it has computed; samples that have
    begun differ, and each goes through its own tokens.
    """

    __slots__ = (
        "adapter", "cached", "completions", "echo", "first_token", "left", "prepared", "rows", "started", "ticket",
        "versions",
    )  # fmt: skip

    def __init__(
        self, ticket: Hashable, prepared: Prepared, started: float, adapter: AdapterVersion | None = None
    ) -> None:
        self.ticket, self.prepared, self.started, self.adapter = ticket, prepared, started, adapter
        self.rows: list[R] = []
        self.left = prepared.samples  # answers that are not complete
        self.completions: list[Completion | None] = [None] * prepared.samples
        self.cached = 0  # tokens of the prompt that another prompt had computed
        self.echo: list[Logprob | None] | None = None  # of the prompt's tokens
        self.first_token = started
        self.versions: tuple[str, ...] = ()  # of the weights that have computed it

    @property
    def adapter_number(self) -> int:
        """The number of its adapter in steps; 0: none."""
        return 0 if self.adapter is None else self.adapter.number
