"""The thread that steps: what is submitted is answered, whatever happens; and other weights while it runs: nothing that
the old ones have cached is used for another prompt.
"""

from __future__ import annotations

import mmap
import threading

import pytest
from text.toy import WAIT_S, Gate, add, alone, closing_in_a_thread, finish, prompt, run, submitted, toy_generator

from gpuinfer.api import TextRoofline
from gpuinfer.errors import BackendDied, Closed, UsageError
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.models.device_arbiter import UnsharedSlot
from gpuinfer.stats import Lane
from gpuinfer.text import text_roofline
from gpuinfer.text.generator import Driver
from gpuinfer.text.text_roofline import StepCost
from gpuinfer.text.transformer import PAGE

LONG = "the quick brown fox jumps over the lazy"
NEW = 12345  # the weights of a toy decoder are a number


@pytest.fixture
def generator():
    return toy_generator(step_tokens=16)


@pytest.fixture
def started():
    """Starts a driver, and closes it in the end."""
    drivers = []

    def start(generator, **options):
        drivers.append(driver := Driver(generator, **options))
        return driver

    yield start
    for driver in drivers:
        driver.close()


def results(futures):
    return [future.result(WAIT_S) for future in futures]


def answers(futures):
    return [result.completions for result in results(futures)]


def of_new(asked):
    return alone(asked, weights=NEW, version="v1")


def lost(step):
    raise RuntimeError("CUDA error: device lost")


