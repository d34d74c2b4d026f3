"""A session whose event loop runs in a thread of its own."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gpuinfer.api import Backend, Event, Limits
from gpuinfer.errors import BackendError, BadPrompt
from gpuinfer.generation import Completion, Generation, Part, Prompt
from gpuinfer.runtime.background_session import BackgroundSession
from gpuinfer.strategies.dynamic import Dynamic


class Slow(Backend):
    """Says "a", and the rest once it is let go on."""

    serves = ("text",)
    limits = Limits(max_rows=1, slots=1)

    def __init__(self) -> None:
        super().__init__()
        self.goes_on, self.cancelled = threading.Event(), threading.Event()

    async def infer(self, batch):
        raise NotImplementedError

    async def stream(self, batch):
        for request in batch:
            if request.payload.text == "bad":
                yield Event(request, error=BadPrompt("no. Mend it."))
                continue
            yield Event(request, Part(sample=0, text="a", tokens=(1,)), last=False)
            await asyncio.to_thread(self.goes_on.wait, 60)
            yield Event(request, Part(sample=0, text="b", tokens=(2,), finish_reason="stop"), last=False)
            one = Completion(text="ab", tokens=(1, 2), finish_reason="stop")
            yield Event(request, Generation(completions=(one,), prompt_tokens=1))

    def cancel(self, request):
        self.cancelled.set()
        self.goes_on.set()


@pytest.fixture
def backend():
    made = Slow()
    yield made
    made.goes_on.set()


def test_an_answer_is_read_as_it_grows(backend):
    with BackgroundSession(backend, Dynamic()) as session:
        assert session.ready().slots == 1
        answer = session.stream(Prompt(text="p"))
        assert next(answer).text == "a"
        backend.goes_on.set()
        assert [part.text for part in answer] == ["b"]
        assert next(answer, None) is None
        assert answer.result.completions[0].text == "ab"


def test_errors_come_from_the_reading_and_the_next_answer_is_none_the_worse(backend):
    backend.goes_on.set()
    with BackgroundSession(backend, Dynamic()) as session:
        with pytest.raises(BadPrompt):
            list(session.stream(Prompt(text="bad")))
        assert "".join(part.text for part in session.stream(Prompt(text="p"))) == "ab"


def test_an_answer_that_is_closed_is_cancelled(backend):
    with BackgroundSession(backend, Dynamic()) as session:
        answer = session.stream(Prompt(text="p"))
        next(answer)
        answer.close()
        assert backend.cancelled.wait(60)


def test_what_the_start_raises_is_raised_here(backend):
    async def start(context):
        raise BackendError("no. Mend it.")

    backend.start = start
    with BackgroundSession(backend, Dynamic()) as session, pytest.raises(BackendError):
        session.ready()
