"""One sample's answer under way: parts that are given out while it grows, when it ends and its final form, the tokens
with which it resumes an earlier attempt, and which weights drew which tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Completion, Logprob, Part, Prompt, Sampling
from gpuinfer.text.generator.page_pool import Ints
from gpuinfer.text.language import GrammarMatcher, IncrementalDetokenizer, Language
from gpuinfer.text.language.list_walks import ListedMatcher

VersionSpans = tuple[tuple[int, str], ...]
Matcher = GrammarMatcher | ListedMatcher

START_SPANS: VersionSpans = ((0, ""),)
"""All tokens by the weights of the start; no spans mean the same."""


def with_version(spans: VersionSpans, at: int, version: str) -> VersionSpans:
    """The spans with `version` from token `at` on."""
    kept = tuple(span for span in spans if span[0] < at)
    if not kept:
        kept = ((0, ""),) if at else ()
    return kept if kept and kept[-1][1] == version else (*kept, (at, version))


def versions_until(spans: VersionSpans, count: int) -> VersionSpans:
    """The spans of the first `count` tokens; at least one span."""
    kept = tuple(span for span in spans if span[0] < max(count, 1))
    return kept if kept and not kept[0][0] else (START_SPANS[0], *kept)


def versions_begun_in(spans: VersionSpans, start: int, end: int | None = None) -> VersionSpans:
    """The spans of a `Part` with the tokens from `start` to before `end`; None: the sample's last part."""
    return tuple(
        span for span in spans if span != START_SPANS[0] and start <= span[0] and (end is None or span[0] < end)
    )


Spell = Callable[[Logprob], Logprob]

MOST_PARTS_S = 2000.0  # parts a second, to all readers together; a first token does not wait


class PartEmitter:
    """How much of one sample's answer has been given out.

    `pushed`: the caller pushes each token to `growing`, to see whether it completes a stop string. `before`: characters
    and tokens that have been given out elsewhere; `growing` has these tokens. `spell`: adds texts to the tokens of a
    log-probability.
    """

    __slots__ = ("_drawn", "_growing", "_pushed", "_sample", "_spell", "characters", "tokens")

    def __init__(
        self,
        sample: int,
        growing: IncrementalDetokenizer,
        *,
        pushed: bool = False,
        before: tuple[int, int] = (0, 0),
        spell: Spell | None = None,
    ) -> None:
        self._sample, self._growing, self._pushed, self._spell = sample, growing, pushed, spell
        self.characters, self.tokens = before  # given out
        self._drawn = self.tokens  # tokens that `growing` has

    def more(
        self,
        answer: NDArray[np.int32],
        logprobs: Sequence[Logprob] | None,
        processed: Sequence[float] | None,
        versions: VersionSpans,
    ) -> Part | None:
        """The text and tokens that have become certain since the last call; None when there are none.

        `answer`: int32 [tokens], all that have been drawn.
        """
        if not self._pushed:
            for token in answer[self._drawn :].tolist():
                self._growing.push(token)
            self._drawn = len(answer)
        start = self.tokens
        text, self.tokens = self._growing.settled()
        if start == self.tokens and not text:
            return None
        self.characters += len(text)
        found = None if logprobs is None else tuple(logprobs[start : self.tokens])
        return Part(
            sample=self._sample,
            text=text,
            tokens=tuple(answer[start : self.tokens].tolist()),
            logprobs=found if found is None or self._spell is None else tuple(map(self._spell, found)),
            processed=None if processed is None else tuple(processed[start : self.tokens]),
            versions=versions_begun_in(versions, start, self.tokens),
        )

    def finish(self, answer: Completion) -> Part:
        """The last part of an answer that has been given out elsewhere."""
        self.characters, self.tokens = len(answer.text), len(answer.tokens)
        return self.rest(answer)

    def rest(self, answer: Completion) -> Part:
        """The rest of a complete answer: the sample's last part, which may hold no token."""
        return Part(
            sample=self._sample,
            text=answer.text[self.characters :],
            tokens=answer.tokens[self.tokens :],
            logprobs=None if answer.logprobs is None else answer.logprobs[self.tokens :],
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            processed=None if answer.processed is None else answer.processed[self.tokens :],
            versions=versions_begun_in(answer.versions, self.tokens),
        )


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an answer is complete."""

    reason: Literal["stop", "length"]
    cause: int | str | None = None  # the stop token or string
    silent: bool = False  # its last token is no part of the text


END_TOKEN = Ending("stop", silent=True)
COMPLETE = Ending("stop")
FULL = Ending("length")
NO_COMPLETION = Completion(text="", tokens=(), finish_reason="length")


def find_ending(
    sampling: Sampling,
    growing: IncrementalDetokenizer | None,
    matcher: Matcher | None,
    token: int,
    count: int,
    *,
    full: bool,
    complete: bool = False,
) -> Ending | None:
    """Whether an answer ends with `token`, its `count`-th, which is not the model's own end token.

    The token is pushed to `growing`, which is there for stop strings, and to `matcher`, which is there for a
    constraint. `complete`: a list that the caller follows is complete with it.
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


def logprob_speller(language: Language, sampling: Sampling) -> Spell | None:
    """A function that adds texts to the tokens of a log-probability; None: they are not wanted."""
    return partial(language.spell_out, special_tokens=not sampling.skip_special_tokens) if sampling.spelled else None


