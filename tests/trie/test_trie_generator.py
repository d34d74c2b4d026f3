"""Answers with a list in them, from a generator of several rows: what a plain loop with masks draws, alone."""

import pytest
from listing import is_legal
from msgspec import structs
from text.toy import plain_answer, run, toy_generator

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Completion, Constraint, Listed, Prompt, Sampling

ITEMS = (("x", "cat"), ("x", "car"), ("y", "dog"), ("z", "cat a"), ("z", "do"), ("w", "!"))
LISTED = Listed(items=ITEMS, begin="a", end=".", separator=", ")
KINDS = {
    "ending": LISTED,
    "free again": Listed(items=ITEMS, begin="b", end="!.", separator="? ", ends=False),
    "two letters": Listed(items=ITEMS, begin="e,", end="?", separator="!,"),
}
HOW = [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"stop": ("at", "g")}, {"min_tokens": 20, "frequency_penalty": 1.0}]


def said(answer: Completion) -> tuple[object, ...]:
    return answer.text, answer.tokens, answer.finish_reason, answer.stop_reason


def prompts(kind: str) -> list[Prompt]:
    asked = []
    for n in range(15):
        sampling = Sampling(max_tokens=50, constraint=Constraint(listed=KINDS[kind]), **HOW[n % len(HOW)])
        asked.append(Prompt(text=f"once {'abcdefghijklmno'[n]}", key=str(n), samples=1 + n % 3, sampling=sampling))
    return asked


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_draws_what_it_draws_alone_with_masks(kind):
    asked = prompts(kind)
    free = Prompt(text="free", key="f")
    bound = Prompt(text="bound", sampling=Sampling(constraint=Constraint(regex="[a-c]{9}")))
    *found, without, other = run(toy_generator(), [*asked, free, bound])
    lists = 0
    for prompt, answer in zip(asked, found, strict=True):
        expected = [plain_answer(prompt, number) for number in range(prompt.samples)]
        assert [said(one) for one in answer.completions] == [said(one) for one in expected]
        for one in answer.completions:
            assert is_legal(one.text, KINDS[kind], whole=one.finish_reason == "stop" and not prompt.sampling.stop)
            assert len(one.nodes) == len(one.tokens)
            lists += max(one.nodes, default=-1) >= 0
    assert lists > 10 or kind == "two letters"
    assert without.completions[0].nodes is None
    assert len(other.completions[0].text) == 9


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_goes_on_from_any_place_as_if_it_had_not_stopped(kind):
    asked = [prompt for prompt in prompts(kind)[::2] if not prompt.sampling.stop]
    whole = run(toy_generator(), asked)
    for cut in (1, 7, 20):
        begun = [
            structs.replace(prompt, begun=tuple(one.tokens[:cut] for one in answer.completions))
            for prompt, answer in zip(asked, whole, strict=True)
        ]
        for answer, other in zip(run(toy_generator(), begun), whole, strict=True):
            assert [said(one) for one in answer.completions] == [said(one) for one in other.completions]
            assert [one.nodes for one in answer.completions] == [one.nodes for one in other.completions]
    [answer] = run(toy_generator(), [structs.replace(prompts("ending")[0], begun=((0, 25),))])
    assert isinstance(answer, BadPrompt)
    assert "break the constraint with token 2" in str(answer)


def test_a_slot_that_had_a_list_is_free_of_it():
    generator = toy_generator(slots=1)
    free = Prompt(text="once", key="b", sampling=Sampling(max_tokens=50))
    [alone] = run(toy_generator(slots=1), [free])
    found = run(generator, [prompts("ending")[0], free])
    assert said(found[1].completions[0]) == said(alone.completions[0])
    assert generator._table.listed == 0
