"""Steps that are composed before the host has seen the tokens of the step before, as on a CUDA device."""

from __future__ import annotations

from itertools import groupby

import pytest
from text.pages_held import all_free
from text.toy import LETTERS, alone, run, toy_generator

from gpuinfer.errors import BackendDied
from gpuinfer.generation import Constraint, Prompt, Sampling
from gpuinfer.text.sampling.compiled_path import CompleteDraw

LONG = "what does the fox say, and why "


def prompt(text, max_tokens=12, samples=1, **sampling):
    return Prompt(text=text, key=text, samples=samples, sampling=Sampling(max_tokens=max_tokens, **sampling))


def started(*prompts, **options):
    generator = toy_generator(ahead=True, **options)
    for ticket, prepared in enumerate(generator.prepare(prompts)):
        generator.add(ticket, prepared)
    return generator


def finished(generator):
    outcomes = {}
    while generator.busy:
        outcomes.update(generator.step().finished)
    return outcomes


def test_every_step_but_the_first_takes_tokens_that_the_host_has_not_seen():
    asked = prompt("abc", 10, ignore_eos=True)
    generator = started(asked)
    assert finished(generator)[0].completions == alone(asked)
    assert (generator.decoder.ahead, len(generator.decoder.steps)) == (9, 10)


def test_nothing_is_computed_for_a_row_whose_last_token_is_being_drawn():
    asked = [prompt("abc", 3, ignore_eos=True), prompt("de", 8, ignore_eos=True)]
    generator = started(*asked)
    outcomes = finished(generator)
    assert [outcomes[0].completions, outcomes[1].completions] == [alone(one) for one in asked]
    assert [len(step.lengths) for step in generator.decoder.steps] == [2, 2, 2, *[1] * 5]


def test_a_row_that_ends_by_itself_has_one_token_more_computed():
    texts = [one + other for one in LETTERS for other in LETTERS]
    asked = next(one for text in texts if 3 <= len(alone(one := prompt(text))[0].tokens) < 9)
    generator = started(asked, prompt("abc", 30, ignore_eos=True))
    outcomes = finished(generator)
    assert outcomes[0].completions == alone(asked)
    rows = [len(step.lengths) for step in generator.decoder.steps]
    assert rows.count(2) == len(alone(asked)[0].tokens) + 1
    all_free(generator)


@pytest.mark.parametrize(
    "sampling",
    [
        {"constraint": Constraint(regex="[a-f]{8}")},
        {"constraint": Constraint(choice=("hello you", "hello there"))},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5},
    ],
    ids=str,
)
def test_where_what_comes_next_depends_on_the_tokens_they_are_waited_for(sampling):
    asked, beside = prompt("abc", 8, **sampling), prompt("de", 20, ignore_eos=True)
    generator = started(asked, beside)
    ended = {}
    while 0 not in ended:
        ended.update(generator.step().finished)
    assert generator.decoder.ahead == 0
    ended.update(finished(generator))
    assert generator.decoder.ahead > 0  # once that row is gone
    assert ended[0].completions == run(toy_generator(ahead=False), [asked])[0].completions
    assert ended[1].completions == alone(beside)


def test_a_slot_is_taken_anew_while_a_step_is_under_way_for_its_row():
    first, second, beside = (prompt(text, 12, ignore_eos=True) for text in ("abc", "xyz", "de"))
    generator = started(first, beside, slots=2)
    for _ in range(3):
        generator.step()
    generator.cancel(0)
    (prepared,) = generator.prepare([second])
    generator.add("second", prepared)
    outcomes = finished(generator)
    assert outcomes["second"].completions == alone(second)
    assert outcomes[1].completions == alone(beside)
    all_free(generator)


def test_steps_that_find_no_memory_are_tried_again_when_none_is_under_way(caplog):
    asked = [prompt(text, 12, ignore_eos=True) for text in ("abc", "xyz", "de")]
    generator = started(*asked[:2], slots=3)
    generator.step()
    generator.decoder.room = 1
    (prepared,) = generator.prepare(asked[2:])
    generator.add(2, prepared)
    outcomes = finished(generator)
    assert [outcomes[n].completions for n in range(3)] == [alone(one) for one in asked]
    assert caplog.text.count("out of memory") == 1


def test_weights_change_behind_the_step_that_is_under_way():
    """Its tokens are those of the old weights, and named so."""
    asked = prompt("abc", 9, ignore_eos=True)
    generator = started(asked)
    for _ in range(3):
        generator.step()
    generator.update("v1", 5)
    given = generator.step()  # what has been computed in the meantime
    assert (given.rows, given.output_tokens) == (1, 1)
    (completion,) = finished(generator)[0].completions
    assert completion.versions == ((0, ""), (4, "v1"))
    assert completion.tokens[:4] == alone(asked)[0].tokens[:4]
    assert completion.tokens != alone(asked)[0].tokens


def test_what_steps_report_is_what_the_decoder_computed():
    asked = [prompt(LONG[n:], 5 + n, samples=2, ignore_eos=True, logprobs=1) for n in range(4)]
    generator, steps = toy_generator(slots=4, ahead=True), []
    waiting, outcomes = list(enumerate(generator.prepare(asked))), {}
    while waiting or generator.busy:
        while waiting and generator.free_slots >= 2:
            generator.add(*waiting.pop(0))
        steps.append(generator.step())
        outcomes.update(steps[-1].finished)
    assert [outcomes[n].completions for n in range(4)] == [alone(one) for one in asked]
    assert sum(one.output_tokens for one in steps) == sum(2 * (5 + n) for n in range(4))
    assert sum(one.tokens for one in steps) == generator.decoder.computed


def test_a_device_that_never_comes_to_what_was_drawn_ends_the_generator():
    generator = started(prompt("abc", 9))
    generator.step()

    def lost(kept):
        raise RuntimeError("CUDA error: unspecified launch failure")

    generator._under_way.drawing.finish = lost
    with pytest.raises(BackendDied, match="unspecified launch failure"):
        generator.step()
    generator.close()


@pytest.mark.parametrize("late", [True, False], ids=["the host is late", "the device is"])
def test_the_hosts_time_counts_as_the_devices_where_that_is_at_work(monkeypatch, late):
    """And where it has done all that was launched, the host keeps it waiting."""
    monkeypatch.setattr(CompleteDraw, "ready", late)
    generator, entered = started(prompt("abc", 6, ignore_eos=True)), []
    generator.enter = entered.append
    finished(generator)
    again = ["reply", "forward", "sample"] if late else ["forward", "sample"]
    assert [one for one, _ in groupby(entered)] == ["prefill", "sample", "forward", "sample", *again * 4, "reply"]


def test_a_generator_is_closed_with_a_step_under_way():
    generator = started(prompt("abc", 9))
    generator.step()
    generator.close()
    assert generator.decoder.closed
