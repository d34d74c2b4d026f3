"""A prompt's tokens and limits, checked before it takes a slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import structs

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.models.text.generator.parts import Ints, Language, Matcher
from gpuinfer.models.text.sampling import check_sampling
from gpuinfer.models.text.step import Decoder


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
        raise BadPrompt(
            f"the prompt has {len(tokens)} tokens and the context {length}, one of them at least for the answer. "
            + (cure if length < most else f"The model was made for no more. {short}.")
        )
    keep = max(length - prompt.sampling.max_tokens, length // 2, 1)
    return tokens[len(tokens) - keep :].copy() if prompt.truncate == "left" else tokens[:keep].copy()