def test_what_threads_submit_at_the_same_time_is_answered(generator, started):
    driver = started(generator)
    prompts = [[prompt(f"{'abcd'[t]}{'efghijkl'[n]}", 3, samples=1 + n % 3) for n in range(8)] for t in range(4)]
    futures = [[] for _ in prompts]
    threads = [
        threading.Thread(target=lambda found, asked: found.extend(submitted(driver, *asked)), args=each)
        for each in zip(futures, prompts, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert [answers(found) for found in futures] == [[alone(one) for one in asked] for asked in prompts]


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another model"])
def test_no_step_is_left_on_a_device_that_another_model_has_next(beside):
    """Its time would be taken for the other model's."""

    class Turns(UnsharedSlot):
        def has_all(self, turn):
            return beside

    generator, asked = toy_generator(ahead=True), prompt("abc", 9)
    driver = Driver(generator, place=Turns())
    assert answers(submitted(driver, asked)) == [alone(asked)]
    driver.close()
    assert bool(generator.decoder.ahead) is not beside


def test_counters_and_listener_see_every_step_its_cost_and_what_prompts_ask_for(generator, started):
    seen = []
    cost = StepCost(generator.decoder.shape, 4)
    driver = started(generator, on_step=lambda rows, seconds: seen.append((rows, seconds)), cost=cost)
    results(submitted(driver, prompt("abc", 4)))
    sampling = Sampling(max_tokens=6, ignore_eos=True, stop=("never",), logprobs=1, presence_penalty=0.5)
    results(submitted(driver, Prompt(text="abd", key="abd", sampling=sampling)))
    driver.close()
    counted = driver.counters()
    assert [rows for rows, _ in seen] == [1] * 10
    assert counted["seconds"] == pytest.approx(sum(seconds for _, seconds in seen))
    names = ("steps", "prompt_tokens", "cached_tokens", "tokens", "output_tokens", "finished", "failed")
    assert [counted[name] for name in names] == [10, 6, 0, 14, 10, 2, 0]
    assert counted["flops"] > counted["prefill_flops"] > 0
    assert counted["bytes"] > counted["prefill_bytes"] > 0
    asked = ("with_stop", "with_logprobs", "with_penalties", "with_constraints", "with_lists", "read_as_they_grow")
    assert [counted[name] for name in asked] == [1, 1, 1, 0, 0, 0]


def test_a_cancelled_prompt_has_no_outcome_and_the_others_have(generator, started):
    gate, outcomes, complete = Gate(generator), {}, threading.Event()

    def deliver(parts, some):
        outcomes.update(some)
        if len(outcomes) == 2:
            complete.set()

    driver = started(generator, deliver=deliver)
    prompts = [prompt("under way", 50), prompt("stays"), prompt("waits", samples=4), prompt("last")]
    tickets = [driver.submit(one) for one in generator.prepare(prompts)]
    assert gate.reached.wait(WAIT_S)
    for ticket in (tickets[0], tickets[2], 12345):
        driver.cancel(ticket)
    gate.open.set()
    assert complete.wait(WAIT_S)
    driver.close()
    assert outcomes.keys() == {tickets[1], tickets[3]}
    assert generator.free_slots == 4


def test_closing_fails_what_is_unfinished_and_takes_nothing_more(generator):
    driver, gate = Driver(generator), Gate(generator)
    futures = submitted(driver, prompt("abc", 50), prompt("waits", samples=4))
    assert gate.reached.wait(WAIT_S)
    updated = driver.update("v1", NEW, drain=True)
    closing = closing_in_a_thread(driver)
    gate.open.set()
    closing.join(WAIT_S)
    assert [type(result) for result in results(futures)] == [Closed, Closed]
    for refused in (
        lambda: updated.result(WAIT_S),
        lambda: driver.submit(generator.prepare([prompt("abc")])[0]),
        lambda: driver.update("v2", NEW, drain=False),
    ):
        with pytest.raises(Closed):
            refused()
    assert not driver.alive
    assert generator.decoder.closed


def test_closing_does_not_wait_for_ever_for_a_step_that_does_not_end(generator, caplog):
    driver, gate = Driver(generator), Gate(generator)
    futures = submitted(driver, prompt("abc"))
    assert gate.reached.wait(WAIT_S)
    driver.close(timeout_s=0.01)
    assert isinstance(results(futures)[0], Closed)
    assert "left behind" in caplog.text
    gate.open.set()
    driver.close()


def test_a_dead_driver_fails_everything_that_waits_and_that_comes(generator, started, caplog):
    gate, driver = Gate(generator), started(generator)
    futures = submitted(driver, prompt("abc"), prompt("de"), prompt("waits", samples=4))
    gate._forward = lost
    gate.open.set()
    assert [type(result) for result in results(futures)] == [BackendDied] * 3
    with pytest.raises(BackendDied, match="device lost"):
        driver.submit(generator.prepare([prompt("abc")])[0])
    assert "device lost" in caplog.text


def test_a_listener_that_raises_harms_nobody_else(generator, started, caplog):
    driver = started(generator)
    driver.submit(generator.prepare([prompt("abc")])[0], lambda outcome: 1 / 0)
    assert answers(submitted(driver, prompt("de"))) == [alone(prompt("de"))]
    assert "could not be handed over" in caplog.text


def test_memory_that_a_step_touches_first_is_a_station_of_its_own(generator, started):
    """Every other step touches so much that it takes longer than the step."""
    forward, steps, lane = generator.decoder.forward, iter(range(1 << 30)), Lane("forward 0")

    def touching(step):
        if next(steps) % 2:
            with mmap.mmap(-1, 32 << 20) as fresh:
                for place in range(0, len(fresh), mmap.PAGESIZE):
                    fresh[place] = 1
        return forward(step)

    generator.decoder.forward = touching
    driver = started(generator, lane=lane)
    results(submitted(driver, prompt("abc", max_tokens=40)))
    counted = driver.counters()
    assert counted["faults"] > 0
    assert lane.stations().get("first touch", 0.0) == pytest.approx(counted["first_touch_s"], abs=0.05)


def test_the_model_is_measured_when_nothing_is_under_way_and_a_cancelled_measurement_ends_nothing(
    generator, started, monkeypatch
):
    best, seen = TextRoofline(1.0, 1.0, 1.0, 1, 1, 1.0), []
    measuring, go_on = threading.Event(), threading.Event()

    def measured(decoder, rows, tokens, seconds):
        seen.append((rows, seconds))
        measuring.set()
        assert go_on.wait(WAIT_S)
        return best

    monkeypatch.setattr(text_roofline, "measure_roofline", measured)
    driver = started(generator)
    before = answers(submitted(driver, prompt("abc")))
    first, second = driver.measure(3, 0.5), driver.measure(3, 0.5)
    assert measuring.wait(WAIT_S)
    assert second.cancel()
    first.cancel()  # too late for that
    go_on.set()
    assert driver.measure(4, 0.5).result(WAIT_S) == best
    assert seen == [(3, 0.5), (4, 0.5)]
    assert answers(submitted(driver, prompt("abc"))) == before


# Other weights


def test_what_comes_after_an_update_is_answered_by_the_new_weights_alone(generator):
    def twice(asked):
        return [*run(generator, [asked]), *run(generator, [asked])]

    before, again = twice(prompt(LONG))
    assert (before.versions, before.completions, again.cached_tokens) == (("",), alone(prompt(LONG)), PAGE)
    generator.update("v1", NEW)
    after, shared = twice(prompt(LONG))
    assert (after.version, after.completions, after.cached_tokens) == ("v1", of_new(prompt(LONG)), 0)
    assert (shared.completions, shared.cached_tokens) == (after.completions, PAGE)
    assert alone(prompt(LONG), weights=NEW) != alone(prompt(LONG))
    with pytest.raises(UsageError, match="no files"):
        generator.read_weights("anywhere")


def test_an_answer_under_way_goes_on_and_what_it_holds_serves_nobody_else(generator):
    add(generator, prompt(LONG, 12))
    for _ in range(5):
        generator.step()
    generator.update("v1", NEW)
    mixed = finish(generator)[0]
    tokens = mixed.completions[0].tokens
    assert tokens not in (alone(prompt(LONG, 12))[0].tokens, of_new(prompt(LONG, 12))[0].tokens)
    assert tokens[:3] == alone(prompt(LONG, 12))[0].tokens[:3]
    assert mixed.versions == ("", "v1")
    assert mixed.completions[0].versions == ((0, ""), (3, "v1"))  # two steps for the prompt
    [after] = run(generator, [prompt(LONG + " dog")])
    assert (after.cached_tokens, after.completions) == (0, of_new(prompt(LONG + " dog")))


def test_a_row_that_waits_for_anothers_beginning_computes_its_own(generator):
    """The first prompt is half through when the weights change; the second has waited for it."""
    add(generator, prompt(LONG + " one"), prompt(LONG + " two"))
    generator.step()
    generator.update("v1", NEW)
    finished = finish(generator)
    assert [finished[ticket].versions for ticket in (0, 1)] == [("", "v1"), ("v1",)]
    assert finished[1].completions == of_new(prompt(LONG + " two"))


@pytest.mark.parametrize(
    ("drain", "cancelled", "versions"),
    [
        pytest.param(True, False, [("",), ("",), ("v1",)], id="after the answers under way, before all others"),
        pytest.param(False, False, [("", "v1"), ("", "v1"), ("v1",)], id="with the next step"),
        pytest.param(True, True, [("",), ("",), ("",)], id="cancelled while it waits"),
    ],
)
def test_an_update_comes(generator, started, drain, cancelled, versions):
    gate, driver = Gate(generator), started(generator)
    early = submitted(driver, *(prompt(text, 5) for text in ("ab", "cd")))
    assert gate.reached.wait(WAIT_S)
    updated = driver.update("v1", NEW, drain=drain)
    assert not cancelled or updated.cancel()
    late = submitted(driver, prompt("ef", 5))
    gate.open.set()
    if not cancelled:
        updated.result(WAIT_S)
        assert not drain or all(future.done() for future in early)
    found = results([*early, *late])
    assert [one.versions for one in found] == versions
    assert found[2].completions == (alone if cancelled else of_new)(prompt("ef", 5))


def test_weights_that_cannot_be_exchanged_end_the_generator(generator, started):
    generator.decoder.swap = lambda packed: 1 / 0
    driver = started(generator)
    with pytest.raises(BackendDied, match="ZeroDivisionError"):
        driver.update("v1", NEW, drain=False).result(WAIT_S)
    with pytest.raises(BackendDied):
        submitted(driver, prompt("ab"))[0].result(WAIT_S)
