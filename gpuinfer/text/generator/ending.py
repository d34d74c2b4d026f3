"""When an answer ends, and what it says then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from gpuinfer.generation import Completion, Logprob, Sampling
from gpuinfer.text.generator.giving import Spell
from gpuinfer.text.generator.seams import Growing, Language, Matcher, Walk
from gpuinfer.text.versions import START, Spans, until


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an answer is complete."""

    reason: Literal["stop", "length"]
    cause: int | str | None = None  # the stop token or string
    silent: bool = False  # its last token is no part of the text


END_TOKEN = Ending("stop", silent=True)
COMPLETE = Ending("stop")
FULL = Ending("length")
NOTHING = Completion(text="", tokens=(), finish_reason="length")


def ending(
    sampling: Sampling,
    growing: Growing | None,
    matcher: Matcher | None,
    token: int,
    count: int,
    *,
    full: bool,
    complete: bool = False,
) -> Ending | None:
    """Whether an answer ends with `token`, its `count`-th, which is not the model's own end token.

    `growing` is there if it has stop strings, `matcher` if it has a constraint: both are told the token. `complete`:
    a list that somebody else follows is complete with it.
    """
    if token in sampling.stop_token_ids:
        return Ending("stop", token, silent=True)
    if growing is not None:
        stop = growing.push(token)
        if stop is not None and count >= sampling.min_tokens:
            return Ending("stop", stop)
    if matcher is not None:
        matcher.advance(token)
        if matcher.complete:
            return COMPLETE
    if complete:
        return COMPLETE
    return FULL if full else None


def spelling(language: Language, sampling: Sampling) -> Spell | None:
    """What adds their names to the tokens of a log-probability, if they are wanted."""
    return partial(language.spelled, special_tokens=not sampling.skip_special_tokens) if sampling.spelled else None


def completion(
    language: Language,
    sampling: Sampling,
    growing: Growing | None,
    tokens: Sequence[int],
    logprobs: Sequence[Logprob] | None,
    end: Ending,
    versions: Spans = START,
    processed: Sequence[float] | None = None,
    walk: Walk | None = None,
) -> Completion:
    """The answer as it is delivered, from all that has been drawn."""
    if isinstance(end.cause, str) and growing is not None:
        text = growing.text
        tokens = tokens[: growing.kept]
    else:
        text = language.decode(tokens[:-1] if end.silent else tokens, not sampling.skip_special_tokens)
    found = None if logprobs is None else tuple(logprobs[: len(tokens)])
    spell = spelling(language, sampling)
    return Completion(
        text=text,
        tokens=tuple(tokens),
        finish_reason=end.reason,
        stop_reason=end.cause,
        logprobs=found if found is None or spell is None else tuple(map(spell, found)),
        processed=None if processed is None else tuple(processed[: len(tokens)]),
        nodes=None if walk is None else walk.nodes(tokens),
        versions=until(versions, len(tokens)),
    )
