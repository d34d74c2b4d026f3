"""Whatever a row shares its steps with, its answer is that of a plain loop that runs it alone."""

from __future__ import annotations

import math

import pytest
from counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from text.company import arrivals, check_company
from text.guessing import FreeTokens, guessing
from text.pages_held import all_free, check_pages
from text.toy import LETTERS, alone, toy_generator

from gpuinfer.generation import Prompt, Sampling

BEGINNINGS = ["", "the same beginning of them all, ", "the same beginning of some, but not of all. "]

samplings = st.builds(
    lambda minimum, **given: Sampling(min_tokens=min(minimum, given["max_tokens"]), **given),
    minimum=st.sampled_from([0, 0, 3]),
    max_tokens=st.integers(1, 24),
    temperature=st.sampled_from([0.0, 1.0, 0.7]),
    top_k=st.sampled_from([0, 0, 5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    seed=st.sampled_from([None, None, 3]),
    stop=st.sampled_from([(), (), ("a",), ("e", "th"), ("qu", "x.")]),
    stop_token_ids=st.sampled_from([(), (), (4,), (1, 25)]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, None, 2]),
)
prompts = st.builds(
    lambda beginning, text, **given: Prompt(text=beginning + text, **given),
    beginning=st.sampled_from(BEGINNINGS),
    text=st.text(LETTERS, max_size=12),
    sampling=samplings,
    samples=st.sampled_from([1, 1, 1, 2, 3]),
    first_sample=st.sampled_from([0, 0, 4]),
    key=st.sampled_from(["", "one", "two"]),
)
mixes = {
    "coming": st.lists(arrivals(prompts, 40), min_size=1, max_size=14),
    "slots": st.integers(3, 5),
    "step_tokens": st.sampled_from([1, 2, 5, 17, 64, 300]),
    "length": st.sampled_from([58, 64, 90]),
    "gather_steps": st.sampled_from([0, 0, 3]),
    "most_parts_s": st.sampled_from([math.inf, 2000.0, 1e-9]),
    "pages": st.sampled_from([None, None, 3, 4, 6]),  # 3 hold the longest row
    "ahead": st.booleans(),
    "right": st.sampled_from([None, None, 0.5, 0.9, 1.0]),  # of proposed tokens; None: none is proposed
    "most": st.sampled_from([1, 3, 15, 31]),
}


def check(coming, right, most, **more):
    generator = toy_generator(**more)
    length = generator.decoder.length
    if right is not None:
        generator.speculate(guessing(length, right), most, FreeTokens())
    check_company(generator, coming, lambda one: alone(one, length), lambda stepped: check_pages(generator))
    all_free(generator)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(**mixes)
def test_an_answer_is_its_own_in_any_company(**mix):
    check(**mix)


@pytest.mark.soak
@settings(max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(**mixes)
def test_an_answer_is_its_own_in_any_company_many_times(**mix):
    check(**mix)
