"""Who has which slot, what a step computes, and what an answer says."""

from __future__ import annotations

import numpy as np
import pytest
from text.toy import END, LETTERS, NOWHERE, VOCABULARY, add, alone, finish, logits_of, mixed, prompt, run, toy_generator

from gpuinfer.errors import BackendDied, BackendError, BadPrompt
from gpuinfer.generation import Constraint, Generation, Prompt, Sampling, Unmasking

pytestmark = pytest.mark.usefixtures("ahead")

LONG = "a beginning of forty tokens that is long"  # 40


def answers(outcomes):
    return [outcome.completions for outcome in outcomes]


def raising(words):
    def fail(*given):
        raise RuntimeError(words)

    return fail


# What is computed once


def test_a_beginning_that_another_row_is_computing_is_computed_once():
    generator = toy_generator(step_tokens=16)
    prompts = [prompt(LONG + ending) for ending in (" one", " two", " three")]
    outcomes = run(generator, prompts)
    assert answers(outcomes) == [alone(one) for one in prompts]
    assert [outcome.cached_tokens for outcome in outcomes] == [0, 32, 32]  # a page
    assert generator.decoder.computed == 44 + 12 + 14 + 3 * 5


def test_a_prompt_goes_on_after_a_finished_prompt_and_its_answer():
    generator = toy_generator()
    [first] = run(generator, [prompt("what is a fox? ")])
    again = prompt("what is a fox? " + first.completions[0].text[:-1] + " and then")
    [second] = run(generator, [again])
    assert second.completions == alone(again)
    assert second.cached_tokens == 15 + 5  # the answer, too, but for its last token
    assert generator.decoder.copied == 1  # page, that is not full


def test_samples_share_their_prefill_and_draw_each_for_itself():
    generator = toy_generator(step_tokens=8)
    [outcome] = run(generator, [prompt(LONG, samples=4)])
    assert outcome.completions == alone(prompt(LONG, samples=4))
    assert len({completion.tokens for completion in outcome.completions}) == 4
    assert generator.decoder.computed == 40 + 4 * 5
    assert isinstance(outcome, Generation)
    assert 0 < outcome.first_token_s < outcome.seconds


# What goes into a step


def test_rows_that_answer_go_in_every_step_and_prompts_share_the_rest():
    generator = toy_generator(slots=4, step_tokens=10)
    add(generator, prompt("abc", max_tokens=12), prompt(LONG), prompt("xy"))
    finish(generator)
    lengths = [step.lengths.tolist() for step in generator.decoder.steps]
    assert lengths[:6] == [[3, 7], [1, 9], [1, 9], [1, 9], [1, 6, 2], [1, 1, 1]]


def test_prompts_gather_beside_rows_that_answer():
    generator = toy_generator(slots=64, gather_steps=3, ahead=False)
    add(generator, prompt("abc", 30))
    generator.step()
    add(generator, prompt("de", 30), first=1)
    assert [generator.step().prompt_tokens for _ in range(5)] == [0, 0, 0, 2, 0]
    add(generator, *[prompt("fg", 30)] * 4, first=2)
    assert generator.step().prompt_tokens == 8  # enough of them to go at once


def test_a_step_tells_what_it_did():
    generator = toy_generator()
    add(generator, prompt("abc", max_tokens=2), prompt("de", max_tokens=1))
    first, second = generator.step(), generator.step()
    assert (first.rows, first.tokens, first.prompt_tokens, first.cached, first.output_tokens) == (2, 5, 5, 0, 2)
    assert [ticket for ticket, _ in first.finished] == [1]
    assert (second.rows, second.tokens, second.prompt_tokens, second.output_tokens) == (1, 1, 0, 1)
    assert not generator.busy


