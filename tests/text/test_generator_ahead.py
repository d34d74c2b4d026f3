"""Steps that are composed before the host has seen the tokens of the step before, as on a CUDA device."""

from __future__ import annotations

from itertools import groupby

import pytest
from text.pages_held import all_free
from text.toy import LETTERS, add, alone, finish, prompt, run, toy_generator

from gpuinfer.errors import BackendDied
from gpuinfer.generation import Constraint, Prompt, Sampling
from gpuinfer.text.sampling.compiled_path import CompleteDraw


def ended(text, max_tokens=12, **sampling):
    """A prompt whose answer ends where the model says so."""
    return Prompt(text=text, key=text, sampling=Sampling(max_tokens=max_tokens, **sampling))


def started(*prompts, **options):
    generator = toy_generator(ahead=True, **options)
    add(generator, *prompts)
    return generator


def rows_of(generator):
    return [len(step.lengths) for step in generator.decoder.steps]


def test_steps_take_tokens_that_the_host_has_not_seen_and_nothing_is_computed_for_a_row_that_is_full():
    asked = [prompt("abc", 3), prompt("de", 8)]
    generator = started(*asked)
    outcomes = finish(generator)
    assert [outcomes[0].completions, outcomes[1].completions] == [alone(one) for one in asked]
    assert rows_of(generator) == [2, 2, 2, *[1] * 5]
    assert generator.decoder.ahead == 7  # all but the first


def test_a_row_that_ends_by_itself_has_one_token_more_computed():
    texts = [one + other for one in LETTERS for other in LETTERS]
    asked = next(one for text in texts if 3 <= len(alone(one := ended(text))[0].tokens) < 9)
    generator = started(asked, prompt("abc", 30))
    assert finish(generator)[0].completions == alone(asked)
    assert rows_of(generator).count(2) == len(alone(asked)[0].tokens) + 1
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
    asked, beside = ended("abc", 8, **sampling), prompt("de", 20)
    generator, found = started(asked, beside), {}
    while 0 not in found:
        found.update(generator.step().finished)
    assert generator.decoder.ahead == 0
    found.update(finish(generator))
    assert generator.decoder.ahead > 0  # once that row is gone
    assert found[0].completions == run(toy_generator(ahead=False), [asked])[0].completions
    assert found[1].completions == alone(beside)


def test_steps_that_find_no_memory_are_tried_again_when_none_is_under_way(caplog):
    asked = [prompt(text, 12) for text in ("abc", "xyz", "de")]
    generator = started(*asked[:2], slots=3)
    generator.step()
    generator.decoder.room = 1
    add(generator, *asked[2:], first=2)
    outcomes = finish(generator)
    assert [outcomes[n].completions for n in range(3)] == [alone(one) for one in asked]
    assert caplog.text.count("out of memory") == 1


def test_weights_change_behind_the_step_that_is_under_way():
    """Its tokens are those of the old weights, and named so."""
    asked = prompt("abc", 9)
    generator = started(asked)
    for _ in range(3):
        generator.step()
    generator.update("v1", 5)
    given = generator.step()  # what has been computed in the meantime
    assert (given.rows, given.output_tokens) == (1, 1)
    (completion,) = finish(generator)[0].completions
    assert completion.versions == ((0, ""), (4, "v1"))
    assert completion.tokens[:4] == alone(asked)[0].tokens[:4]
    assert completion.tokens != alone(asked)[0].tokens


def test_a_device_that_never_comes_to_what_was_drawn_ends_the_generator_which_closes_with_a_step_under_way():
    generator = started(prompt("abc", 9))
    generator.step()

    def lost(kept):
        raise RuntimeError("CUDA error: unspecified launch failure")

    generator._under_way.drawing.finish = lost
    with pytest.raises(BackendDied, match="unspecified launch failure"):
        generator.step()
    other = started(prompt("abc", 9))
    other.step()
    for one in (generator, other):
        one.close()
        assert one.decoder.closed


@pytest.mark.parametrize("late", [True, False], ids=["the host is late", "the device is"])
def test_the_hosts_time_counts_as_the_devices_where_that_is_at_work(monkeypatch, late):
    """And where it has done all that was launched, the host keeps it waiting."""
    monkeypatch.setattr(CompleteDraw, "ready", late)
    generator, entered = started(prompt("abc", 6)), []
    generator.enter = entered.append
    finish(generator)
    again = ["reply", "forward", "sample"] if late else ["forward", "sample"]
    assert [one for one, _ in groupby(entered)] == ["prefill", "sample", "forward", "sample", *again * 4, "reply"]
