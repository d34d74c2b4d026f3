"""The backend in the engine's process: `central.child` opens it, and its event loop asks it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from pydantic import Field

from gpuinfer.api import Backend, BackendContext, Event, Limits, Request, Result
from gpuinfer.errors import UsageError
from gpuinfer.text.adapter_options import (
    ADAPTERS,
    FIRST,
    MAX_ADAPTERS,
    MAX_ADAPTERS_SAID,
    MOST_ADAPTERS,
    AdapterFolders,
    folders_given,
)
from gpuinfer.vllm.adapters import Adapters, Loaded
from gpuinfer.vllm.arguments import EngineOptions, engine_arguments
from gpuinfer.vllm.counting import Counting
from gpuinfer.vllm.engine import Engine
from gpuinfer.vllm.folder import folder_of, has_tokenizer

AHEAD = 0.25  # rows with vLLM beyond those that it computes, as a share of them: its queue is never empty


class Texts(Backend):
    """A text model whose engine is vLLM."""

    class Options(EngineOptions):
        room: str = Field(description="a folder for what this run needs on disk")
        on_cpu: bool = Field(False, description="whether the engine computes on the CPU")
        adapters: AdapterFolders = Field(None, description=ADAPTERS)
        max_adapters: int = Field(MAX_ADAPTERS, ge=1, le=MOST_ADAPTERS, description=MAX_ADAPTERS_SAID)

    options: Options
    serves = ("text",)

    async def start(self, context: BackendContext) -> None:
        """Open the model's language, start vLLM, load the adapters."""
        from gpuinfer.text.checkpoint import open_checkpoint
        from gpuinfer.text.language import open_language
        from gpuinfer.text.model import TextModel
        from gpuinfer.vllm.asking import Prompts
        from gpuinfer.vllm.driver import Driver

        own, spec = self.options, self.setup.model
        if spec is None:
            raise UsageError("vLLM serves a model, and none was named. Name one.")
        room = Path(own.room)
        adapters = folders_given(own.adapters, spec.arguments)
        self._checkpoint = checkpoint = open_checkpoint(spec)
        folder = folder_of(spec, room)
        tokenizer = has_tokenizer(folder)
        arguments = engine_arguments(
            own,
            self.setup,
            str(folder),
            tokenizer=tokenizer,
            on_cpu=own.on_cpu,
            adapters=own.max_adapters if adapters or own.enable_lora else 0,
            positions=checkpoint.shape.positions,
        )
        counting = Counting()
        self._engine = Engine.open(arguments, counting)
        language = open_language(checkpoint.language_files(), checkpoint.shape)
        facts = {"model": checkpoint.name, "device": _device(), **self._engine.facts}
        length = self._engine.length - 1  # it draws a token also where none is asked for
        processed = arguments["logprobs_mode"] == "processed_logprobs"
        prompts = Prompts(
            language, checkpoint.shape, self._engine.rows, length, {**facts, "context": length}, tokenizer, processed
        )
        self._adapters = Adapters(self._load, self._engine.unload, own.max_adapters)
        self._driver = Driver(self._engine, prompts, self._adapters, seed=self.setup.seed, processed=processed)
        self._text = TextModel(cast(Any, self._driver), context.stepped, lambda: {"name": facts["device"]})
        self._updating = asyncio.Lock()
        await self._engine.try_out()
        for name, where in adapters.items():
            await self._adapters.add(name, FIRST, where)
        rows = self._engine.rows
        ahead = rows + max(1, int(AHEAD * rows))
        self.limits = Limits(rows, in_flight=ahead, slots=ahead)

    async def infer(self, batch: Sequence[Request]) -> Sequence[Result]:
        answers = {event.request: event.error or event.value async for event in self.stream(batch)}
        return [answers[request] for request in batch]

    async def stream(self, batch: Sequence[Request]) -> AsyncIterator[Event]:
        async for event in self._text.stream(batch):
            yield event

    def cancel(self, request: Request) -> None:
        self._text.cancel(request)

    async def update(self, version: str, weights: str, *, adapter: str | None = None, drain: bool = True) -> None:
        """An adapter's new version, or other weights for all of the model."""
        async with self._updating:
            if adapter is not None:
                await self._adapters.add(adapter, version, weights)
            else:
                await self._reload(version, weights, drain)

    async def unload(self, adapter: str) -> None:
        async with self._updating:
            await self._adapters.remove(adapter)

    @property
    def adapters(self) -> Sequence[str]:
        return self._adapters.names

    async def _load(self, one: Loaded) -> None:
        """Checked as our own engine checks it: vLLM takes one of another shape without a word."""
        from gpuinfer.text.checkpoint.adapter import read_adapter

        await asyncio.to_thread(read_adapter, self._checkpoint, one.folder)
        await self._engine.load(one)

    async def _reload(self, version: str, weights: str, drain: bool) -> None:
        await asyncio.to_thread(refuse_no_folder, weights)
        changed = partial(self._driver.change_version, version)
        await self._engine.reload(weights, version=version, drain=drain, changed=changed)

    def device(self) -> Mapping[str, Any]:
        if not hasattr(self, "_text"):
            return {}
        return {**self._text.device(), "engine": self._engine.counting.engine(), "adapters": list(self._adapters.names)}

    async def close(self) -> None:
        if hasattr(self, "_text"):
            await self._text.close()
        elif hasattr(self, "_engine"):
            await asyncio.to_thread(self._engine.close)


def refuse_no_folder(weights: str) -> None:
    """Raises `UsageError` for what is no Hugging Face folder."""
    if not Path(weights, "config.json").is_file():
        raise UsageError(f"there is no model folder '{weights}'. Give one with config.json and safetensors files.")


def _device() -> str:
    from vllm.platforms import current_platform

    return str(current_platform.get_device_name(0))
