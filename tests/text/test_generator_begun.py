"""An answer that goes on after tokens that were drawn elsewhere is the answer that never stopped."""

from __future__ import annotations

import math

import pytest
from counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from text.test_generator_models import TEXTS, opened
from text.test_generator_parts import LANGUAGES, answered, samplings, tokens_of
from text.test_generator_properties import mixes, prompts
from text.tiny import tiny_checkpoint
from text.toy import END, LETTERS, add, alone, finish, run, toy_generator

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Constraint, Part, Prompt, Sampling

SLOW = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def parts_of(given, samples):
    return [[part for part in given if part.sample == sample] for sample in range(samples)]


def tokens_in(parts):
    return tuple(token for part in parts for token in part.tokens)


def text_in(parts):
    return "".join(part.text for part in parts)


def check_goes_on(make, prompt: Prompt, data: st.DataObject, company: list[Prompt]) -> None:
    """Stop it after some part of each sample, and ask for the rest in a generator of another `make`."""
    given: list[tuple[int, Part]] = []
    [whole] = run(make(), [prompt], given)
    parts = parts_of([part for _, part in given], prompt.samples)
    # as shares: how many parts there are depends on how fast this machine is
    cuts = [round(data.draw(st.floats(0, 1), label="parts had") * len(own)) for own in parts]
    begun = tuple(tokens_in(own[:cut]) for own, cut in zip(parts, cuts, strict=True))
    place = data.draw(st.integers(0, len(company)), label="place")
    again: list[tuple[int, Part]] = []
    found = run(make(), [*company[:place], structs.replace(prompt, begun=begun), *company[place:]], again)
    outcome = found.pop(place)
    assert outcome.completions == whole.completions
    assert outcome.prompt_logprobs == whole.prompt_logprobs
    rest = parts_of([part for number, part in again if number == place], prompt.samples)
    for had, own, cut in zip(parts, rest, cuts, strict=True):
        assert [part.finish_reason is not None for part in own] == [False] * (len(own) - 1) + [True]
        assert tokens_in(had[:cut]) + tokens_in(own) == tokens_in(had)
        if cut < len(had):
            assert text_in(had[:cut]) + text_in(own) == text_in(had)
            told = [logprob for part in own for logprob in part.logprobs or ()]
            assert told == [logprob for part in had[cut:] for logprob in part.logprobs or ()]
    assert [one.completions for one in found] == [one.completions for one in run(make(), company, [])]


@pytest.mark.property
@SLOW
@given(prompt=prompts, company=st.lists(prompts, max_size=4), echoed=st.booleans(), mix=st.data(), data=st.data())
def test_an_answer_goes_on_after_the_parts_that_were_sent(prompt, company, echoed, mix, data):
    def make():
        keys = ("slots", "step_tokens", "gather_steps", "most_parts_s")
        return toy_generator(**{key: mix.draw(mixes[key], label=key) for key in keys})

    sampling = structs.replace(prompt.sampling, prompt_logprobs=1 if echoed else None)
    check_goes_on(make, structs.replace(prompt, sampling=sampling), data, company)


@pytest.mark.property
@pytest.mark.parametrize("kind", LANGUAGES)
@SLOW
@given(data=st.data())
def test_texts_before_and_after_are_the_whole_in_every_vocabulary(kind, data):
    language = LANGUAGES[kind]
    scripts = data.draw(st.lists(tokens_of(language).filter(bool), min_size=1, max_size=3))
    sampling = data.draw(samplings(language, scripts))
    rates = st.sampled_from([math.inf, 5000.0, 1e-9])
    whole, given = answered(language, scripts, sampling, parts=True, most_parts_s=data.draw(rates))
    own = parts_of(given, len(scripts))
    cuts = [int(data.draw(st.floats(0, 1, exclude_max=True)) * len(parts)) for parts in own]
    begun = tuple(tokens_in(parts[:cut]) for parts, cut in zip(own, cuts, strict=True))
    again, rest = answered(language, scripts, sampling, parts=True, most_parts_s=data.draw(rates), begun=begun)
    assert again.completions == whole.completions
    for parts, after, cut in zip(own, parts_of(rest, len(scripts)), cuts, strict=True):
        assert text_in(parts[:cut]) + text_in(after) == text_in(parts)
        assert tokens_in(parts[:cut]) + tokens_in(after) == tokens_in(parts)


SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
ASKED = {
    "drawn": Sampling(max_tokens=14, top_p=0.95, logprobs=2),
    "penalised": Sampling(max_tokens=14, repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=0.3),
    "stopped": Sampling(max_tokens=24, stop=("e", " t"), min_tokens=4, seed=5, logprobs=0),
    "echoed": Sampling(max_tokens=10, prompt_logprobs=1, logprobs=1, ignore_eos=True),
    "JSON": Sampling(max_tokens=24, constraint=Constraint(json_schema=SCHEMA)),
    "a regex": Sampling(max_tokens=20, constraint=Constraint(regex="[a-f]{3,9}( x+)?"), top_k=40),
}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gpt2"])
def test_models_give_the_same_bits_after_any_number_of_tokens(family):
    generator, other = (opened(tiny_checkpoint(family), slots=n, step_tokens=m) for n, m in ((6, 24), (4, 9)))
    asked = [
        Prompt(text=text, key=name, samples=1 + number % 3, sampling=sampling)
        for number, (text, (name, sampling)) in enumerate(zip(TEXTS, ASKED.items(), strict=False))
    ]
    whole = run(generator, asked)
    for shift in range(3):
        resumed = []
        for one, answer in zip(asked, whole, strict=True):
            each = enumerate(answer.completions)
            begun = tuple(one.tokens[: (len(one.tokens) * (sample + shift)) // 3] for sample, one in each)
            resumed.append(structs.replace(one, begun=begun))
        for one, answer in zip(run(other, resumed), whole, strict=True):
            assert one.completions == answer.completions
            assert one.prompt_logprobs == answer.prompt_logprobs
    generator.close()
    other.close()


def test_begun_tokens_go_through_prefill_which_samples_share_and_a_long_answer_goes_on_in_the_next_step():
    prompt = Prompt(text="once", sampling=Sampling(max_tokens=50, ignore_eos=True))
    [whole] = alone(prompt)
    generator, steps = toy_generator(step_tokens=64), []
    add(generator, structs.replace(prompt, begun=(whole.tokens[:48],)))
    assert finish(generator, steps.append)[0].completions == (whole,)
    assert len(steps) == 2

    prompt = Prompt(text="a prompt that is long enough to share", samples=3, sampling=Sampling(max_tokens=12, seed=1))
    whole, generator = alone(prompt), toy_generator()
    [outcome] = run(generator, [structs.replace(prompt, begun=tuple(one.tokens[:5] for one in whole))])
    assert outcome.completions == whole
    computed = sum(step.lengths[step.lengths > 1].sum() for step in generator.decoder.steps)
    assert computed <= outcome.prompt_tokens + 3 * 6


def letters(text: str) -> tuple[int, ...]:
    return tuple(map(LETTERS.index, text))


ENDED = {
    "an end token": (Sampling(), (*letters("so"), END), "so", None),
    "a stop token": (Sampling(stop_token_ids=letters("x")), letters("sox"), "so", letters("x")[0]),
    "all tokens": (Sampling(max_tokens=3), letters("sox"), "sox", None),
    "a complete constraint": (Sampling(constraint=Constraint(choice=("sox", "soy"))), letters("sox"), "sox", None),
    "a stop string": (Sampling(stop=("ox",)), letters("sox"), "s", "ox"),
}


@pytest.mark.parametrize("ended", ENDED)
def test_a_sample_that_has_ended_is_not_computed_and_yields_its_finish(ended):
    sampling, tokens, text, cause = ENDED[ended]
    generator, given = toy_generator(), []
    [outcome] = run(generator, [Prompt(text="abc", samples=2, sampling=sampling, begun=(tokens, tokens))], given)
    assert generator.decoder.steps == []
    assert [(one.text, one.stop_reason) for one in outcome.completions] == [(text, cause)] * 2
    reason = outcome.completions[0].finish_reason
    assert [part for _, part in given] == [
        Part(sample=sample, text="", tokens=(), finish_reason=reason, stop_reason=cause) for sample in range(2)
    ]


OP, NN = Sampling(stop=("op",)), Sampling(constraint=Constraint(regex="nn+"))
UNFIT = {
    "too few samples": (Prompt(text="a", samples=2, begun=((1,),)), "2 samples"),
    "too many tokens": (Prompt(text="a", begun=((1,) * 9,), sampling=Sampling(max_tokens=8)), "at most 8"),
    "no token of the model": (Prompt(text="a", begun=((1, END + 1),)), "vocabulary"),
    "a negative token": (Prompt(text="a", begun=((-1,),)), "vocabulary"),
    "something else": (Prompt(text="a", begun=(("x",),)), "integers"),
    "numbers beyond all": (Prompt(text="a", begun=((1 << 70,),)), "integers"),
    "an end in the midst": (Prompt(text="a", begun=((1, END, 2),)), "after token 2"),
    "a stop in the midst": (Prompt(text="a", begun=(letters("stop it"),), sampling=OP), "after token 4"),
    "a sample beyond all": (Prompt(text="a", first_sample=1 << 32), "first_sample"),
    "a broken constraint": (Prompt(text="a", begun=(letters("no"),), sampling=NN), "constraint with token 2"),
}


@pytest.mark.parametrize("unfit", UNFIT)
def test_tokens_that_no_answer_begins_with_are_refused(unfit):
    prompt, said = UNFIT[unfit]
    [refused] = toy_generator().prepare([prompt])
    assert isinstance(refused, BadPrompt)
    assert said in str(refused)
