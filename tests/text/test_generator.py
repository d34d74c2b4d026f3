"""Who has which slot, what a step computes, and what an answer says."""

from __future__ import annotations

import numpy as np
import pytest
from text.toy import END, LETTERS, VOCABULARY, alone, logits_of, mixed, run, toy_generator
from text.toy import NOWHERE as NOTHING

from gpuinfer.errors import BackendDied, BackendError, BadPrompt
from gpuinfer.generation import Constraint, Generation, Prompt, Sampling, Unmasking
from gpuinfer.text.sampling import Sampler

pytestmark = pytest.mark.usefixtures("ahead")

LONG = "a beginning of forty tokens that is long"  # 40


def prompt(text: str, max_tokens: int = 6, samples: int = 1, **given: object) -> Prompt:
    return Prompt(
        text=text, key=text, samples=samples, sampling=Sampling(max_tokens=max_tokens, ignore_eos=True, **given)
    )


def added(generator, *prompts):
    for number, prepared in enumerate(generator.prepare(prompts)):
        generator.add(number, prepared)


def answers(outcomes):
    return [outcome.completions for outcome in outcomes]


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


def test_rows_that_answer_go_in_every_step_and_prompts_share_the_rest():
    generator = toy_generator(slots=4, step_tokens=10)
    added(generator, prompt("abc", max_tokens=12), prompt(LONG), prompt("xy"))
    while generator.busy:
        generator.step()
    lengths = [step.lengths.tolist() for step in generator.decoder.steps]
    assert lengths[:5] == [[3, 7], [1, 9], [1, 9], [1, 9], [1, 6, 2]]
    assert lengths[5] == [1, 1, 1]


def test_prompts_gather_beside_rows_that_answer():
    generator = toy_generator(slots=64, gather_steps=3, ahead=False)
    first, *later = generator.prepare([prompt("abc", 30), prompt("de", 30), *[prompt("fg", 30)] * 4])
    generator.add("first", first)
    generator.step()
    generator.add("second", later[0])
    assert [generator.step().prompt_tokens for _ in range(5)] == [0, 0, 0, 2, 0]
    for number, prepared in enumerate(later[1:]):
        generator.add(number, prepared)
    assert generator.step().prompt_tokens == 8  # enough of them to go at once


def test_a_step_tells_what_it_did():
    generator = toy_generator()
    added(generator, prompt("abc", max_tokens=2), prompt("de", max_tokens=1))
    first = generator.step()
    assert (first.rows, first.tokens, first.prompt_tokens, first.cached, first.output_tokens) == (2, 5, 5, 0, 2)
    assert [ticket for ticket, _ in first.finished] == [1]
    second = generator.step()
    assert (second.rows, second.tokens, second.prompt_tokens, second.output_tokens) == (1, 1, 0, 1)
    assert not generator.busy


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
    assert len(completion.tokens) == answered
    assert completion.finish_reason == "length"


@pytest.mark.parametrize("text", ["a" * 64, "a" * 65, "a" * 1000])
def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused(text):
    [outcome] = run(toy_generator(length=64), [prompt(text)])
    assert isinstance(outcome, BadPrompt)
    assert "--truncate" in str(outcome)


@pytest.mark.parametrize(("side", "kept"), [("left", slice(-58, None)), ("right", slice(58))])
def test_a_prompt_that_may_be_truncated_leaves_room_for_its_answer(side, kept):
    text = "".join(LETTERS[number * 7 % 31] for number in range(100))
    sampling = Sampling(max_tokens=6, ignore_eos=True)
    [outcome] = run(toy_generator(length=64), [Prompt(text=text, truncate=side, sampling=sampling)])
    assert outcome.completions == alone(Prompt(text=text[kept], sampling=sampling))
    assert outcome.prompt_tokens == 58


def test_a_truncated_prompt_keeps_half_of_the_context_however_much_is_asked_for():
    sampling = Sampling(max_tokens=1000, ignore_eos=True)
    [outcome] = run(toy_generator(length=64), [Prompt(text="ab" * 50, truncate="left", sampling=sampling)])
    assert outcome.prompt_tokens == 32
    assert len(outcome.completions[0].tokens) == 32


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(prompt("ab", samples=5), id="more samples than slots"),
        pytest.param(prompt("ab", samples=0), id="no samples"),
        pytest.param(prompt("ab", max_tokens=-1), id="less than no tokens"),
        pytest.param(prompt("ab", max_tokens=2, min_tokens=3), id="more tokens at least than at most"),
        pytest.param(prompt("ab", temperature=-1.0), id="a temperature that cannot be"),
        pytest.param(prompt("ab", 0, prompt_logprobs=10**6), id="too many log-probabilities of a prompt alone"),
        pytest.param(prompt("ab", stop_token_ids=(VOCABULARY,)), id="a stop token that is none"),
        pytest.param(prompt("ab", constraint=Constraint(regex="(")), id="half a regex"),
        pytest.param(Prompt(text="Ä"), id="a character that the model does not know"),
    ],
)
def test_a_bad_prompt_fails_alone(bad):
    generator = toy_generator()
    outcomes = run(generator, [prompt("cd"), bad, prompt("ef")])
    assert isinstance(outcomes[1], BadPrompt)
    assert [outcomes[0].completions, outcomes[2].completions] == [alone(prompt("cd")), alone(prompt("ef"))]
    assert generator.free_slots == 4


