"""A server of vLLM's as a text model: prompts are made ready here, and what it draws becomes answers here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, cast

from gpuinfer.api import Event, Limits, Request, Setup
from gpuinfer.errors import UsageError
from gpuinfer.stats import Snapshot
from gpuinfer.text.adapter_options import FIRST
from gpuinfer.vllm.adapters import Adapters
from gpuinfer.vllm.endpoint import Endpoint


class Served:
    """One server, asked from this process."""

    def __init__(self, endpoint: Endpoint, text: Any, adapters: Adapters, facts: Mapping[str, Any]) -> None:
        self._endpoint, self._text, self._adapters, self._facts = endpoint, text, adapters, facts
        self.limits = Limits(endpoint.rows, in_flight=endpoint.rows, slots=endpoint.rows)

    @classmethod
    async def open(
        cls,
        setup: Setup,
        endpoint: Endpoint,
        name: str | None,
        folders: Mapping[str, str],
        most: int,
        processed: bool,
        stepped: Callable[[int, float], None],
    ) -> Served:
        """Raises `UsageError` for a server, or a model, that it cannot be."""
        spec = setup.model
        if spec is None or spec.kind != "text":
            raise UsageError("the backend 'vllm' serves models of text, and this run has none. Use another --backend.")
        from gpuinfer.text.checkpoint import open_checkpoint
        from gpuinfer.text.language import open_language
        from gpuinfer.text.model import TextModel
        from gpuinfer.vllm.asking import Prompts
        from gpuinfer.vllm.driver import Driver

        await endpoint.open(name)
        checkpoint = await asyncio.to_thread(open_checkpoint, spec)
        language = await asyncio.to_thread(open_language, checkpoint.language_files(), checkpoint.shape)
        length = endpoint.length - 1
        facts = {"model": endpoint.name, "endpoint": endpoint.url, "slots": endpoint.rows, "context": length}
        prompts = Prompts(language, checkpoint.shape, endpoint.rows, length, facts, True, processed)
        adapters = Adapters(endpoint.load, endpoint.unload, most)
        for other in endpoint.others:
            adapters.found(other)
        driver = Driver(cast(Any, endpoint), prompts, adapters, seed=setup.seed, processed=processed)
        text = TextModel(cast(Any, driver), stepped, dict)
        for adapter, folder in folders.items():
            await adapters.add(adapter, FIRST, folder)
        return cls(endpoint, text, adapters, facts)

    async def stream(self, batch: Sequence[Request]) -> AsyncIterator[Event]:
        async for event in self._text.stream(batch):
            yield event

    def cancel(self, request: Request) -> None:
        self._text.cancel(request)

    async def update(self, version: str, weights: str, *, adapter: str | None) -> None:
        if adapter is None:
            raise UsageError(
                "a vLLM server changes all of its weights only by its own ways of transfer. Give an adapter's, or "
                "start the engine here: --backend vllm without -B endpoint."
            )
        await self._adapters.add(adapter, version, weights)

    async def unload(self, adapter: str) -> None:
        await self._adapters.remove(adapter)

    @property
    def adapters(self) -> Sequence[str]:
        return self._adapters.names

    async def stats(self) -> Mapping[str, Any]:
        """What it tells of itself: of all its clients, since its start."""
        await self._endpoint.measure()
        counted = self._endpoint.counting
        tokens = {"input": counted.prompt_tokens, "output": counted.output_tokens}
        told = {
            "model": dict(self._facts),
            "tokens": tokens,
            "engine": counted.engine(),
            "adapters": list(self.adapters),
        }
        return Snapshot(device=told, slots=self._endpoint.rows).to_wire()

    async def close(self) -> None:
        await self._text.close()
        await self._endpoint.end()
