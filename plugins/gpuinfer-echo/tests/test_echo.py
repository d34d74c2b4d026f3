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


@pytest.mark.parametrize(
    ("check", "what"),
    [
        pytest.param(check_backend, lambda: Echo(seconds=0.0), id="the backend"),
        pytest.param(check_backend, lambda: Starling(seconds=0.0), id="the backend of text"),
        pytest.param(check_strategy, lambda: Fixed(rows=4), id="the strategy"),
        pytest.param(check_workload, lambda: Ping(rows=50), id="the workload with its processes"),
        pytest.param(check_package, "gpuinfer-echo", id="the installed package"),
    ],
)
def test_each_keeps_the_contract(check, what):
    assert_ok(check(what))


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


def said(*requests: Request) -> list[Any]:
    """What a starling says to them, in its order: the text of a part or of an answer, or the kind of an error."""

    async def ask_starling() -> list[Any]:
        starling = Starling(seconds=0.01)
        await starling.start(BackendContext())
        assert starling.limits == Limits(16, 16, 16)
        return [
            type(event.error) if event.error else getattr(event.value, "completions", [event.value])[0].text
            async for event in starling.stream(list(requests))
        ]

    return run_virtual(ask_starling())


def asked(text: str, tokens: int, **how: bool) -> Request:
    return Request(Prompt(text=text, sampling=Sampling(max_tokens=tokens, temperature=0.0)), **how)


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        pytest.param([asked("to be or", 5), asked("to be or", 2)], ["to be", "to be or to be"], id="the shorter first"),
        pytest.param([asked("to be", 3, parts=True)], ["to", " be", " to", "to be to"], id="word by word who listens"),
        pytest.param([Request(Prompt(tokens=(1, 2))), asked("hey", 1)], [BadPrompt, "hey"], id="one is refused"),
    ],
)
def test_the_starling_answers(requests, expected):
    assert said(*requests) == expected


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
