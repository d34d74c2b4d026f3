"""The backend in the engine's process: `central.server_process` opens it, and its event loop asks it.

The model's files, tokenizer and sizes are read by vLLM alone, so that it serves what our own reader does not know.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field

from gpuinfer.api import Backend, BackendContext, Event, Limits, ModelSpec, Request, Result
from gpuinfer.backends.vllm_engine.async_llm import VllmCounters, VllmEngine, prepare_environment
from gpuinfer.backends.vllm_engine.engine_arguments import EngineOptions, engine_arguments, most_positions
from gpuinfer.backends.vllm_engine.lora_versions import VllmAdapter, VllmAdapters, refuse_misfit
from gpuinfer.errors import UsageError
from gpuinfer.text.packaged_models import PACKAGED
from gpuinfer.text.text_options import (
    ADAPTERS_HELP,
    FIRST_VERSION,
    MAX_ADAPTERS,
    MAX_ADAPTERS_HELP,
    MOST_ADAPTERS,
    AdapterFolders,
    adapter_folders_given,
    path_kind,
)

if TYPE_CHECKING:
    from gpuinfer.text.checkpoint import Checkpoint


def model_for_vllm(spec: ModelSpec, room: Path) -> tuple[str, Checkpoint | None]:
    """What vLLM finds the model by: the folder, file or name of a hub that was given. A model that our reader alone
    knows, "tiny" or one in training, is written into a folder in `room`, and comes with its checkpoint.

    Raises `UsageError` for a diffusion model, and for one that cannot be written as a Hugging Face folder.
    """
    from gpuinfer.text.checkpoint import BUILT_IN, masked_family_in, open_checkpoint, save_folder

    path, kind = path_kind(spec.name)
    if kind == "nothing" and spec.name in PACKAGED and spec.weights is None:
        raise UsageError(
            f"the backend 'vllm' cannot serve '{spec.name}', which comes as a GGUF file. Use the backend inprocess, or "
            "name a Hugging Face folder."
        )
    ours = spec.name in BUILT_IN and kind != "folder"
    if spec.weights is None and not ours and path.suffix not in (".pt", ".pth"):
        if kind == "folder":
            refuse_diffusion(spec.name, masked_family_in(path))
        return spec.name if kind == "nothing" else str(path.resolve()), None
    checkpoint = open_checkpoint(spec)
    refuse_diffusion(spec.name, None if checkpoint.shape.masking is None else checkpoint.shape.family)
    if checkpoint.shape.family in ("null", "nanogpt"):
        raise UsageError(
            f"the backend 'vllm' cannot serve '{spec.name}', which is no Hugging Face folder. "
            "Use the backend inprocess, or name another --model."
        )
    to = room / "model"
    save_folder(checkpoint, to)
    if checkpoint.language.bytes:
        write_bytes_tokenizer(to, checkpoint.shape.vocabulary, checkpoint.shape.end_tokens[0])
    return str(to), checkpoint


def refuse_diffusion(name: str, family: str | None) -> None:
    if family is not None:
        raise UsageError(
            f"the backend 'vllm' goes from left to right, and '{name}' is a diffusion model ({family}). Use the "
            "backend inprocess."
        )


def write_bytes_tokenizer(folder: Path, vocabulary: int, end: int) -> None:
    """A tokenizer.json whose token i is byte i: what "tiny" has built in, as others read it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # What stands for each byte in a byte-level vocabulary (Radford et al. 2019, GPT-2's `bytes_to_unicode`).
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    pieces = {chr(byte) if byte in plain else chr(next(others)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(pieces, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    spare = [f"<|spare {number}|>" for number in range(end + 1, vocabulary)]
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in spare])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


AHEAD = 0.25  # rows with vLLM beyond those that it computes, as a share of them: its queue is never empty


class VllmTextBackend(Backend):
    """A text model whose engine is vLLM."""

    class Options(EngineOptions):
        room: str = Field(description="a folder for what this run needs on disk")
        on_cpu: bool = Field(False, description="whether the engine computes on the CPU")
        adapters: AdapterFolders = Field(None, description=ADAPTERS_HELP)
        max_adapters: int = Field(MAX_ADAPTERS, ge=1, le=MOST_ADAPTERS, description=MAX_ADAPTERS_HELP)

    options: Options
    serves = ("text",)

    async def start(self, context: BackendContext) -> None:
        """Open the model's language, start vLLM, load the adapters."""
        from gpuinfer.backends.vllm_engine.vllm_driver import VllmDriver
        from gpuinfer.backends.vllm_engine.vllm_requests import PromptPreparer
        from gpuinfer.text.language import open_language
        from gpuinfer.text.model import TextModel

        own, spec = self.options, self.setup.model
        if spec is None:
            raise UsageError("vLLM serves a model, and none was named. Name one.")
        adapters = adapter_folders_given(own.adapters, spec.arguments)
        prepare_environment()
        name, self._checkpoint = model_for_vllm(spec, Path(own.room))
        arguments = engine_arguments(
            own,
            self.setup,
            name,
            on_cpu=own.on_cpu,
            adapters=own.max_adapters if adapters or own.enable_lora else 0,
        )
        counting = VllmCounters()
        self._engine = engine = VllmEngine.open(arguments, most_positions(self.setup), counting)
        if self._checkpoint is None:
            language = engine.language()
        else:
            language = open_language(self._checkpoint.language, self._checkpoint.shape)
        device = str(import_module("vllm.platforms").current_platform.get_device_name(0))
        length = engine.length - (engine.pooling is None)  # it draws a token also where none is asked for
        facts = {"model": spec.name, "device": device, **engine.facts, "context": length}
        processed = arguments["logprobs_mode"] == "processed_logprobs"
        prompts = PromptPreparer(language, engine.model, engine.rows, length, facts, processed, engine.pooling)
        self._adapters = VllmAdapters(self._load, self._engine.unload, own.max_adapters)
        self._driver = VllmDriver(self._engine, prompts, self._adapters, seed=self.setup.seed, processed=processed)
        self._text = TextModel(cast(Any, self._driver), context.stepped, lambda: {"name": device})
        self._updating = asyncio.Lock()
        await self._engine.try_out()
        for name, where in adapters.items():
            await self._adapters.add(name, FIRST_VERSION, where)
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
                return
            if not await asyncio.to_thread(Path(weights, "config.json").is_file):
                raise UsageError(
                    f"there is no model folder '{weights}'. Give one with config.json and safetensors files."
                )
            changed = partial(self._driver.change_version, version)
            await self._engine.reload(weights, version=version, drain=drain, changed=changed)

    async def unload(self, adapter: str) -> None:
        async with self._updating:
            await self._adapters.remove(adapter)

    @property
    def adapters(self) -> Sequence[str]:
        return self._adapters.names

    async def _load(self, one: VllmAdapter) -> None:
        await asyncio.to_thread(self._check_adapter, one.folder)
        await self._engine.load(one)

    def _check_adapter(self, folder: str) -> None:
        """vLLM takes an adapter of another shape without a word. Raises `UsageError`."""
        from gpuinfer.text.checkpoint.peft_adapter import read_adapter

        if self._checkpoint is not None:
            read_adapter(self._checkpoint, folder)
        else:
            refuse_misfit(Path(self._engine.weights), Path(folder))

    def device(self) -> Mapping[str, Any]:
        if not hasattr(self, "_text"):
            return {}
        return {**self._text.device(), "engine": self._engine.counting.engine(), "adapters": list(self._adapters.names)}

    async def close(self) -> None:
        if hasattr(self, "_text"):
            await self._text.close()
        elif hasattr(self, "_engine"):
            await asyncio.to_thread(self._engine.close)
