"""Other weights while a generator runs: nothing that the old ones have cached is used for another prompt."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from text.test_generator_driver import WAIT_S, Gate, closing_in_a_thread, prompt, submitted
from text.toy import alone, run, toy_generator

from gpuinfer.errors import BackendDied, Closed, UsageError
from gpuinfer.text.generator import Driver
from gpuinfer.text.transformer import PAGE

LONG = "the quick brown fox jumps over the lazy"
NEW = 12345  # the weights of a toy decoder are a number


def of_new(asked):
    return alone(asked, weights=NEW, version="v1")


@pytest.fixture
def generator():
    return toy_generator(step_tokens=16)


@pytest.fixture
def driver(generator):
    driver = Driver(generator)
    yield driver
    driver.close()


def test_what_comes_after_an_update_is_answered_by_the_new_weights_alone(generator):
    [before, again] = [*run(generator, [prompt(LONG)]), *run(generator, [prompt(LONG)])]
    assert (before.versions, before.completions, again.cached_tokens) == (("",), alone(prompt(LONG)), PAGE)
    generator.update("v1", NEW)
    [after, shared] = [*run(generator, [prompt(LONG)]), *run(generator, [prompt(LONG)])]
    assert (after.version, after.completions, after.cached_tokens) == ("v1", of_new(prompt(LONG)), 0)
    assert (shared.completions, shared.cached_tokens) == (after.completions, PAGE)
    assert alone(prompt(LONG), weights=NEW) != alone(prompt(LONG))


def test_an_answer_under_way_goes_on_and_what_it_holds_serves_nobody_else(generator):
    [prepared] = generator.prepare([prompt(LONG, 12)])
    generator.add("old", prepared)
    for _ in range(5):
        generator.step()
    generator.update("v1", NEW)
    while not (finished := generator.step().finished):
        pass
    [(_, mixed)] = finished
    assert mixed.versions == ("", "v1")
    tokens = mixed.completions[0].tokens
    assert tokens not in (alone(prompt(LONG, 12))[0].tokens, of_new(prompt(LONG, 12))[0].tokens)
    assert tokens[:3] == alone(prompt(LONG, 12))[0].tokens[:3]
    assert mixed.completions[0].versions == ((0, ""), (3, "v1"))  # two steps for the prompt
    [after] = run(generator, [prompt(LONG + " dog")])
    assert (after.cached_tokens, after.completions) == (0, of_new(prompt(LONG + " dog")))


def test_a_row_that_waits_for_anothers_beginning_computes_its_own(generator):
    """The first prompt is half through when the weights change; the second has waited for it."""
    for ticket, prepared in enumerate(generator.prepare([prompt(LONG + " one"), prompt(LONG + " two")])):
        generator.add(ticket, prepared)
    generator.step()
    generator.update("v1", NEW)
    finished = {}
    while generator.busy:
        finished |= dict(generator.step().finished)
    assert [finished[ticket].versions for ticket in (0, 1)] == [("", "v1"), ("v1",)]
    assert finished[1].completions == of_new(prompt(LONG + " two"))


def test_an_update_that_drains_comes_after_the_answers_under_way_and_before_all_others(generator, driver):
    gate = Gate(generator)
    early = submitted(driver, *(prompt(text, 5) for text in ("ab", "cd")))
    assert gate.reached.wait(WAIT_S)
    updated = driver.update("v1", NEW, drain=True)
    late = submitted(driver, prompt("ef", 5))
    gate.open.set()
    updated.result(WAIT_S)
    assert all(future.done() for future in early)
    found = [future.result(WAIT_S) for future in (*early, *late)]
    assert [one.versions for one in found] == [("",), ("",), ("v1",)]
    assert found[1].completions == alone(prompt("cd", 5))
    assert found[2].completions == of_new(prompt("ef", 5))


def test_an_update_that_does_not_drain_comes_with_the_next_step(generator, driver):
    gate = Gate(generator)
    [early] = submitted(driver, prompt("ab", 9))
    assert gate.reached.wait(WAIT_S)
    updated = driver.update("v1", NEW, drain=False)
    gate.open.set()
    updated.result(WAIT_S)
    assert early.result(WAIT_S).versions == ("", "v1")


def test_an_update_that_is_cancelled_while_it_waits_is_not_done(generator, driver):
    gate = Gate(generator)
    [early] = submitted(driver, prompt("ab", 5))
    assert gate.reached.wait(WAIT_S)
    updated = driver.update("v1", NEW, drain=True)
    assert updated.cancel()
    [late] = submitted(driver, prompt("cd", 5))
    gate.open.set()
    assert [future.result(WAIT_S).versions for future in (early, late)] == [("",), ("",)]


def test_closing_fails_an_update_that_waits(generator):
    driver, gate = Driver(generator), Gate(generator)
    submitted(driver, prompt("ab", 9))
    assert gate.reached.wait(WAIT_S)
    updated = driver.update("v1", NEW, drain=True)
    closing = closing_in_a_thread(driver)
    gate.open.set()
    closing.join(WAIT_S)
    with pytest.raises(Closed):
        updated.result(WAIT_S)
    with pytest.raises(Closed):
        driver.update("v2", NEW, drain=False)


def test_weights_that_cannot_be_exchanged_end_the_generator(generator, driver):
    generator.decoder.swap = lambda packed: 1 / 0
    updated: Future[None] = driver.update("v1", NEW, drain=False)
    with pytest.raises(BackendDied, match="ZeroDivisionError"):
        updated.result(WAIT_S)
    with pytest.raises(BackendDied):
        submitted(driver, prompt("ab"))[0].result(WAIT_S)


def test_a_model_without_files_says_that_it_has_none(generator):
    with pytest.raises(UsageError, match="no files"):
        generator.read_weights("anywhere")
