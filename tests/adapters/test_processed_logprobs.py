"""The log-probability of each token under the distribution that it was drawn from, against the definitions in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from random_adapters import stepped
from text.sampling_reference import PATHS, draw, edited, filtered, mask_of, sampler
from text.toy import alone, joined, prompt, run, toy_generator

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Sampling
from gpuinfer.text.answer_frames import DeliveredAnswer

VOCABULARY_HERE = 50
ENDS = (0,)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.8, 1.0, 1.7, 20.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 20, 50]),
    top_p=st.sampled_from([1.0, 1.0, 0.2, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    min_tokens=st.sampled_from([0, 3]),
    logit_bias=st.sampled_from([{}, {3: 2.5, 7: -4.0}]),
    processed_logprobs=st.just(True),
)


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=examples(60), deadline=None)
@given(SAMPLINGS, st.integers(0, 1 << 30), st.booleans())
def test_it_is_that_of_the_filtered_distribution(path, sampling, seed, constrained):
    dice = np.random.default_rng(seed)
    found, answer = sampler(path, 2, VOCABULARY_HERE, seed=seed, end_tokens=ENDS), []
    given_tokens = np.array([3, 3, 9], np.int32)
    found.admit(1, sampling, given_tokens, "k", 0)
    for _ in range(4):
        logits = (dice.standard_normal((1, VOCABULARY_HERE)) * 3).astype(np.float32)
        allowed = sorted(dice.choice(VOCABULARY_HERE, 12, replace=False).tolist()) if constrained else None
        masks = None if allowed is None else mask_of(allowed, VOCABULARY_HERE)[None]
        drawn = draw(found, logits, [1], masks)
        counts = edited(logits[0], sampling, given_tokens.tolist(), answer, ENDS)
        if allowed is not None:
            counts[np.setdiff1d(np.arange(VOCABULARY_HERE), allowed)] = -np.inf
        (token,) = drawn.tokens.tolist()
        answer.append(token)
        chances = filtered(counts, sampling)
        if chances[token] > 0:  # else a limit fell between two that are equal but for rounding
            near = filtered_near(counts, sampling)
            assert min(abs(drawn.processed[0] - math.log(one[token])) for one in near if one[token] > 0) < 1e-5


def filtered_near(counts, sampling):
    """The distribution, and those whose limits lie a rounding away."""
    shifted = [structs.replace(sampling, top_p=min(1.0, sampling.top_p * (1 + part))) for part in (-1e-6, 0.0, 1e-6)]
    return [filtered(counts, one) for one in shifted]


@pytest.mark.parametrize("path", PATHS)
def test_at_temperature_0_it_is_0_and_who_does_not_ask_gets_none(path):
    found = sampler(path, 3, VOCABULARY_HERE)
    logits = np.random.default_rng(0).standard_normal((3, VOCABULARY_HERE)).astype(np.float32)
    for slot, wanted in enumerate((False, True, True)):
        found.admit(slot, Sampling(temperature=slot % 2, processed_logprobs=wanted), np.zeros(0, np.int32))
    drawn = draw(found, logits)
    assert drawn.processed[2] == 0.0
    assert drawn.processed[1] < 0
    for slot in (1, 2):
        found.release(slot)
    assert draw(found, logits[:1], [0]).processed is None


def asked(text, count=9, samples=1, **more):
    sampling = Sampling(max_tokens=count, ignore_eos=True, processed_logprobs=True, logprobs=0, **more)
    return structs.replace(prompt(text, count, samples), sampling=sampling)


def test_of_unfiltered_answers_it_is_the_models_own():
    """Beside rows that do not ask, and in parts."""
    prompts = [asked("ab", samples=2), prompt("cd", 7), asked("e", 5)]
    for one, answer in zip(prompts, run(toy_generator(), prompts), strict=True):
        for completion, wanted in zip(answer.completions, alone(one), strict=True):
            assert completion.tokens == wanted.tokens
            if not one.sampling.processed_logprobs:
                assert completion.processed is None
                continue
            own = [logprob.chosen.logprob for logprob in completion.logprobs]
            assert completion.processed == pytest.approx(own, abs=1e-5)
            assert len(completion.processed) == len(completion.tokens)
    whole, parts = stepped(toy_generator(), prompts[0], {})
    assert joined(parts) == list(whole.completions)


def test_a_stop_string_cuts_it_with_its_tokens_and_no_tokens_have_none():
    base = alone(prompt("ab", 9))[0]
    [cut, none] = run(toy_generator(), [asked("ab", stop=(base.text[3:5],)), asked("ab", 0)])
    assert len(cut.completions[0].processed) == len(cut.completions[0].tokens) == 3
    assert none.completions[0].processed == ()


def test_who_goes_on_elsewhere_keeps_it_and_tokens_without_theirs_are_refused():
    one = asked("ab", top_k=5, temperature=0.7, samples=2)
    whole, parts = stepped(toy_generator(), one, {})
    for cut in (0, 1, 4, 9):
        had = DeliveredAnswer(one)
        for part in parts[: 2 * cut]:
            had.fresh(part)
        again, _ = stepped(toy_generator(), had.rest(), {})
        assert again.completions == whole.completions
    begun = structs.replace(asked("ab"), begun=((1, 2),))
    for bad in (begun, structs.replace(begun, begun_processed=((-0.5,),))):
        with pytest.raises(BadPrompt, match="begun_processed"):
            stepped(toy_generator(), bad, {})
