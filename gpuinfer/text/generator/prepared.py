"""A prompt's tokens and limits, checked before it takes a slot.

One prompt under way, and its rows.

What a generator needs of the parts that others make: the language and the sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.errors import BadPrompt, PromptTooLong, RequestError
from gpuinfer.generation import Completion, Constraint, Logprob, Prompt, Sampling
from gpuinfer.text.generator.giving import Given, Growing
from gpuinfer.text.sampling import check_sampling
from gpuinfer.text.step import Decoder

Ints = NDArray[np.int32]


class Matcher(Protocol):
    """Which tokens may come next."""

    @property
    def complete(self) -> bool: ...
    def mask(self, into: Ints) -> None: ...
    def advance(self, token: int) -> None: ...
    def copy(self) -> Matcher: ...


class Language(Protocol):
    """From prompts to tokens and back; `encode` and `matcher` from any thread."""

    @property
    def end_tokens(self) -> tuple[int, ...]: ...
    def encode(self, prompts: Sequence[Prompt]) -> list[Ints | BadPrompt]: ...
    def decode(self, tokens: Sequence[int], special_tokens: bool = False) -> str: ...
    def growing(self, stop: Sequence[str], special_tokens: bool = False) -> Growing: ...
    def matcher(self, constraint: Constraint) -> Matcher: ...


class Drawn(Protocol):
    """The tokens of one draw: int32 [rows], and their log-probabilities where wanted; `bad`: rows that have none."""

    @property
    def tokens(self) -> Ints: ...
    @property
    def logprobs(self) -> Sequence[Logprob | None]: ...
    @property
    def bad(self) -> Mapping[int, RequestError]: ...


class Sampler(Protocol):
    """From logits to tokens, by slot."""

    def admit(self, slot: int, sampling: Sampling, prompt_tokens: Ints, key: str, sample: int) -> None: ...
    def release(self, slot: int) -> None: ...
    def draw(self, logits: Tensor, slots: Ints, masks: Ints | None) -> Drawn: ...
    def prompt_logprobs(self, logits: Tensor, tokens: Ints, wanted: int) -> Sequence[Logprob]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A prompt that is known to fit. It takes `samples` slots."""

    tokens: Ints  # int32 [prompt tokens], at least one
    sampling: Sampling
    limit: int  # the most tokens of each answer: as asked, or what the context leaves
    samples: int
    first_sample: int
    key: str
    matcher: Matcher | None  # each sample works on a copy
    parts: bool = False  # the answers are given out while they grow


Enter = Callable[[str], None]


def prepare(
    language: Language, prompts: Sequence[Prompt], decoder: Decoder, enter: Enter = lambda station: None
) -> list[Prepared | BadPrompt]:
    """Each prompt made ready for this decoder, or why that cannot be. The sampler checks the rest as it is admitted.

    Thread-safe. Tokenizing and compiling constraints happen here, so it is no work for an event loop. `enter` is told
    which it is: "understand" or "constrain".
    """
    return [
        tokens if isinstance(tokens, BadPrompt) else _prepare_one(language, prompt, tokens, decoder, enter)
        for prompt, tokens in zip(prompts, language.encode(prompts), strict=True)
    ]


def _prepare_one(
    language: Language, prompt: Prompt, tokens: Ints, decoder: Decoder, enter: Enter
) -> Prepared | BadPrompt:
    sampling, length = prompt.sampling, decoder.length
    try:
        _check(prompt, decoder)
        if len(tokens) + min(1, sampling.max_tokens) > length:
            tokens = _truncated(prompt, tokens, decoder)
        matcher = None
        if sampling.constraint is not None:
            enter("constrain")
            matcher = language.matcher(sampling.constraint)
            enter("understand")
    except BadPrompt as problem:
        enter("understand")
        return problem
    limit = min(sampling.max_tokens, length - len(tokens))
    return Prepared(tokens, sampling, limit, prompt.samples, prompt.first_sample, prompt.key, matcher)


def _check(prompt: Prompt, decoder: Decoder) -> None:
    sampling, slots = prompt.sampling, decoder.slots
    if prompt.adapter is not None:
        raise BadPrompt(f"it asks for the adapter '{prompt.adapter}', and this model has none. Leave `adapter` out.")
    if not sampling.max_tokens:  # the sampler will not see it
        check_sampling(structs.replace(sampling, max_tokens=1), decoder.shape.vocabulary)
    if not 1 <= prompt.samples <= slots:
        raise BadPrompt(f"{prompt.samples} samples of one prompt, and there are {slots} slots. Ask for 1 to {slots}.")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise BadPrompt(
            f"min_tokens is {sampling.min_tokens} and max_tokens {sampling.max_tokens}. "
            "Use 0 ≤ min_tokens ≤ max_tokens."
        )


def _truncated(prompt: Prompt, tokens: Ints, decoder: Decoder) -> Ints:
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


class Row:
    """One sample of a prompt: it has a slot from its placement until its answer is complete."""

    __slots__ = ("given", "growing", "logprobs", "matcher", "number", "owner", "shared", "slot", "source", "work")

    def __init__(self, work: PromptWork, number: int, slot: int) -> None:
        self.work, self.number, self.slot = work, number, slot
        self.growing: Growing | None = None  # for stop strings
        self.given: Given | None = None  # where the answer is given out while it grows
        self.matcher: Matcher | None = None
        self.logprobs: list[Logprob] | None = None
        self.owner: Row | None = None  # whose prefill it waits for
        self.source, self.shared = -1, 0  # the owner's slot, and how many positions of it are wanted


class PromptWork:
    """One prompt: its first row goes through the prompt, the others copy that, and each draws its own answer."""

    __slots__ = (
        "cached", "completions", "echo", "first_token", "left", "prepared", "rows", "started", "ticket", "versions",
    )  # fmt: skip

    def __init__(self, ticket: Hashable, prepared: Prepared, started: float) -> None:
        self.ticket, self.prepared, self.started = ticket, prepared, started
        self.rows: list[Row] = []  # empty until it is placed
        self.left = prepared.samples
        self.completions: list[Completion | None] = [None] * prepared.samples
        self.cached = 0
        self.echo: list[Logprob | None] | None = None  # of the prompt's tokens
        self.first_token = started
        self.versions: tuple[str, ...] = ()  # of the weights that have computed it
