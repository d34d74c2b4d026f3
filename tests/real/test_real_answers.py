"""What a real model answers: what it knows, and token for token what transformers computes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
import torch
from answering import TIE, Answerer, Reference, agreed, greedy
from questions import QUESTIONS

from gpuinfer.generation import Constraint, Generation, Prompt, Sampling

pytestmark = pytest.mark.real

LICENSE = Path(__file__).parents[2] / "LICENSE"  # a long English text
LONG, NEW = 1600, 64  # tokens
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "The three laws of thermodynamics are",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is the difference between a crocodile and an alligator?\nA:",
)
CHATS = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You are a pirate."},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "I sail the seas."},
        {"role": "user", "content": "Where to?\nAnswer in one sentence, \U0001f3f4 please."},
    ],
)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "married": {"type": "boolean"},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog", "fish"]}, "maxItems": 3},
    },
    "required": ["name", "age", "married", "pets"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def known(ours: Answerer) -> Iterator[list[Generation]]:
    """All questions at once, of which there are more than slots."""
    return ours.answer([Prompt(text=text, sampling=greedy(6)) for text, _ in QUESTIONS])


@pytest.mark.parametrize(("number", "expected"), [(n, one) for n, (_, one) in enumerate(QUESTIONS)])
def test_a_question_is_answered_right(known, number, expected):
    [answer] = known[number].completions
    assert answer.text.strip().startswith(expected), QUESTIONS[number]


def test_a_chat_is_answered_right(ours):
    prompt = Prompt(messages=tuple(CHATS[0]), sampling=greedy(32))
    [answer] = ours.completions(prompt)
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("chat", CHATS, ids=["a question", "a conversation with a system message"])
def test_a_chat_is_written_as_transformers_writes_it(ours, reference, chat):
    written = reference.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    expected = reference.tokenizer(written, add_special_tokens=False)["input_ids"]
    assert ours.tokens_of(Prompt(messages=tuple(chat))) == expected


@pytest.fixture(scope="module")
def answers(ours: Answerer) -> list[tuple[list[int], list[int]]]:
    """Tokens of prompts and of their greedy answers, all computed at once."""
    prompts = [Prompt(text=text, sampling=greedy(NEW, ignore_eos=True)) for text in TEXTS]
    prompts += [Prompt(messages=tuple(chat), sampling=greedy(NEW, ignore_eos=True)) for chat in CHATS]
    given = ours.answer(prompts)
    return [(ours.tokens_of(one), list(each.completions[0].tokens)) for one, each in zip(prompts, given, strict=True)]


@pytest.fixture(scope="module")
def shared(answers: list[tuple[list[int], list[int]]], reference: Reference) -> list[tuple[int, bool]]:
    """What `agreed` says of each greedy answer. Tokens that are each the likeliest after all before them are what
    transformers would generate, without a forward for each.
    """
    logits = reference.logits([[*prompt, *answer] for prompt, answer in answers])
    return [
        agreed(found[len(prompt) - 1 : -1], answer) for found, (prompt, answer) in zip(logits, answers, strict=True)
    ]


@pytest.mark.parametrize("number", range(len(TEXTS) + len(CHATS)))
def test_each_greedy_token_is_the_likeliest_by_transformers(answers, shared, number):
    """Up to the first tie: two logits within `TIE` of one another, of which either may be the larger."""
    same, tied = shared[number]
    assert len(answers[number][1]) == NEW
    assert same == NEW or tied, f"they part at token {same}"


def test_hardly_a_greedy_answer_has_a_tie(shared):
    assert sum(same for same, _ in shared) >= 0.8 * NEW * len(shared)


def test_a_greedy_text_is_that_of_transformers_generate(ours, reference):
    prompt = Prompt(messages=tuple(CHATS[0]), sampling=greedy(NEW))
    [answer] = ours.completions(prompt)
    expected = reference.greedy(ours.tokens_of(prompt), NEW)
    assert answer.finish_reason == "stop"  # both end by themselves
    assert list(answer.tokens) == expected
    assert answer.text == reference.tokenizer.decode(expected, skip_special_tokens=True)


def test_a_long_prompt_has_the_probabilities_of_transformers_and_goes_on_alike(ours, reference):
    tokens = reference.tokenizer(LICENSE.read_text())["input_ids"][:LONG]
    sampling = greedy(16, prompt_logprobs=0, ignore_eos=True)
    [generation] = ours.answer([Prompt(tokens=tuple(tokens), sampling=sampling)])
    answer = list(generation.completions[0].tokens)
    [logits] = reference.logits([[*tokens, *answer]])
    expected = torch.log_softmax(logits[: LONG - 1], -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    found = torch.tensor([one.chosen.logprob for one in generation.prompt_logprobs[1:]])
    torch.testing.assert_close(found, expected, atol=TIE, rtol=0)
    same, tied = agreed(logits[LONG - 1 : -1], answer)
    assert same == len(answer) or tied


def test_four_samples_of_a_prompt_differ_and_come_again_with_the_seed(ours):
    prompt = Prompt(text=TEXTS[1], samples=4, sampling=Sampling(max_tokens=24, seed=7), key="one")
    first = [one.text for one in ours.completions(prompt)]
    again = [one.text for one in ours.completions(prompt)]
    assert len(set(first)) == 4
    assert again == first


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_an_answer_in_a_json_schema_is_valid(ours, temperature):
    constraint = Constraint(json_schema=PERSON)
    sampling = Sampling(max_tokens=120, temperature=temperature, seed=3, constraint=constraint)
    messages = ({"role": "user", "content": "Describe a person as JSON."},)
    [answer] = ours.completions(Prompt(messages=messages, sampling=sampling))
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.text), PERSON)


def test_an_answer_ends_before_a_stop_string(ours):
    whole, stopped = (
        ours.completions(Prompt(text="1, 2, 3, 4,", sampling=greedy(20, stop=stop)))[0] for stop in ((), (" 8",))
    )
    assert " 8" in whole.text
    assert stopped.text == whole.text[: whole.text.index(" 8")]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", " 8")