def completion(
    language: Language,
    sampling: Sampling,
    growing: IncrementalDetokenizer | None,
    tokens: Sequence[int],
    logprobs: Sequence[Logprob] | None,
    end: Ending,
    versions: VersionSpans = START_SPANS,
    processed: Sequence[float] | None = None,
    walk: ListedMatcher | None = None,
) -> Completion:
    """The answer as it is delivered, from all that has been drawn."""
    if isinstance(end.cause, str) and growing is not None:
        text = growing.text
        tokens = tokens[: growing.kept]
    else:
        text = language.decode(tokens[:-1] if end.silent else tokens, not sampling.skip_special_tokens)
    found = None if logprobs is None else tuple(logprobs[: len(tokens)])
    spell = logprob_speller(language, sampling)
    return Completion(
        text=text,
        tokens=tuple(tokens),
        finish_reason=end.reason,
        stop_reason=end.cause,
        logprobs=found if found is None or spell is None else tuple(map(spell, found)),
        processed=None if processed is None else tuple(processed[: len(tokens)]),
        nodes=None if walk is None else walk.nodes(tokens),
        versions=versions_until(versions, len(tokens)),
    )


@dataclass(frozen=True, slots=True, eq=False)
class ResumedAnswer:
    """The tokens with which one sample's answer resumes."""

    tokens: Ints  # int32, from the first on
    ending: Ending | None  # None: it goes on after them
    matcher: Matcher | None  # where they lead in the constraint
    versions: VersionSpans  # of the weights that drew them
    processed: tuple[float, ...]  # one for each, where they are wanted


def resumed_answers(
    language: Language, prompt: Prompt, limit: int, vocabulary: int, matcher: Matcher | None
) -> tuple[ResumedAnswer, ...]:
    """One for each sample, or none if no sample resumes. `limit`: the most tokens of an answer.

    Raises `BadPrompt` for tokens that no answer to this prompt begins with, as far as can be checked without the model.
    """
    if not any(len(tokens) for tokens in prompt.begun):
        return ()
    if len(prompt.begun) != prompt.samples:
        raise BadPrompt(
            f"begun has {len(prompt.begun)} entries, and the prompt {prompt.samples} samples. Give one for each, "
            "empty for a sample of which nothing is known."
        )
    if len(prompt.begun_versions) not in (0, prompt.samples):
        raise BadPrompt(f"begun_versions has {len(prompt.begun_versions)} entries. Give one for each sample, or none.")
    return tuple(
        _ResumedReplay(language, prompt, sample, limit, matcher).of(_checked(tokens, sample, limit, vocabulary))
        for sample, tokens in enumerate(prompt.begun)
    )


def _checked(given: Any, sample: int, limit: int, vocabulary: int) -> Ints:
    if len(given) > limit:
        raise _refused(sample, f"are {len(given)}, and its answer has at most {limit}")
    try:
        tokens = np.asarray(given, np.int64 if len(given) else np.int32).reshape(len(given))
    except (TypeError, ValueError, OverflowError):
        raise _refused(sample, "are no integers") from None
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise _refused(sample, f"are not all in the model's vocabulary, 0 to {vocabulary - 1}")
    return tokens.astype(np.int32)


class _ResumedReplay:
    """Replays one sample's tokens to stop strings and constraint, as if they were being drawn."""

    def __init__(self, language: Language, prompt: Prompt, sample: int, limit: int, matcher: Matcher | None) -> None:
        self._prompt, self._sampling, self._sample, self._limit = prompt, prompt.sampling, sample, limit
        self._ends = () if prompt.sampling.ignore_eos else language.end_tokens
        stop = prompt.sampling.stop
        self._growing = language.detokenizer(stop, not prompt.sampling.skip_special_tokens, False) if stop else None
        self._matcher = None if matcher is None else matcher.copy()

    def of(self, tokens: Ints) -> ResumedAnswer:
        end = None
        for count, token in enumerate(tokens.tolist(), 1):
            end = self._ending(token, count)
            if end is not None and count < len(tokens):
                raise _refused(self._sample, f"go on after token {count} of them, which ends the answer")
        return ResumedAnswer(tokens, end, self._matcher, *_noted(self._prompt, self._sample, len(tokens)))

    def _ending(self, token: int, count: int) -> Ending | None:
        if token in self._ends:
            return END_TOKEN
        try:
            return find_ending(self._sampling, self._growing, self._matcher, token, count, full=count >= self._limit)
        except BadPrompt as error:
            raise _refused(self._sample, f"break the constraint with token {count} of them: {error}") from None


def _noted(prompt: Prompt, sample: int, count: int) -> tuple[VersionSpans, tuple[float, ...]]:
    """Versions and processed log-probabilities of the sample's `count` tokens, as the prompt has them. Raises
    `BadPrompt`.
    """
    spans: VersionSpans = prompt.begun_versions[sample] if prompt.begun_versions else ()
    starts = [start for start, _ in spans]
    if any(start < 0 for start in starts) or starts != sorted(set(starts)) or (starts and starts[-1] >= max(count, 1)):
        raise _refused(sample, "have versions that begin elsewhere")
    processed: tuple[float, ...] = ()
    if prompt.sampling.processed_logprobs and count:
        processed = prompt.begun_processed[sample] if sample < len(prompt.begun_processed) else ()
        if len(processed) != count:
            raise _refused(sample, "have no processed log-probabilities (`begun_processed`)")
    return spans, processed


def _refused(sample: int, why: str) -> BadPrompt:
    return BadPrompt(
        f"the tokens that sample {sample} has begun with {why}. Give those that were drawn for this very prompt."
    )