def test_what_does_not_fit_in_the_free_slots_is_not_taken():
    generator = toy_generator(slots=2)
    first, second = generator.prepare([prompt("ab"), prompt("cd", samples=2)])
    generator.add("ticket", first)
    with pytest.raises(ValueError, match="free slots"):
        generator.add("other", second)
    with pytest.raises(ValueError, match="in use"):
        generator.add("ticket", first)


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("step_tokens", [5, 100])
def test_a_prompt_is_echoed_with_its_log_probabilities(max_tokens, step_tokens):
    generator = toy_generator(step_tokens=step_tokens)
    run(generator, [prompt(LONG)])  # of which nothing may be taken over
    echoed = prompt(LONG + "!", max_tokens, samples=2, prompt_logprobs=2)
    outcome, other = run(generator, [echoed, prompt("beside it")])
    tokens = generator.prepare([echoed])[0].tokens
    history, histories = NOTHING, []
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
    generator = toy_generator(slots=4)
    constraint = Constraint(regex="[abc]{3}(x|y|z) [k-n]{2}!")
    free, bound, bound_too = run(
        generator,
        [prompt("free"), prompt("bound", 30, samples=2, constraint=constraint), prompt("b", 2, constraint=constraint)],
    )
    assert free.completions == alone(prompt("free"))
    texts = [completion.text for completion in bound.completions]
    assert all(len(text) == 8 and set(text[:3]) <= set("abc") and text.endswith("!") for text in texts)
    assert [completion.finish_reason for completion in bound.completions] == ["stop", "stop"]
    assert bound_too.completions[0].finish_reason == "length"
    assert set(bound_too.completions[0].text) <= set("abc")
    assert (
        run(toy_generator(), [prompt("bound", 30, samples=2, constraint=constraint)])[0].completions
        == bound.completions
    )


def test_the_end_token_is_among_the_tokens_and_not_in_the_text():
    ended = Prompt(text="soon", sampling=Sampling(max_tokens=60, logit_bias={END: 4.0}))
    [outcome] = run(toy_generator(), [ended])
    [completion] = outcome.completions
    assert (completion.finish_reason, completion.stop_reason, completion.tokens[-1]) == ("stop", None, END)
    assert len(completion.text) == len(completion.tokens) - 1


def test_a_row_that_finds_no_memory_for_a_single_token_fails_with_the_cure():
    generator = toy_generator()
    generator.decoder.room = 0
    [outcome] = run(generator, [prompt("abc")])
    assert isinstance(outcome, BackendError)
    assert "-B slots" in str(outcome)


def test_a_model_that_fails_at_every_step_is_dead(monkeypatch):
    generator = toy_generator(slots=4)

    def fail(step):
        raise RuntimeError("nothing works")

    monkeypatch.setattr(generator.decoder, "forward", fail)
    prepared = generator.prepare([prompt("abc")])[0]

    def go_on():
        for ticket in range(100):
            generator.add(ticket, prepared)
            generator.step()

    with pytest.raises(BackendDied, match="nothing works"):
        go_on()


def test_a_device_that_is_lost_is_not_tried_again(monkeypatch):
    generator = toy_generator()

    def fail(step):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(generator.decoder, "forward", fail)
    added(generator, prompt("abc"))
    with pytest.raises(BackendDied, match="illegal memory access"):
        generator.step()


def test_a_copy_that_fails_costs_only_time(monkeypatch, caplog):
    generator = toy_generator()
    prompts = [prompt(LONG[:20] + ending) for ending in (" one", " two", " three")]

    def fail(sources, targets):
        raise RuntimeError("no copies today")

    monkeypatch.setattr(generator.decoder, "copy_pages", fail)
    assert answers(run(generator, prompts)) == [alone(one) for one in prompts]
    assert "no copies today" in caplog.text


def test_steps_of_the_same_rows_use_the_same_arrays():
    generator = toy_generator()
    added(generator, prompt("abc", 20), prompt("de", 20))
    seen = set()
    generator.step()
    forward = generator.decoder.forward
    generator.decoder.forward = lambda step: seen.add(id(step.pages)) or forward(step)
    for _ in range(10):
        generator.step()
    assert len(seen) == 1


def test_the_sampler_and_the_decoder_are_closed_with_the_generator():
    generator = toy_generator()
    generator.close()
    assert generator.decoder.closed
    assert isinstance(generator.sampler, Sampler)


def test_the_answer_tells_its_times():
    [outcome] = run(toy_generator(), [prompt("abc")])
    assert isinstance(outcome, Generation)
    assert 0 < outcome.first_token_s < outcome.seconds


def test_a_prompt_that_speaks_of_masks_fails_alone():
    wrong = prompt("what is a fox? ", unmasking=Unmasking(threshold=0.5))
    bad, good = run(toy_generator(), [wrong, prompt("what is a fox? ")])
    assert isinstance(bad, BadPrompt)
    assert "`threshold`" in str(bad)
    assert good.completions == alone(prompt("what is a fox? "))
