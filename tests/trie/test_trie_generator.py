"""Answers with a list in them, from a generator of several rows: what a plain loop with masks draws, alone."""

import sys
from pathlib import Path

import numpy as np
import pytest
from listing import is_legal

sys.path.insert(0, str(Path(__file__).parent.parent / "text"))
from toy import END, NOWHERE, VOCABULARY, logits_of, mixed, run, toy_generator, toy_language

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Completion, Constraint, Listed, Prompt, Sampling
from gpuinfer.text.language.grammar import words_of
from gpuinfer.text.sampling import Sampler

LISTED = Listed(
    items=(("x", "cat"), ("x", "car"), ("y", "dog"), ("z", "cat a"), ("z", "do"), ("w", "!")),
    begin="a",
    end=".",
    separator=", ",
)
KINDS = {
    "ending": LISTED,
    "free again": Listed(items=LISTED.items, begin="b", end="!.", separator="? ", ends=False),
    "two letters": Listed(items=LISTED.items, begin="e,", end="?", separator="!,"),
}


def sampling(listed: Listed, **more: object) -> Sampling:
    return Sampling(max_tokens=50, constraint=Constraint(listed=listed), **more)


def plain(prompt: Prompt, length: int = 64, seed: int = 7) -> list[Completion]:
    """Token by token, with the masks of a matcher."""
    return [_plain(prompt, number, length, seed) for number in range(prompt.samples)]


def _plain(prompt: Prompt, number: int, length: int, seed: int) -> Completion:
    language, wanted = toy_language(), prompt.sampling
    [tokens] = language.encode([prompt])
    sampler = Sampler(1, VOCABULARY, "cpu", seed=seed, end_tokens=(END,), threads=1)
    sampler.admit(0, wanted, tokens, prompt.key, number)
    matcher, history, answer = language.matcher(wanted.constraint), NOWHERE, []
    growing = language.detokenizer(wanted.stop)
    for position, token in enumerate(tokens.tolist()):
        history = mixed(history, token, position)
    words = np.zeros((1, words_of(VOCABULARY)), np.int32)
    while len(answer) < min(wanted.max_tokens, length - len(tokens)):
        matcher.mask(words[0])
        token = int(sampler.draw(logits_of(np.array([history], np.uint64)), np.zeros(1, np.int32), words).tokens[0])
        answer.append(token)
        if token == END:
            return Completion(text=language.decode(answer[:-1]), tokens=tuple(answer), finish_reason="stop")
        stop = growing.push(token)
        if stop is not None and len(answer) >= wanted.min_tokens:
            kept = tuple(answer[: growing.kept])
            return Completion(text=growing.text, tokens=kept, finish_reason="stop", stop_reason=stop)
        matcher.advance(token)
        if matcher.complete:
            return Completion(text=language.decode(answer), tokens=tuple(answer), finish_reason="stop")
        history = mixed(history, token, len(tokens) + len(answer) - 1)
    return Completion(text=language.decode(answer), tokens=tuple(answer), finish_reason="length")


def said(answer: Completion) -> tuple[object, ...]:
    return answer.text, answer.tokens, answer.finish_reason, answer.stop_reason


def prompts(kind: str) -> list[Prompt]:
    ways = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.5},
        {"stop": ("at", "g")},
        {"min_tokens": 20, "frequency_penalty": 1.0},
    ]
    return [
        Prompt(text=f"once {n}".translate(str.maketrans("0123456789", "abcdefghij")), key=str(n), samples=1 + n % 3,
               sampling=sampling(KINDS[kind], **ways[n % len(ways)]))
        for n in range(15)
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_draws_what_it_draws_alone_with_masks(kind):
    asked = prompts(kind)
    free = [
        Prompt(text="free", key="f"),
        Prompt(text="bound", sampling=Sampling(constraint=Constraint(regex="[a-c]{9}"))),
    ]
    found = run(toy_generator(), [*asked, *free])
    lists = 0
    for prompt, answer in zip(asked, found, strict=False):
        assert [said(one) for one in answer.completions] == [said(one) for one in plain(prompt)]
        for one in answer.completions:
            assert is_legal(one.text, KINDS[kind], whole=one.finish_reason == "stop" and not prompt.sampling.stop)
            assert len(one.nodes) == len(one.tokens)
            lists += max(one.nodes, default=-1) >= 0
    assert lists > 10 or kind == "two letters"
    assert found[-2].completions[0].nodes is None
    assert len(found[-1].completions[0].text) == 9


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_goes_on_from_any_place_as_if_it_had_not_stopped(kind):
    asked = prompts(kind)[::2]
    whole = run(toy_generator(), asked)
    for cut in (1, 7, 20):
        begun = [
            Prompt(**{name: getattr(prompt, name) for name in ("text", "key", "samples", "sampling")},
                   begun=tuple(one.tokens[:cut] for one in answer.completions))
            for prompt, answer in zip(asked, whole, strict=True)
            if not prompt.sampling.stop
        ]  # fmt: skip
        expected = [answer for prompt, answer in zip(asked, whole, strict=True) if not prompt.sampling.stop]
        for answer, other in zip(run(toy_generator(), begun), expected, strict=True):
            assert [said(one) for one in answer.completions] == [said(one) for one in other.completions]
            assert [one.nodes for one in answer.completions] == [one.nodes for one in other.completions]


def test_tokens_that_no_list_has_cannot_have_been_begun_with():
    prompt = Prompt(
        text="once", sampling=sampling(LISTED), begun=(tuple("abcdefghijklmnopqrstuvwxyz".index(one) for one in "az"),)
    )
    [answer] = run(toy_generator(), [prompt])
    assert isinstance(answer, BadPrompt)
    assert "break the constraint with token 2" in str(answer)


def test_a_slot_that_had_a_list_is_free_of_it():
    generator = toy_generator(slots=1)
    listed = Prompt(text="once", key="a", sampling=sampling(LISTED))
    free = Prompt(text="once", key="b", sampling=Sampling(max_tokens=50))
    alone = run(toy_generator(slots=1), [free])
    found = run(generator, [listed, free])
    assert said(found[1].completions[0]) == said(alone[0].completions[0])
    assert generator._table.listed == 0
