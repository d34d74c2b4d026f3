"""A vLLM engine that many tests share, on an event loop in a thread of its own: each start takes half a minute.

And what our own engine answers to the same prompts.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np
import psutil

from gpuinfer.api import BackendContext, ModelSpec, Request, Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.backends.vllm import Vllm
from gpuinfer.generation import Generation, Part, Prompt, Sampling
from gpuinfer.strategies.dynamic import Dynamic

T = TypeVar("T")
TINY = Setup(ModelSpec("tiny", kind="text"))
SECONDS = 240.0  # after which an engine that does not start or answer has failed
CLOSE = 1e-4  # of log-probabilities, and of the top two at a tie


class Held:
    """One backend, started. Its calls block."""

    def __init__(self, setup: Setup = TINY, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.backend = Vllm(setup, **options)
        self.run(self.backend.start(BackendContext(strategy=Dynamic(setup))))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.start(work).result(SECONDS)

    def start(self, work: Coroutine[Any, Any, T]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def ask(self, prompt: Prompt, parts: list[Part] | None = None) -> Generation:
        """Raises what the request's error is."""
        request = Request(prompt, rows=prompt.samples, parts=parts is not None)
        async for event in self.backend.stream([request]):
            if not event.last and parts is not None:
                parts.append(event.value)
            elif event.error is not None:
                raise event.error
            elif event.last:
                return event.value
        raise AssertionError("no answer")

    def asked(self, *prompts: Prompt) -> list[Generation]:
        async def all_of_them() -> list[Generation]:
            return list(await asyncio.gather(*map(self.ask, prompts)))

        return self.run(all_of_them())

    def update(self, version: str, weights: object, **options: Any) -> None:
        self.run(self.backend.update(version, str(weights), **options))

    def device(self) -> dict[str, Any]:
        return dict(self.run(self.backend.stats())["device"])

    @property
    def processes(self) -> list[psutil.Process]:
        """The engine's process, and all below it: AsyncLLM's, the core, the worker."""
        server = psutil.Process(self.backend._server._child.pid)
        return [server, *server.children(recursive=True)]

    def named(self, part: str) -> psutil.Process:
        return next(one for one in self.processes if part in " ".join(one.cmdline()) or part in one.name())

    def close(self) -> None:
        self.run(self.backend.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SECONDS)
        self._loop.close()


def own(*prompts: Prompt) -> list[Generation]:
    """The same prompts answered by our own engine."""

    async def answered() -> list[Generation]:
        backend = InProcess(TINY)
        await backend.start(BackendContext())
        try:
            requests = [Request(prompt, rows=prompt.samples) for prompt in prompts]
            answers = {event.request: event.value async for event in backend.stream(requests)}
        finally:
            await backend.close()
        return [answers[request] for request in requests]

    return asyncio.run(answered())


def scored(tokens: tuple[int, ...], count: int) -> np.ndarray:
    """The log-probabilities of the last `count` of these tokens, by a forward of our own engine."""
    (echo,) = own(Prompt(tokens=tokens, sampling=Sampling(max_tokens=0, prompt_logprobs=0)))
    return np.array([one.chosen.logprob for one in echo.prompt_logprobs[-count:]])
