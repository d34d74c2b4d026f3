"""An answer of a real model is the same, bit by bit, in any company and on any number of threads."""

from __future__ import annotations

import pytest
from answering import Answerer, greedy

from gpuinfer.generation import Completion, Prompt, Sampling
from gpuinfer.text.generator import setup
from gpuinfer.text.generator.speculation import PromptLookup

pytestmark = pytest.mark.real

NEW = 16  # tokens
TEXTS = [f"Chapter {number}. In the year {1500 + 17 * number}, the king of" for number in range(31)]
SUBJECT = Prompt(
    text="The history of the steam engine begins with",
    sampling=Sampling(max_tokens=NEW, seed=11, logprobs=5, ignore_eos=True),
    key="subject",
)


def company() -> list[Prompt]:
    """31 others, of other lengths and other wishes."""
    return [
        Prompt(
            text=text * (1 + number % 3), sampling=Sampling(max_tokens=4 + number // 2, seed=number), key=str(number)
        )
        for number, text in enumerate(TEXTS)
    ]


def told(completion: Completion) -> list[tuple[int, float, list[tuple[int, float]]]]:
    """Each token with its log-probability, and the likeliest ones beside it, to the last bit."""
    assert completion.logprobs is not None
    return [
        (one.chosen.token, one.chosen.logprob, [(other.token, other.logprob) for other in one.likeliest])
        for one in completion.logprobs
    ]


@pytest.mark.parametrize("place", [0, 31], ids=["the first", "the last"])
def test_an_answer_alone_is_the_answer_among_31_others_bit_by_bit(ours, place):
    [alone] = ours.completions(SUBJECT)
    prompts = company()
    prompts.insert(place, SUBJECT)
    [among] = ours.answer(prompts)[place].completions
    assert told(among) == told(alone)
    assert among.text == alone.text


def test_a_prompt_that_is_there_already_has_the_same_bits(ours):
    """A beginning that other answers share is computed once for all of them."""
    beginning = " ".join(TEXTS[:8])
    prompts = [
        Prompt(text=beginning + text, sampling=greedy(8, logprobs=2), key=str(number))
        for number, text in enumerate(TEXTS[8:16])
    ]
    together = [told(one.completions[0]) for one in ours.answer(prompts)]
    alone = [told(ours.completions(prompt)[0]) for prompt in prompts]
    assert together == alone


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_the_same_on_one_two_and_three_threads(folder, dtype, monkeypatch):
    """In bfloat16 with `--deterministic`. Two threads cannot share nine heads evenly, nor three of keys."""
    monkeypatch.setattr(setup, "cores", lambda: 3)  # more threads than cores are refused
    found = []
    for threads in (1, 2, 3):
        with Answerer(folder, dtype, threads, deterministic=dtype == "bfloat16") as answerer:
            answers = answerer.answer([SUBJECT, *company()[:4]])
        found.append([[told(answers[0].completions[0])], *[one.completions[0].tokens for one in answers]])
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_prompt_look_up_changes_no_bit_and_takes_fewer_steps(folder, ours):
    """Of a text that is written down again, by the likeliest tokens and by drawn ones, among others."""
    text = f"Repeat this text word by word: {' '.join(TEXTS[:6])}"
    prompts = [
        Prompt(
            messages=({"role": "user", "content": text},),
            sampling=Sampling(max_tokens=64, temperature=temperature, seed=3, logprobs=2),
            key="text",
        )
        for temperature in (0.0, 0.8)
    ]
    plain = [told(one.completions[0]) for one in ours.answer([*prompts, SUBJECT])]
    with Answerer(folder) as quick:
        quick.generator.speculate(PromptLookup)
        found = [told(one.completions[0]) for one in quick.answer([*prompts, SUBJECT])]
        counts = quick.counters()
    assert found == plain
    assert counts["accepted"] > 10
