"""Whatever a row shares its steps with, its answer is that of a plain loop that runs it alone."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import pytest
from counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from text.pages_held import all_free, check_pages
from text.toy import LETTERS, alone, joined, toy_generator

from gpuinfer.generation import Generation, Part, Prompt, Sampling

BEGINNINGS = ["", "the same beginning of them all, ", "the same beginning of some, but not of all. "]
STOPS = [("a",), ("e", "th"), ("qu", "x.")]


@dataclass(frozen=True)
class Arrival:
    """A prompt, the step before which it comes, and the step before which nobody wants it any more; whether its answer
    is given out in parts.
    """

    prompt: Prompt
    step: int
    cancelled: int | None
    parts: bool = False


samplings = st.builds(
    lambda minimum, **given: Sampling(min_tokens=min(minimum, given["max_tokens"]), **given),
    minimum=st.sampled_from([0, 0, 3]),
    max_tokens=st.integers(1, 24),
    temperature=st.sampled_from([0.0, 1.0, 0.7]),
    top_k=st.sampled_from([0, 0, 5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    seed=st.sampled_from([None, None, 3]),
    stop=st.sampled_from([(), (), *STOPS]),
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
arrivals = st.builds(
    Arrival,
    prompts,
    step=st.integers(0, 40),
    cancelled=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 60)),
    parts=st.booleans(),
)
mixes = {
    "coming": st.lists(arrivals, min_size=1, max_size=14),
    "slots": st.integers(3, 5),
    "step_tokens": st.sampled_from([1, 2, 5, 17, 64, 300]),
    "length": st.sampled_from([58, 64, 90]),
    "gather_steps": st.sampled_from([0, 0, 3]),
    "most_parts_s": st.sampled_from([math.inf, 2000.0, 1e-9]),
    "pages": st.sampled_from([None, None, 3, 4, 6]),  # 3 hold the longest row
    "ahead": st.booleans(),
}


def check(coming: list[Arrival], slots: int, step_tokens: int, length: int, **more: Any) -> None:
    generator = toy_generator(slots, length, step_tokens, **more)
    waiting = sorted(enumerate(coming), key=lambda entry: entry[1].step)
    prepared = generator.prepare([arrival.prompt for arrival in coming])
    outcomes: dict[object, object] = {}
    given: dict[object, list[Part]] = defaultdict(list)
    dropped = set()
    step = 0
    while waiting or generator.busy:
        while waiting and waiting[0][1].step <= step and waiting[0][1].prompt.samples <= generator.free_slots:
            number, _ = waiting.pop(0)
            generator.add(number, replace(prepared[number], parts=coming[number].parts))
        dropped |= {n for n, arrival in enumerate(coming) if arrival.cancelled == step and generator.cancel(n)}
        stepped = generator.step()
        check_pages(generator)
        for number, part in stepped.parts:
            assert number not in outcomes
            given[number].append(part)
        for number, outcome in stepped.finished:
            assert number not in outcomes
            outcomes[number] = outcome
        step += 1
        assert step < 3000
    assert outcomes.keys() == set(range(len(coming))) - dropped
    for number, outcome in outcomes.items():
        assert isinstance(outcome, Generation)
        assert outcome.completions == alone(coming[number].prompt, length)
        assert outcome.prompt_tokens == len(prepared[number].tokens)
        assert joined(given[number]) == (list(outcome.completions) if coming[number].parts else [])
    assert generator.free_slots == slots
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
