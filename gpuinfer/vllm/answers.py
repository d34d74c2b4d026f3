"""What vLLM drew, as `Completion`, `Part` and `Logprob`: an answer ends, and says, what one of our own engine would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from msgspec import structs

from gpuinfer.generation import Candidate, Completion, Logprob, Part, Sampling
from gpuinfer.text.generator.ending import END_TOKEN, FULL, NOTHING, Ending, completion, ending, spelling
from gpuinfer.text.generator.giving import Given
from gpuinfer.text.generator.prepared import Prepared
from gpuinfer.text.generator.seams import Growing, Language, Matcher, Walk
from gpuinfer.text.versions import START, Spans, then, until


class Answer:
    """One sample's answer as its tokens come."""

    def __init__(self, language: Language, prepared: Prepared, number: int) -> None:
        self._language, self.sampling, self._limit = language, prepared.sampling, prepared.limit
        self._ends = frozenset(() if prepared.sampling.ignore_eos else language.end_tokens)
        self.tokens: list[int] = []
        self.logprobs: list[Logprob] | None = None if prepared.sampling.logprobs is None else []
        begun = prepared.begun[number] if prepared.begun else None
        self.processed: list[float] | None = None
        if prepared.sampling.processed_logprobs:
            self.processed = [] if begun is None else list(begun.processed)
        self.begun: list[int] = [] if begun is None else begun.tokens.tolist()
        self.versions: Spans = START if begun is None else begun.versions or START
        self.growing: Growing | None = None
        self.given: Given | None = None
        self._watch(prepared, number)
        matcher = prepared.matcher if begun is None else begun.matcher
        self.matcher: Matcher | None = None if matcher is None else matcher.copy()
        listed = prepared.sampling.constraint is not None and prepared.sampling.constraint.listed is not None
        self.walk = cast(Walk, prepared.matcher) if listed else None
        self.tokens += self.begun
        self.end: Ending | None = None if begun is None else begun.ending

    def _watch(self, prepared: Prepared, number: int) -> None:
        sampling = prepared.sampling
        if not (sampling.stop or prepared.parts):
            return
        growing = self._language.growing(sampling.stop, not sampling.skip_special_tokens, prepared.parts)
        characters = growing.begin(self.begun)
        self.growing = growing if sampling.stop else None
        if prepared.parts:
            before, spell = (characters, len(self.begun)), spelling(self._language, sampling)
            self.given = Given(number, growing, pushed=bool(sampling.stop), before=before, spell=spell)

    @property
    def watched(self) -> bool:
        """Whether it may end at a token at which vLLM would not end it, or somebody reads along."""
        endless = self.walk is not None and not self._ends  # nothing would end it when its list has
        return self.growing is not None or self.given is not None or endless

    def push(self, tokens: Sequence[int]) -> bool:
        """These tokens have been drawn. Whether the answer is complete; what comes after its end is dropped."""
        for token in tokens:
            if self.end is not None:
                break
            self.tokens.append(token)
            self.end = self._ended(token)
        return self.end is not None

    def _ended(self, token: int) -> Ending | None:
        if token in self._ends:
            return END_TOKEN
        count = len(self.tokens)
        full = count >= self._limit
        return ending(self.sampling, self.growing, self.matcher, token, count, full=full)

    def changed(self, version: str, at: int | None = None) -> None:
        """From token `at` on it is computed by these weights; None: from the next that comes."""
        self.versions = then(self.versions, len(self.tokens) if at is None else at, version)

    def more(self) -> Part | None:
        """What has become certain since the last time."""
        if self.given is None:
            return None
        return self.given.more(np.asarray(self.tokens, np.int32), self.logprobs, self.processed, self.versions)

    def complete(self) -> tuple[Completion, Part | None]:
        """The whole answer, and the last part where it is given out."""
        growing = self.growing if self.sampling.stop else None
        answer = completion(
            self._language,
            self.sampling,
            growing,
            self.tokens,
            self.logprobs,
            self.end or FULL,
            self.versions,
            self.processed,
            self.walk,
        )
        return answer, None if self.given is None else self.given.rest(answer)

    def nothing(self) -> tuple[Completion, Part | None]:
        """The answer of which no token is wanted."""
        answer = structs.replace(NOTHING, versions=until(self.versions, 0))
        return answer, None if self.given is None else self.given.finish(answer)


def logprob_of(token: int, found: Mapping[int, Any], most: int) -> Logprob:
    """One position of vLLM's: token id → its `Logprob`, those of the `most` likeliest and of the chosen one."""
    chosen = found[token]
    likeliest: tuple[Candidate, ...] = ()
    if most:
        ranked = sorted(found.items(), key=lambda item: item[1].rank)
        likeliest = tuple(Candidate(one, float(of.logprob), int(of.rank)) for one, of in ranked)
        likeliest = tuple(one for one in likeliest if 1 <= one.rank <= most)  # 0: a server has not told it
    return Logprob(Candidate(token, float(chosen.logprob), int(chosen.rank)), likeliest)


def echo_of(tokens: Sequence[int], found: Sequence[Any], most: int) -> tuple[Logprob | None, ...]:
    """vLLM's log-probabilities of a prompt; the first token has none."""
    return tuple(None if of is None else logprob_of(token, of, most) for token, of in zip(tokens, found, strict=False))


def processed_of(sampling: Sampling, token: int, found: Mapping[int, Any] | None) -> float:
    """Of the distribution that the token was drawn from. The likeliest token is taken for certain: 0."""
    if sampling.temperature == 0.0 or found is None:
        return 0.0
    return float(found[token].logprob)
