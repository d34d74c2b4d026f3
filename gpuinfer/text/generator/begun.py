"""Answers that have begun elsewhere: their first tokens are known, and checked before they take a slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Prompt
from gpuinfer.text.generator.ending import END_TOKEN, Ending, ending
from gpuinfer.text.generator.seams import Ints, Language, Matcher
from gpuinfer.text.versions import Spans


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """What is known of one sample's answer."""

    tokens: Ints  # int32, from the first on
    ending: Ending | None  # None: it goes on after them
    matcher: Matcher | None  # where they lead in the constraint
    versions: Spans  # of the weights that drew them
    processed: tuple[float, ...]  # one for each, where they are wanted


def begun_of(
    language: Language, prompt: Prompt, limit: int, vocabulary: int, matcher: Matcher | None
) -> tuple[Begun, ...]:
    """One for each sample, or none if nothing has begun. `limit`: the most tokens of an answer.

    Raises `BadPrompt` for tokens that no answer to this prompt begins with, as far as can be told without the model.
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
        _Replay(language, prompt, sample, limit, matcher).of(_checked(tokens, sample, limit, vocabulary))
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


class _Replay:
    """One sample's tokens told to all that watches an answer, as if they were being drawn."""

    def __init__(self, language: Language, prompt: Prompt, sample: int, limit: int, matcher: Matcher | None) -> None:
        self._prompt, self._sampling, self._sample, self._limit = prompt, prompt.sampling, sample, limit
        self._ends = () if prompt.sampling.ignore_eos else language.end_tokens
        stop = prompt.sampling.stop
        self._growing = language.growing(stop, not prompt.sampling.skip_special_tokens, False) if stop else None
        self._matcher = None if matcher is None else matcher.copy()

    def of(self, tokens: Ints) -> Begun:
        end = None
        for count, token in enumerate(tokens.tolist(), 1):
            end = self._told(token, count)
            if end is not None and count < len(tokens):
                raise _refused(self._sample, f"go on after token {count} of them, which ends the answer")
        return Begun(tokens, end, self._matcher, *_noted(self._prompt, self._sample, len(tokens)))

    def _told(self, token: int, count: int) -> Ending | None:
        if token in self._ends:
            return END_TOKEN
        try:
            return ending(self._sampling, self._growing, self._matcher, token, count, full=count >= self._limit)
        except BadPrompt as error:
            raise _refused(self._sample, f"break the constraint with token {count} of them: {error}") from None


def _noted(prompt: Prompt, sample: int, count: int) -> tuple[Spans, tuple[float, ...]]:
    """What was said of the sample's `count` tokens by whoever drew them. Raises `BadPrompt`."""
    spans: Spans = prompt.begun_versions[sample] if prompt.begun_versions else ()
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
