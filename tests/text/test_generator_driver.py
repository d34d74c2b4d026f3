"""The thread that steps: what is submitted is answered, whatever happens."""

from __future__ import annotations

import mmap
import threading
import time
from concurrent.futures import Future
from functools import partial

import pytest
from text.toy import alone, toy_generator

from gpuinfer.api import TextRoofline
from gpuinfer.errors import BackendDied, Closed
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.models.device_arbiter import UnsharedSlot
from gpuinfer.stats import Lane
from gpuinfer.text import text_roofline
from gpuinfer.text.generator import Driver
from gpuinfer.text.text_roofline import StepCost

WAIT_S = 60.0


def prompt(text: str, max_tokens: int = 6, samples: int = 1) -> Prompt:
    return Prompt(text=text, key=text, samples=samples, sampling=Sampling(max_tokens=max_tokens, ignore_eos=True))


class Gate:
    """Holds the decoder before its next step until it is opened."""

    def __init__(self, generator) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self._forward = generator.decoder.forward
        generator.decoder.forward = self._held

    def _held(self, step):
        self.reached.set()
        assert self.open.wait(WAIT_S)
        return self._forward(step)


@pytest.fixture
def generator():
    return toy_generator()


@pytest.fixture
def driver(generator):
    driver = Driver(generator)
    yield driver
    driver.close()


def submitted(driver, *prompts) -> list[Future]:
    futures = []
    for prepared in driver.generator.prepare(prompts):
        futures.append(future := Future())
        driver.submit(prepared, future.set_result)
    return futures


def closing_in_a_thread(driver) -> threading.Thread:
    """A thread that closes it, once the driver knows."""
    closing = threading.Thread(target=driver.close)
    closing.start()
    until = time.monotonic() + WAIT_S
    while driver.alive:
        assert time.monotonic() < until
        time.sleep(0.001)
    return closing


def test_what_is_submitted_is_answered(driver):
    prompts = [prompt(f"prompt {'abcdefgh'[number]}", samples=1 + number % 3) for number in range(8)]
    futures = submitted(driver, *prompts)
    assert [future.result(WAIT_S).completions for future in futures] == [alone(one) for one in prompts]


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another model"])
def test_no_step_is_left_on_a_device_that_another_model_has_next(beside):
    """Its time would be taken for the other model's."""

    class Turns(UnsharedSlot):
        def has_all(self, turn):
            return beside

    generator, asked = toy_generator(ahead=True), prompt("abc", 9)
    driver = Driver(generator, place=Turns())
    (future,) = submitted(driver, asked)
    assert future.result(WAIT_S).completions == alone(asked)
    driver.close()
    assert bool(generator.decoder.ahead) is not beside


def test_the_counters_and_the_listener_see_every_step(generator):
    seen = []
    driver = Driver(generator, on_step=lambda rows, seconds: seen.append((rows, seconds)))
    [future] = submitted(driver, prompt("abc", 4))
    future.result(WAIT_S)
    driver.close()
    counters = driver.counters()
    assert [rows for rows, _ in seen] == [1] * 4
    assert counters["steps"] == 4
    assert counters["seconds"] == pytest.approx(sum(seconds for _, seconds in seen))
    assert (counters["prompt_tokens"], counters["tokens"], counters["output_tokens"]) == (3, 6, 4)
    assert (counters["finished"], counters["failed"]) == (1, 0)


def test_a_cancelled_prompt_has_no_outcome_and_the_others_have(generator):
    gate = Gate(generator)
    outcomes, complete = {}, threading.Event()

    def deliver(parts, some):
        outcomes.update(some)
        if len(outcomes) == 2:
            complete.set()

    driver = Driver(generator, deliver=deliver)
    prepared = generator.prepare([prompt("under way", 50), prompt("stays"), prompt("waits", samples=4), prompt("last")])
    tickets = [driver.submit(one) for one in prepared]
    assert gate.reached.wait(WAIT_S)
    driver.cancel(tickets[0])
    driver.cancel(tickets[2])
    driver.cancel(12345)
    gate.open.set()
    assert complete.wait(WAIT_S)
    driver.close()
    assert outcomes.keys() == {tickets[1], tickets[3]}
    assert generator.free_slots == 4


def test_closing_fails_what_is_unfinished_and_takes_nothing_more(generator):
    gate = Gate(generator)
    driver = Driver(generator)
    futures = submitted(driver, prompt("abc", 50), prompt("waits", samples=4))
    assert gate.reached.wait(WAIT_S)
    closing = closing_in_a_thread(driver)
    gate.open.set()
    closing.join(WAIT_S)
    assert [type(future.result(WAIT_S)) for future in futures] == [Closed, Closed]
    with pytest.raises(Closed):
        driver.submit(generator.prepare([prompt("abc")])[0])
    assert not driver.alive
    assert generator.decoder.closed


def test_closing_does_not_wait_for_ever_for_a_step_that_does_not_end(generator, caplog):
    gate = Gate(generator)
    driver = Driver(generator)
    [future] = submitted(driver, prompt("abc"))
    assert gate.reached.wait(WAIT_S)
    driver.close(timeout_s=0.01)
    assert isinstance(future.result(WAIT_S), Closed)
    assert "left behind" in caplog.text
    gate.open.set()
    driver.close()