def test_steps_of_the_same_rows_use_the_same_arrays():
    generator = toy_generator()
    add(generator, prompt("abc", 20), prompt("de", 20))
    seen = set()
    generator.step()
    forward = generator.decoder.forward
    generator.decoder.forward = lambda step: seen.add(id(step.pages)) or forward(step)
    for _ in range(10):
        generator.step()
    assert len(seen) == 1


# The context


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "answered"),
    [
        pytest.param(10, 6, 6, id="well within the context"),
        pytest.param(60, 10, 4, id="an answer ends where the context does"),
        pytest.param(63, 10, 1, id="a prompt that leaves room for one token"),
        pytest.param(64, 0, 0, id="a full context, and no answer wanted"),
    ],
)
def test_an_answer_ends_at_the_end_of_the_context(tokens, max_tokens, answered):
    [outcome] = run(toy_generator(length=64), [prompt(("abcdefgh" * 8)[:tokens], max_tokens)])
    [completion] = outcome.completions
    assert (len(completion.tokens), completion.finish_reason) == (answered, "length")


@pytest.mark.parametrize(
    ("side", "max_tokens", "kept", "answered"),
    [("left", 6, slice(-58, None), 6), ("right", 6, slice(58), 6), ("left", 1000, slice(-32, None), 32)],
)
def test_a_prompt_that_may_be_truncated_leaves_room_for_its_answer_and_keeps_half(side, max_tokens, kept, answered):
    text = "".join(LETTERS[number * 7 % 31] for number in range(100))
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    [outcome] = run(toy_generator(length=64), [Prompt(text=text, truncate=side, sampling=sampling)])
    assert outcome.completions == alone(Prompt(text=text[kept], sampling=sampling))
    assert (outcome.prompt_tokens, len(outcome.completions[0].tokens)) == (len(text[kept]), answered)


# Refusals

