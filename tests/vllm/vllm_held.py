"""A vLLM engine that many tests share, on an event loop in a thread of its own: each start takes half a minute."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import psutil

from gpuinfer.api import BackendContext, ModelSpec, Request, Setup
from gpuinfer.backends.vllm import Vllm
from gpuinfer.generation import Generation, Part, Prompt
from gpuinfer.strategies.dynamic import Dynamic

T = TypeVar("T")
SECONDS = 240.0  # after which an engine that does not start or answer has failed


class Held:
    """One backend, started. Its calls block."""

    def __init__(self, setup: Setup | None = None, **options: Any) -> None:
        self.setup = setup or Setup(ModelSpec("tiny", kind="text"))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.backend = Vllm(self.setup, **options)
        self.run(self.backend.start(BackendContext(strategy=Dynamic(self.setup))))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(SECONDS)

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