def test_a_dead_driver_fails_everything_that_waits_and_that_comes(generator, caplog):
    gate = Gate(generator)
    driver = Driver(generator)
    futures = submitted(driver, prompt("abc"), prompt("de"), prompt("waits", samples=4))

    def die(step):
        raise RuntimeError("CUDA error: device lost")

    gate._forward = die
    gate.open.set()
    assert [type(future.result(WAIT_S)) for future in futures] == [BackendDied] * 3
    with pytest.raises(BackendDied, match="device lost"):
        driver.submit(generator.prepare([prompt("abc")])[0])
    driver.close()
    assert "device lost" in caplog.text


def test_a_listener_that_raises_harms_nobody_else(driver, caplog):
    [prepared] = driver.generator.prepare([prompt("abc")])
    driver.submit(prepared, lambda outcome: 1 / 0)
    [future] = submitted(driver, prompt("de"))
    assert future.result(WAIT_S).completions == alone(prompt("de"))
    assert "could not be handed over" in caplog.text


def test_threads_may_submit_at_the_same_time(driver):
    prompts = [[prompt(f"{'abcd'[thread]}{'efghijkl'[number]}", 3) for number in range(8)] for thread in range(4)]
    futures: list[list[Future]] = [[] for _ in prompts]
    threads = [
        threading.Thread(
            target=partial(lambda thread: futures[thread].extend(submitted(driver, *prompts[thread])), thread)
        )
        for thread in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    for asked, answered in zip(prompts, futures, strict=True):
        assert [future.result(WAIT_S).completions for future in answered] == [alone(one) for one in asked]


def test_what_steps_cost_at_least_and_what_prompts_ask_for_is_counted(generator):
    driver = Driver(generator, cost=StepCost(generator.decoder.shape, 4))
    plain = prompt("abc")
    sampling = Sampling(max_tokens=6, ignore_eos=True, stop=("never",), logprobs=1, presence_penalty=0.5)
    stopping = Prompt(text="abd", key="abd", sampling=sampling)
    try:
        for future in submitted(driver, plain, stopping):
            future.result(WAIT_S)
        counted = driver.counters()
    finally:
        driver.close()
    assert counted["flops"] > counted["prefill_flops"] > 0
    assert counted["bytes"] > counted["prefill_bytes"] > 0
    asked = ("stop", "logprobs", "penalties", "constraints", "lists")
    assert [counted[f"with_{name}"] for name in asked] == [1, 1, 1, 0, 0]
    assert counted["read_as_they_grow"] == 0


def test_memory_that_a_step_touches_first_is_a_station_of_its_own(generator):
    """Every other step touches so much that it takes longer than the step."""
    forward, steps = generator.decoder.forward, iter(range(1 << 30))

    def touching(step):
        if next(steps) % 2:
            with mmap.mmap(-1, 32 << 20) as fresh:
                for place in range(0, len(fresh), mmap.PAGESIZE):
                    fresh[place] = 1
        return forward(step)

    generator.decoder.forward = touching
    lane = Lane("forward 0")
    driver = Driver(generator, lane=lane)
    try:
        submitted(driver, prompt("abc", max_tokens=40))[0].result(WAIT_S)
        counted = driver.counters()
    finally:
        driver.close()
    assert counted["faults"] > 0
    assert lane.stations().get("first touch", 0.0) == pytest.approx(counted["first_touch_s"], abs=0.05)


def test_the_model_is_measured_when_nothing_is_under_way_and_answers_are_the_same_after_it(generator, monkeypatch):
    best = TextRoofline(1.0, 1.0, 1.0, 1, 1, 1.0)
    seen = []
    monkeypatch.setattr(
        text_roofline, "measure_roofline", lambda decoder, rows, tokens, seconds: seen.append((rows, seconds)) or best
    )
    driver = Driver(generator)
    try:
        before = submitted(driver, prompt("abc"))[0].result(WAIT_S)
        assert driver.measure(3, 0.5).result(WAIT_S) == best
        after = submitted(driver, prompt("abc"))[0].result(WAIT_S)
    finally:
        driver.close()
    assert seen == [(3, 0.5)]
    assert before.completions[0].tokens == after.completions[0].tokens


def test_a_measurement_that_nobody_waits_for_any_more_ends_nothing(generator, monkeypatch):
    measuring, go_on = threading.Event(), threading.Event()

    def slowly(*given):
        measuring.set()
        assert go_on.wait(WAIT_S)

    monkeypatch.setattr(text_roofline, "measure_roofline", slowly)
    driver = Driver(generator)
    try:
        first, second = driver.measure(3, 0.5), driver.measure(3, 0.5)
        assert measuring.wait(WAIT_S)
        assert second.cancel()
        first.cancel()  # too late for that
        go_on.set()
        assert submitted(driver, prompt("abc"))[0].result(WAIT_S).completions
    finally:
        driver.close()