BAD = {
    "more samples than slots": (prompt("ab", samples=5), "5 samples"),
    "no samples": (prompt("ab", samples=0), "samples"),
    "less than no tokens": (prompt("ab", max_tokens=-1), "max_tokens"),
    "more tokens at least than at most": (prompt("ab", max_tokens=2, min_tokens=3), "min_tokens"),
    "a temperature that cannot be": (prompt("ab", temperature=-1.0), "temperature"),
    "too many log-probabilities of a prompt alone": (prompt("ab", 0, prompt_logprobs=10**6), "prompt_logprobs"),
    "a stop token that is none": (prompt("ab", stop_token_ids=(VOCABULARY,)), "stop_token_ids"),
    "half a regex": (prompt("ab", constraint=Constraint(regex="(")), "regex"),
    "a character that the model does not know": (Prompt(text="Ä"), "Ä"),
    "masks": (prompt("ab", unmasking=Unmasking(threshold=0.5)), "`threshold`"),
    "a full context": (prompt("a" * 64), "--truncate"),
    "more than a context": (prompt("a" * 1000), "--truncate"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_prompt_fails_alone(name):
    bad, said = BAD[name]
    outcomes = run(toy_generator(), [prompt("cd"), bad, prompt("ef")])
    assert isinstance(outcomes[1], BadPrompt)
    assert said in str(outcomes[1])
    assert [outcomes[0].completions, outcomes[2].completions] == [alone(prompt("cd")), alone(prompt("ef"))]


def test_what_does_not_fit_in_the_free_slots_is_not_taken():
    generator = toy_generator(slots=2)
    first, second = generator.prepare([prompt("ab"), prompt("cd", samples=2)])
    generator.add("ticket", first)
    for ticket, prepared, said in (("other", second, "free slots"), ("ticket", first, "in use")):
        with pytest.raises(ValueError, match=said):
            generator.add(ticket, prepared)


# What an answer says


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("step_tokens", [5, 100])
def test_a_prompt_is_echoed_with_its_log_probabilities(max_tokens, step_tokens):
    generator = toy_generator(step_tokens=step_tokens)
    run(generator, [prompt(LONG)])  # of which nothing may be taken over
    echoed = prompt(LONG + "!", max_tokens, samples=2, prompt_logprobs=2)
    outcome, other = run(generator, [echoed, prompt("beside it")])
    tokens = generator.prepare([echoed])[0].tokens
    history, histories = NOWHERE, []
    for position, token in enumerate(tokens.tolist()):
        history = mixed(history, token, position)
        histories.append(history)
    expected = generator.sampler.given_logprobs(logits_of(np.array(histories[:-1], np.uint64)), tokens[1:], 2)
    assert outcome.prompt_logprobs == (None, *expected)
    assert outcome.completions == alone(echoed)
    assert other.completions == alone(prompt("beside it"))


def test_the_logits_of_an_echoed_prompt_are_asked_for_in_pieces(monkeypatch):
    monkeypatch.setattr("gpuinfer.text.generator.composer.ECHO_BYTES", 4 * VOCABULARY * 8)
    generator = toy_generator(step_tokens=100)
    prompts = [prompt(LONG, prompt_logprobs=1), prompt("other" * 4, prompt_logprobs=1), prompt("beside it")]
    outcomes = run(generator, prompts)
    assert max(len(step.wanted) for step in generator.decoder.steps) <= 8 + 2
    assert [len(outcome.prompt_logprobs or ()) for outcome in outcomes] == [40, 20, 0]
    assert answers(outcomes) == [alone(one) for one in prompts]


def test_an_answer_matches_its_constraint_beside_rows_without_one():
    constraint = Constraint(regex="[abc]{3}(x|y|z) [k-n]{2}!")
    asked = [
        prompt("free"), prompt("bound", 30, samples=2, constraint=constraint), prompt("b", 2, constraint=constraint),
    ]  # fmt: skip
    free, bound, cut = run(toy_generator(slots=4), asked)
    assert [free.completions, bound.completions, cut.completions] == [alone(one) for one in asked]
    texts = [completion.text for completion in bound.completions]
    assert all(len(text) == 8 and set(text[:3]) <= set("abc") and text.endswith("!") for text in texts)
    assert [one.finish_reason for one in (*bound.completions, *cut.completions)] == ["stop", "stop", "length"]


def test_the_end_token_is_among_the_tokens_and_not_in_the_text():
    ended = Prompt(text="soon", sampling=Sampling(max_tokens=60, logit_bias={END: 4.0}))
    [[completion]] = answers(run(toy_generator(), [ended]))
    assert (completion.finish_reason, completion.stop_reason, completion.tokens[-1]) == ("stop", None, END)
    assert len(completion.text) == len(completion.tokens) - 1


# Failures


def test_a_row_that_finds_no_memory_for_a_single_token_fails_with_the_cure():
    generator = toy_generator()
    generator.decoder.room = 0
    [outcome] = run(generator, [prompt("abc")])
    assert isinstance(outcome, BackendError)
    assert "-B slots" in str(outcome)


@pytest.mark.parametrize(
    ("words", "steps"), [("nothing works", 100), ("CUDA error: an illegal memory access was encountered", 1)]
)
def test_a_model_that_fails_at_every_step_is_dead_and_a_lost_device_at_once(words, steps):
    generator = toy_generator(slots=4)
    generator.decoder.forward = raising(words)
    prepared = generator.prepare([prompt("abc")])[0]

    def go_on():
        for ticket in range(steps):
            generator.add(ticket, prepared)
            generator.step()

    with pytest.raises(BackendDied, match=words):
        go_on()
    generator.close()
    assert generator.decoder.closed


def test_a_copy_that_fails_costs_only_time(caplog):
    generator = toy_generator()
    generator.decoder.copy_pages = raising("no copies today")
    prompts = [prompt(LONG[:20] + ending) for ending in (" one", " two", " three")]
    assert answers(run(generator, prompts)) == [alone(one) for one in prompts]
    assert "no copies today" in caplog.text
