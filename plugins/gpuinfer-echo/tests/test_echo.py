import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from gpuinfer_echo.backend import Echo
from gpuinfer_echo.strategy import Fixed
from gpuinfer_echo.text import Starling
from gpuinfer_echo.workload import Ping, ask

from gpuinfer.api import BackendContext, Limits, Reason, Request
from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.testing import (
    FakeInfer,
    assert_ok,
    check_backend,
    check_package,
    check_strategy,
    check_workload,
    run_virtual,
    waiting,
)


def test_the_backend_keeps_the_contract():
    assert_ok(check_backend(lambda: Echo(seconds=0.0)))


def test_the_strategy_keeps_the_contract():
    assert_ok(check_strategy(lambda: Fixed(rows=4)))


def test_the_backend_of_text_keeps_the_contract():
    assert_ok(check_backend(lambda: Starling(seconds=0.0)))


def test_the_workload_keeps_the_contract_with_its_processes():
    assert_ok(check_workload(lambda: Ping(rows=50)))


def test_the_installed_package_keeps_the_contract():
    assert_ok(check_package("gpuinfer-echo"))


@pytest.mark.parametrize(
    ("arrivals", "cut", "reason"),
    [
        pytest.param([1.0], 3.0, Reason.WAITED, id="a lone request waits out the timeout"),
        pytest.param([1.0, 1.5, 1.6], 1.0, Reason.FULL, id="enough rows go at once"),
    ],
)
def test_fixed_cuts(arrivals, cut, reason):
    queue = waiting(arrivals, max_rows=64)
    strategy = Fixed(rows=3, timeout=2.0)
    assert (strategy.cut_at(queue), strategy.reason(queue)) == (cut, reason)


def test_echo_answers_with_the_payload():
    assert asyncio.run(Echo(seconds=0.0).infer([Request("a"), Request("b")])) == ["a", "b"]


def answers_of(*prompts: Prompt) -> list[Any]:
    async def ask_starling() -> list[Any]:
        starling = Starling(seconds=0.01)
        await starling.start(BackendContext())
        assert starling.limits == Limits(16, 16, 16)
        return [event.error or event.value async for event in starling.stream([Request(prompt) for prompt in prompts])]

    return run_virtual(ask_starling())


def test_the_starling_answers_the_shorter_prompt_first():
    long, short = (Prompt(text="to be or", sampling=Sampling(max_tokens=tokens, temperature=0.0)) for tokens in (5, 2))
    assert [answer.completions[0].text for answer in answers_of(long, short)] == ["to be", "to be or to be"]


def test_the_starling_is_heard_word_by_word_by_those_who_listen():
    async def listen() -> list[Any]:
        starling = Starling(seconds=0.01)
        await starling.start(BackendContext())
        prompt = Prompt(text="to be", sampling=Sampling(max_tokens=3, temperature=0.0))
        return [event.value async for event in starling.stream([Request(prompt, parts=True)])]

    *parts, answer = run_virtual(listen())
    assert [part.text for part in parts] == ["to", " be", " to"]
    assert "".join(part.text for part in parts) == answer.completions[0].text


def test_the_starling_refuses_one_prompt_and_answers_the_next():
    refused, answered = answers_of(Prompt(tokens=(1, 2)), Prompt(text="hey", sampling=Sampling(max_tokens=1)))
    assert isinstance(refused, BadPrompt)
    assert answered.completions[0].text == "hey"


class Heard:
    """The channel of a worker that is asked in this process."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    async def send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)

    def receive(self) -> Awaitable[dict[str, Any]]:
        raise AssertionError("nobody tells it anything")


def test_a_worker_counts_what_came_back_as_it_was_sent():
    infer, heard = FakeInfer(lambda request: request.payload), Heard()
    run_virtual(ask(infer, heard, {"rows": 150}))
    assert [message["answered"] for message in heard.messages] == [100, 150]
    assert infer.live == set()
