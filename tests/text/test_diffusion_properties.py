"""Whatever a row shares its steps with, its answer is the one that it has alone, bit for bit."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
from counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from text.company import arrivals, check_company
from text.toy import LETTERS
from text.unmasking import KINDS, decoder_of, generator_over, run

from gpuinfer.config import registry
from gpuinfer.generation import Completion, Generation, Part, Prompt, Sampling, Unmasking
from gpuinfer.text.diffusion.unmasking_plan import with_threshold

LENGTH = 72
NAMES = registry.names("decoders")
OPTIONS = {"block-refinement": {"edit_threshold": 0.3}, "dream": {"algorithm": "margin", "temperature": 0.5}}


def prompts(kind: str) -> st.SearchStrategy[Prompt]:
    causal = KINDS[kind].block is not None
    unmaskings = st.builds(
        lambda decoder, threshold, own, **given: Unmasking(
            decoder=decoder,
            threshold=threshold if decoder in with_threshold() else None,
            options=OPTIONS.get(decoder, {}) if own else {},
            **given,
        ),
        own=st.booleans(),
        decoder=st.sampled_from(NAMES),
        threshold=st.sampled_from([None, 0.3, 0.9]),
        steps=st.sampled_from([None, 1, 3, 8, 40]),
        block_length=st.sampled_from([None, KINDS[kind].block, 2] if causal else [None, 1, 4, 7, 30]),
        cache=st.sampled_from(["none", "exact"] if causal else ["none", "prefix", "dual", "vicinity"]),
        cfg_scale=st.sampled_from([0.0, 0.0, 0.0, 1.5]),
    )
    samplings = st.builds(
        lambda minimum, **given: Sampling(min_tokens=min(minimum, given["max_tokens"]), **given),
        minimum=st.sampled_from([0, 0, 5]),
        max_tokens=st.integers(0, 26),
        temperature=st.sampled_from([0.0, 0.0, 0.8]),
        top_k=st.sampled_from([0, 0, 5]),
        seed=st.sampled_from([None, 3]),
        stop=st.sampled_from([(), (), ("e",), ("a", "th")]),
        stop_token_ids=st.sampled_from([(), (), (4, 7)]),
        ignore_eos=st.booleans(),
        logprobs=st.sampled_from([None, None, 2]),
        unmasking=unmaskings,
    )
    return st.builds(
        Prompt,
        text=st.text(LETTERS, min_size=1, max_size=40),
        sampling=samplings,
        samples=st.sampled_from([1, 1, 1, 2]),
        first_sample=st.sampled_from([0, 4]),
        key=st.sampled_from(["", "one"]),
    )


@st.composite
def mixes(draw: Any) -> dict[str, Any]:
    kind = draw(st.sampled_from(list(KINDS)))
    return {
        "kind": kind,
        "coming": draw(st.lists(arrivals(prompts(kind), 20), min_size=1, max_size=9)),
        "slots": draw(st.integers(2, 5)),
        "step_tokens": draw(st.sampled_from([1, 24, 100, 1000])),
        "most_parts_s": draw(st.sampled_from([math.inf, 2000.0, 1e-9])),
    }


@functools.cache
def lone(kind: str) -> Any:
    return generator_over(decoder_of(kind, 2, LENGTH), step_tokens=1000)


def alone(kind: str, prompt: Prompt) -> tuple[Completion, ...]:
    """Each sample by itself, with nothing else there."""
    numbers = range(prompt.first_sample, prompt.first_sample + prompt.samples)
    each = [run(lone(kind), [structs.replace(prompt, samples=1, first_sample=number)])[0] for number in numbers]
    return tuple(completion for outcome in each for completion in outcome.completions)


def check(kind, coming, slots, step_tokens, most_parts_s):
    generator, useful = generator_over(decoder_of(kind, slots, LENGTH), step_tokens, most_parts_s), []

    def watch(stepped):
        assert stepped.tokens <= stepped.positions
        useful.append(stepped.output_tokens)

    outcomes, dropped = check_company(generator, coming, lambda prompt: alone(kind, prompt), watch)
    if not dropped and not any(arrival.prompt.sampling.stop for arrival in coming):
        assert sum(useful) == sum(len(one.tokens) for outcome in outcomes.values() for one in outcome.completions)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mixes())
def test_an_answer_is_its_own_in_any_company(mix):
    check(**mix)


@pytest.mark.soak
@pytest.mark.timeout(14_400)
@settings(max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mixes())
def test_an_answer_is_its_own_in_any_company_many_times(mix):
    check(**mix)


@st.composite
def interrupted(draw: Any) -> tuple[str, Prompt, list[float]]:
    kind = draw(st.sampled_from(list(KINDS)))
    prompt = draw(prompts(kind))
    return kind, prompt, [draw(st.floats(0, 1)) for _ in range(prompt.samples)]


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(interrupted())
def test_an_answer_that_is_taken_up_elsewhere_goes_on_as_if_it_had_never_stopped(case):
    kind, prompt, shares = case
    whole = alone(kind, prompt)
    begun = tuple(one.tokens[: round(share * len(one.tokens))] for one, share in zip(whole, shares, strict=True))
    given: list[tuple[int, Part]] = []
    (outcome,) = run(lone(kind), [structs.replace(prompt, begun=begun)], given)
    assert isinstance(outcome, Generation), outcome
    assert outcome.completions == whole
    for sample, (one, before) in enumerate(zip(whole, begun, strict=True)):
        parts = [part for _, part in given if part.sample == sample]
        assert tuple(token for part in parts for token in part.tokens) == one.tokens[len(before) :]
        assert one.text.endswith("".join(part.text for part in parts))
        assert [part.finish_reason for part in parts[-1:]] == [one.finish_reason]
