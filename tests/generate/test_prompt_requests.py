"""Prompts with more samples than a request may have: in parts, with one deadline, and refused by a full queue."""

from __future__ import annotations

import asyncio

import pytest

from gpuinfer.api import Limits
from gpuinfer.errors import QueueFull
from gpuinfer.generation import Completion, Generation, Prompt
from gpuinfer.serving.prompt_requests import PromptRequester
from gpuinfer.testing.fakes import FakeInfer


def answer_of(prompt: Prompt) -> Generation:
    samples = range(prompt.first_sample, prompt.first_sample + prompt.samples)
    return Generation(
        completions=tuple(Completion(text=str(number), tokens=(number,), finish_reason="length") for number in samples),
        prompt_tokens=2,
    )


def test_all_parts_of_a_prompt_have_the_deadline_of_the_whole():
    loop, now = asyncio.new_event_loop(), [100.0]
    loop.time = lambda: now[0]  # type: ignore[method-assign]

    def answered(request):
        now[0] += 2
        return answer_of(request.payload)

    async def ask() -> tuple[Generation, FakeInfer]:
        infer = FakeInfer(answered, Limits(max_rows=4))
        return await PromptRequester(infer, 4, 4, timeout=7.0).ask(Prompt(text="a", samples=10)), infer

    try:
        found, infer = loop.run_until_complete(ask())
    finally:
        loop.close()
    assert [one.text for one in found.completions] == [str(number) for number in range(10)]
    assert found.prompt_tokens == 2
    assert [(one.rows, one.deadline) for one in infer.requests] == [(4, 107.0), (4, 107.0), (2, 107.0)]


async def test_a_full_queue_is_tried_as_often_as_it_is_said():
    def refused(request):
        full = QueueFull("full")
        full.retry_after_s = 0.001
        raise full

    infer = FakeInfer(refused)
    for tries in (1, 3):
        infer.requests.clear()
        with pytest.raises(QueueFull):
            await PromptRequester(infer, 4, 4, tries=tries).ask(Prompt(text="a", samples=2))
        assert len(infer.requests) == tries
