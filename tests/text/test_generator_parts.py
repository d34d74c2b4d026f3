"""Answers given out while they grow: joined, the parts are the answer, in every vocabulary and however it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from text.test_language_growing import LANGUAGES, tokens_of
from text.toy import LETTERS, ToyDecoder, add, joined, prompt, run, toy_generator

from gpuinfer.generation import Candidate, Generation, Logprob, Prompt, Sampling
from gpuinfer.text.generator import Generator


class Blind(ToyDecoder):
    """Computes nothing: the sampler knows what comes."""

    def __init__(self, slots: int, vocabulary: int) -> None:
        super().__init__(slots, 128)
        self.shape = replace(self.shape, vocabulary=vocabulary)

    def forward(self, step):
        return torch.zeros(len(step.wanted), 1)


@dataclass
class Dictated:
    """Draws for each sample the tokens of its script, one after another."""

    scripts: Sequence[Sequence[int]]
    remembers = False

    def __post_init__(self) -> None:
        self._at: dict[int, tuple[int, int]] = {}

    def admit(self, slot, sampling, prompt_tokens, key, sample, begun):
        self._at[slot] = sample, len(begun)

    def release(self, slot):
        del self._at[slot]

    def begin(self, logits, slots, masks):
        drawn = np.array([self._next(slot) for slot in slots.tolist()], np.int32)
        told = self.given_logprobs(logits, drawn, 0)
        found = SimpleNamespace(tokens=drawn, logprobs=told, processed=None, bad={})
        return SimpleNamespace(tokens=torch.from_numpy(drawn), finish=lambda kept: found, ready=True)

    def given_logprobs(self, logits, tokens, wanted):
        return [Logprob(Candidate(token, -1.0 - token, 1)) for token in tokens.tolist()]

    def _next(self, slot):
        sample, at = self._at[slot]
        self._at[slot] = sample, at + 1
        return self.scripts[sample][at]

    def close(self): ...


def answered(language, scripts, sampling, parts, most_parts_s=math.inf, begun=()):
    """The answer, and what was given out of it, step by step."""
    how = {"seed": 0, "end_tokens": language.end_tokens, "step_tokens": 32, "threads": 1, "deterministic": True}
    decoder = Blind(len(scripts), language.vocabulary)
    generator = Generator(decoder, language, sampler=Dictated(scripts), most_parts_s=most_parts_s, **how)
    asked = Prompt(tokens=(1,), samples=len(scripts), sampling=sampling, begun=begun)
    given = [] if parts else None
    [outcome] = run(generator, [asked], given)
    return outcome, [part for _, part in given or ()]


@st.composite
def samplings(draw: st.DrawFn, language, scripts) -> Sampling:
    """Stop strings of which most occur in the answers; whatever else ends one early or changes its text."""
    text = "".join(language.decode(script) for script in scripts)
    within = st.tuples(st.integers(0, 40), st.integers(1, 6)).map(lambda at: text[at[0] : sum(at)])
    stop = draw(st.lists(st.one_of(within, st.text("ab 日�", max_size=3)), max_size=3))
    longest = min(map(len, scripts))
    return Sampling(
        max_tokens=longest,
        min_tokens=draw(st.integers(0, longest)),
        stop=tuple(one for one in stop if one),
        stop_token_ids=draw(st.sampled_from([(), (), tuple(scripts[0][-2:])])),
        ignore_eos=draw(st.booleans()),
        skip_special_tokens=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 0])),
    )


@pytest.mark.property
@pytest.mark.parametrize("kind", LANGUAGES)
@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_parts_joined_are_the_answer_and_nothing_changes_because_they_are_read(kind, data):
    language = LANGUAGES[kind]
    scripts = data.draw(st.lists(tokens_of(language).filter(bool), min_size=1, max_size=3))
    sampling = data.draw(samplings(language, scripts))
    whole, nothing = answered(language, scripts, sampling, parts=False)
    most_parts_s = data.draw(st.sampled_from([math.inf, 5000.0, 1e-9]))
    streamed, given = answered(language, scripts, sampling, parts=True, most_parts_s=most_parts_s)
    assert isinstance(whole, Generation), whole
    assert nothing == []
    assert streamed.completions == whole.completions
    assert joined(given) == list(whole.completions)


@pytest.mark.parametrize(
    ("text", "max_tokens", "told"),
    [
        ("a the tx", 8, [("a", 1), (" ", 1), ("the tx", 6)]),
        ("a the end", 8, [("a", 1), (" ", 1), ("the en", 6)]),
        ("a the end", 9, [("a", 1), (" ", 1), ("", 0)]),
    ],
)
def test_what_a_stop_string_may_take_back_waits(text, max_tokens, told):
    script, sampling = list(map(LETTERS.index, text)), Sampling(max_tokens=max_tokens, stop=("the end",))
    _, given = answered(toy_generator().language, [script], sampling, parts=True)
    assert [(part.text, len(part.tokens)) for part in given] == told


def test_with_many_readers_a_part_holds_several_tokens_but_the_first_token_does_not_wait():
    generator = toy_generator(most_parts_s=1e-9, ahead=False)

    def counts(steps):
        return [{number: len(part.tokens) for number, part in generator.step().parts} for _ in range(steps)]

    add(generator, prompt("abc", 9), parts=True)
    sizes = counts(3)
    add(generator, prompt("abd", 9), first=1, parts=True)
    sizes += counts(8)
    assert sizes == [{0: 1}, {}, {}, {0: 3, 1: 1}, *[{}] * 4, {0: 5}, {}, {}]


def test_a_prompt_of_which_nothing_is_wanted_gives_out_its_end():
    for sampling in (Sampling(max_tokens=0), Sampling(max_tokens=0, prompt_logprobs=1)):
        given = []
        [outcome] = run(toy_generator(), [Prompt(text="abc", samples=2, sampling=sampling)], given)
        parts = [part for _, part in given]
        assert joined(parts) == list(outcome.completions)
        assert [part.sample for part in parts] == [0, 1]
