"""An answer that goes on after tokens that were drawn elsewhere is the answer that never stopped."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import pytest
from counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from text.test_generator_models import TEXTS, opened
from text.test_generator_parts import LANGUAGES, answered, samplings, tokens_of
from text.test_generator_properties import mixes, prompts
from text.tiny import tiny_checkpoint
from text.toy import END, LETTERS, alone, run, toy_generator

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Constraint, Generation, Part, Prompt, Sampling

LENGTH = 64


def streamed(generator, asked: list[Prompt]) -> list[tuple[Generation, list[list[Part]]]]:
    """Each prompt's answer, and its samples' parts."""
    waiting = [(number, one) for number, one in enumerate(generator.prepare(asked))]
    outcomes: dict[object, Generation] = {}
    parts: dict[object, list[Part]] = defaultdict(list)
    while waiting or generator.busy:
        while waiting and waiting[0][1].samples <= generator.free_slots:
            number, prepared = waiting.pop(0)
            generator.add(number, replace(prepared, parts=True))
        stepped = generator.step()
        for number, part in stepped.parts:
            parts[number].append(part)
        outcomes.update(stepped.finished)
    assert generator.free_slots == generator.slots
    for outcome in outcomes.values():
        assert isinstance(outcome, Generation), outcome
    return [
        (outcomes[n], [[part for part in parts[n] if part.sample == sample] for sample in range(one.samples)])
        for n, one in enumerate(asked)
    ]


def tokens_in(parts: list[Part]) -> tuple[int, ...]:
    return tuple(token for part in parts for token in part.tokens)


def text_in(parts: list[Part]) -> str:
    return "".join(part.text for part in parts)


def check_goes_on(make, prompt: Prompt, data: st.DataObject, company: list[Prompt]) -> None:
    """Stop it after some part of each sample, and ask for the rest in a generator of another `make`."""
    [(whole, parts)] = streamed(make(), [prompt])
    # as shares: how many parts there are depends on how fast this machine is
    cuts = [round(data.draw(st.floats(0, 1), label="parts had") * len(own)) for own in parts]
    begun = tuple(tokens_in(own[:cut]) for own, cut in zip(parts, cuts, strict=True))
    resumed = structs.replace(prompt, begun=begun)
    place = data.draw(st.integers(0, len(company)), label="place")
    found = streamed(make(), [*company[:place], resumed, *company[place:]])
    outcome, rest = found.pop(place)
    assert outcome.completions == whole.completions
    assert outcome.prompt_logprobs == whole.prompt_logprobs
    for had, own, cut in zip(parts, rest, cuts, strict=True):
        assert [part.finish_reason is not None for part in own] == [False] * (len(own) - 1) + [True]
        assert tokens_in(had[:cut]) + tokens_in(own) == tokens_in(had)
        if cut < len(had):
            assert text_in(had[:cut]) + text_in(own) == text_in(had)
            again = [logprob for part in own for logprob in part.logprobs or ()]
            assert again == [logprob for part in had[cut:] for logprob in part.logprobs or ()]
    assert [one.completions for one, _ in found] == [one.completions for one, _ in streamed(make(), company)]


@pytest.mark.property
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(prompt=prompts, company=st.lists(prompts, max_size=4), echoed=st.booleans(), mix=st.data(), data=st.data())
def test_an_answer_goes_on_after_the_parts_that_were_sent(prompt, company, echoed, mix, data):
    sampling = structs.replace(prompt.sampling, prompt_logprobs=1 if echoed else None)

    def make():
        keys = ("slots", "step_tokens", "gather_steps", "most_parts_s")
        return toy_generator(length=LENGTH, **{key: mix.draw(mixes[key], label=key) for key in keys})

    check_goes_on(make, structs.replace(prompt, sampling=sampling), data, company)


@pytest.mark.property
@pytest.mark.parametrize("kind", LANGUAGES)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_texts_before_and_after_are_the_whole_in_every_vocabulary(kind, data):
    language = LANGUAGES[kind]
    scripts = data.draw(st.lists(tokens_of(language).filter(bool), min_size=1, max_size=3))
    sampling = data.draw(samplings(language, scripts))
    rates = st.sampled_from([math.inf, 5000.0, 1e-9])
    whole, given = answered(language, scripts, sampling, parts=True, most_parts_s=data.draw(rates))
    own = [[part for part in given if part.sample == sample] for sample in range(len(scripts))]
    # as shares: how many parts there are depends on how fast this machine is
    cuts = [int(data.draw(st.floats(0, 1, exclude_max=True)) * len(parts)) for parts in own]
    begun = tuple(tokens_in(parts[:cut]) for parts, cut in zip(own, cuts, strict=True))
    again, rest = answered(language, scripts, sampling, parts=True, most_parts_s=data.draw(rates), begun=begun)
    assert again.completions == whole.completions
    for sample, (parts, cut) in enumerate(zip(own, cuts, strict=True)):
        after = [part for part in rest if part.sample == sample]
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
        begun = [
            tuple(
                one.tokens[: (len(one.tokens) * (sample + shift)) // 3] for sample, one in enumerate(answer.completions)
            )
            for answer in whole
        ]
        resumed = run(other, [structs.replace(one, begun=had) for one, had in zip(asked, begun, strict=True)])
        assert [one.completions for one in resumed] == [one.completions for one in whole]
        assert [one.prompt_logprobs for one in resumed] == [one.prompt_logprobs for one in whole]
    generator.close()
    other.close()


def test_begun_tokens_go_through_prefill_and_a_long_answer_goes_on_in_the_next_step():
    prompt = Prompt(text="once", sampling=Sampling(max_tokens=50, ignore_eos=True))
    [whole] = alone(prompt)
    generator = toy_generator(step_tokens=64)
    [prepared] = generator.prepare([structs.replace(prompt, begun=(whole.tokens[:48],))])
    generator.add("it", prepared)
    steps = 0
    while generator.busy:
        steps += 1
        finished = generator.step().finished
    assert steps == 2
    assert finished[0][1].completions == (whole,)


def test_samples_that_have_begun_share_the_computing_of_their_prompt():
    prompt = Prompt(text="a prompt that is long enough to share", samples=3, sampling=Sampling(max_tokens=12, seed=1))
    whole = alone(prompt)
    generator = toy_generator()
    [outcome] = run(generator, [structs.replace(prompt, begun=tuple(one.tokens[:5] for one in whole))])
    assert outcome.completions == whole
    prompt_tokens = sum(step.lengths[step.lengths > 1].sum() for step in generator.decoder.steps)
    assert prompt_tokens <= outcome.prompt_tokens + 3 * 6


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
    generator = toy_generator()
    asked = Prompt(text="abc", samples=2, sampling=sampling, begun=(tokens, tokens))
    [(outcome, parts)] = streamed(generator, [asked])
    assert generator.decoder.steps == []
    assert [(one.text, one.stop_reason) for one in outcome.completions] == [(text, cause)] * 2
    for sample, own in enumerate(parts):
        [part] = own
        reason = outcome.completions[sample].finish_reason
        assert part == Part(sample=sample, text="", tokens=(), finish_reason=reason, stop_reason=cause)


UNFIT = {
    "too few samples": (Prompt(text="a", samples=2, begun=((1,),)), "2 samples"),
    "too many tokens": (Prompt(text="a", begun=((1,) * 9,), sampling=Sampling(max_tokens=8)), "at most 8"),
    "no token of the model": (Prompt(text="a", begun=((1, END + 1),)), "vocabulary"),
    "a negative token": (Prompt(text="a", begun=((-1,),)), "vocabulary"),
    "something else": (Prompt(text="a", begun=(("x",),)), "integers"),
    "numbers beyond all": (Prompt(text="a", begun=((1 << 70,),)), "integers"),
    "an end in the midst": (Prompt(text="a", begun=((1, END, 2),)), "after token 2"),
    "a stop in the midst": (
        Prompt(text="a", begun=(letters("stop it"),), sampling=Sampling(stop=("op",))),
        "after token 4",
    ),
    "a sample beyond all": (Prompt(text="a", first_sample=1 << 32), "first_sample"),
    "a broken constraint": (
        Prompt(text="a", begun=(letters("no"),), sampling=Sampling(constraint=Constraint(regex="nn+"))),
        "constraint with token 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("unfit", UNFIT)
def test_tokens_that_no_answer_begins_with_are_refused(unfit):
    prompt, said = UNFIT[unfit]
    [refused] = toy_generator().prepare([prompt])
    assert isinstance(refused, BadPrompt)
    assert said in str(refused)
