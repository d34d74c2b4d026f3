"""One vLLM engine: its start, requests, adapters, weights, counters and end.

Runs in the engine's process alone. All uses of vLLM's own classes, but for the logits processors, are here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import time
import types
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuinfer.api import Lane
from gpuinfer.backends.vllm_engine.engine_arguments import refuse_unknown
from gpuinfer.backends.vllm_engine.list_constraints import processor_for
from gpuinfer.backends.vllm_engine.lora_versions import VllmAdapter
from gpuinfer.backends.vllm_engine.vllm_requests import VllmModel, VllmRequest
from gpuinfer.errors import BackendDied, BadPrompt, GpuinferError, UsageError
from gpuinfer.text.language.tokenizer import DEFAULT, WITH_TOOLS
from gpuinfer.text.language.transformers_tokenizer import language_of, token_ids_of

if TYPE_CHECKING:
    from gpuinfer.text.language import Language


class VllmCounters:
    """Counters, which vLLM's output handler updates once a step, on the event loop.

    vLLM calls the classes that `record` reads unstable.
    """

    def __init__(self) -> None:
        self.on_step: Callable[[int, float], None] | None = None
        self.lane: Lane | None = None
        self.running = self.waiting = 0
        self.preemptions = self.steps = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.prefix_queries = self.prefix_hits = 0
        self.cache_usage = self.seconds = self.held_s = 0.0
        self._since: float | None = None  # when the step under way began; None: nothing is under way

    def forget(self) -> None:
        """Reset the counters, after the trial requests."""
        kept = self.on_step, self.lane
        VllmCounters.__init__(self)
        self.on_step, self.lane = kept

    def begin(self) -> None:
        """A request has come."""
        if self._since is None:
            self._since = time.monotonic()
            self._enter("forward")

    def rest(self) -> None:
        """No request is under way any more."""
        self._since = None
        self._enter("idle")

    def _enter(self, station: str) -> None:
        if self.lane is not None:
            self.lane.enter(station)

    def record(self, scheduler: Any, iteration: Any) -> None:
        """One step's outputs have come."""
        if scheduler is not None:
            self.running, self.waiting = int(scheduler.num_running_reqs), int(scheduler.num_waiting_reqs)
            self.cache_usage = float(scheduler.kv_cache_usage)
            self.prefix_queries += int(scheduler.prefix_cache_stats.queries)
            self.prefix_hits += int(scheduler.prefix_cache_stats.hits)
        if iteration is None:
            return
        prompts = iteration.prompt_token_stats
        drawn = int(iteration.num_generation_tokens)
        self.output_tokens += drawn
        self.prompt_tokens += int(prompts.computed)
        self.cached_tokens += int(prompts.cached_tokens)
        self.preemptions += int(iteration.num_preempted_reqs)
        now = time.monotonic()
        seconds = 0.0 if self._since is None else now - self._since
        self.steps += 1
        self.seconds += seconds
        self.held_s += seconds * (self.waiting > 0)
        if self._since is not None:
            self._since = now
            self._enter("reply")  # so that the watchdog sees the lane move
            self._enter("forward")
        if self.on_step is not None and drawn:
            self.on_step(drawn, seconds)

    def counters(self) -> dict[str, Any]:
        """The counters of our own driver."""
        return {
            "steps": self.steps,
            "seconds": self.seconds,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "preempted_rows": self.preemptions,
            "held_s": self.held_s,
            "echoing_s": 0.0,
        }

    def engine(self) -> dict[str, Any]:
        """vLLM's own counters: present levels, and totals."""
        return {
            "running": self.running,
            "waiting": self.waiting,
            "preemptions": self.preemptions,
            "cache_usage": round(self.cache_usage, 4),
            "prefix_queries": self.prefix_queries,
            "prefix_hits": self.prefix_hits,
        }


USUAL = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",  # a model is a folder, or in the cache: nothing is looked for elsewhere
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # all cores compute
    "TORCHDYNAMO_DISABLE": "1",  # this process has threads, and lines that nobody may inherit
}


def prepare_environment() -> None:
    """What vLLM and huggingface_hub read when they are imported, unless the user says otherwise."""
    for name, value in USUAL.items():
        os.environ.setdefault(name, value)


TRIED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "seed": 1, "logprobs": 1, "prompt_logprobs": 0},
)
WAIT_S = 600.0  # for requests to the engine other than prompts


class VllmEngine:
    """AsyncLLM. `dead`: why it answers no more."""

    def __init__(self, llm: Any, counting: VllmCounters, positions: int) -> None:
        self._llm, self.counting, self._positions = llm, counting, positions
        self._dead: BackendDied | None = None

    @classmethod
    def open(cls, arguments: Mapping[str, Any], most: int, counting: VllmCounters) -> VllmEngine:
        """Start the engine, on the event loop that will use it. Blocks. `most`: its `max_model_len`, where the
        arguments do not say it and the model was made for as many.

        Raises `UsageError` for a model or arguments that vLLM does not take, `BackendDied`.
        """
        # Processes that vLLM spawns must not import the user's program: that costs seconds, and vLLM does not start in
        # a process that has imported Numba.
        sys.modules["__main__"] = types.ModuleType("__main__")
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.tokenizers import cached_tokenizer_from_config
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.metrics.loggers import StatLoggerBase

        class Logger(StatLoggerBase):  # type: ignore[misc]
            """AsyncLLM makes an instance for its one engine."""

            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **more: Any) -> None:
                counting.record(scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None:
                pass

        refuse_unknown(arguments, [field.name for field in dataclasses.fields(AsyncEngineArgs)])
        name, wanted = str(arguments["model"]), dict(arguments)
        try:
            model = AsyncEngineArgs(**wanted).create_model_config()
        except Exception as error:
            why = _reason(error)
            if name.endswith(".gguf"):
                why = (
                    "GGUF files are read by a plugin of vLLM's, if one is installed. Use the backend inprocess, or "
                    "name the Hugging Face folder."
                )
            raise UsageError(f"vLLM does not serve '{name}': {why}") from error
        refuse_without_tokenizer(name, Path(model.tokenizer))
        positions = int(model.max_model_len)
        wanted.setdefault("max_model_len", min(positions, most))
        try:
            config = AsyncEngineArgs(**wanted).create_engine_config()
            if arguments["runner"] == "generate" and not config.model_config.logits_processors:
                config.model_config.logits_processors = [processor_for(config.use_v2_model_runner)]
        except Exception as error:
            cure = "Give another --dtype." if "dtype" in str(error) else "Correct that option."
            raise UsageError(f"vLLM does not take these engine arguments: {_reason(error)} {cure}") from error
        try:
            cached_tokenizer_from_config(config.model_config)
        except Exception as error:
            raise UsageError(
                f"vLLM cannot open the tokenizer of '{name}': {_reason(error)} Copy its files to the model's."
            ) from error
        try:
            llm = AsyncLLM.from_vllm_config(config, stat_loggers=[Logger], disable_log_stats=True)
        except Exception as error:
            raise BackendDied(f"the vLLM engine did not start: {_line(error)}") from error
        return cls(llm, counting, positions)

    @property
    def weights(self) -> str:
        """The folder or file that the model was read from."""
        return str(self._llm.vllm_config.model_config.model)

    @property
    def model(self) -> VllmModel:
        """What prompts are checked against."""
        config = self._llm.vllm_config.model_config
        return VllmModel(str(config.hf_config.model_type), int(config.get_vocab_size()), self._positions)

    def language(self) -> Language:
        """By the tokenizer, the end tokens and the chat templates that vLLM has found. Raises `UsageError`."""
        from vllm.renderers.hf import resolve_chat_template

        config, tokenizer = self._llm.vllm_config.model_config, self._llm.get_tokenizer()
        told = {**config.hf_text_config.to_dict(), **config.try_get_generation_config()}
        written = {
            kind: resolve_chat_template(tokenizer, None, tools, model_config=config)
            for kind, tools in ((DEFAULT, None), (WITH_TOOLS, [{}]))
        }
        templates = {kind: template for kind, template in written.items() if template is not None}
        beginning = next(iter(token_ids_of(told.get("bos_token_id"))), None)
        return language_of(
            tokenizer, int(config.get_vocab_size()), token_ids_of(told.get("eos_token_id")), beginning, templates
        )

    @property
    def pooling(self) -> str | None:
        """How states become an embedding: mean, last or first; None: the engine draws answers."""
        config = self._llm.vllm_config.model_config
        if config.runner_type != "pooling":
            return None
        kind = str(config.pooler_config.seq_pooling_type or "").upper()
        return {"MEAN": "mean", "LAST": "last", "CLS": "first"}.get(kind, kind.lower())

    @property
    def rows(self) -> int:
        return int(self._llm.vllm_config.scheduler_config.max_num_seqs)

    @property
    def length(self) -> int:
        return int(self._llm.vllm_config.model_config.max_model_len)

    @property
    def facts(self) -> Mapping[str, Any]:
        config = self._llm.vllm_config
        return {
            "family": str(config.model_config.hf_config.model_type),
            "slots": self.rows,
            "context": self.length,
            "step_tokens": int(config.scheduler_config.max_num_batched_tokens),
            "computes_in": str(config.model_config.dtype).removeprefix("torch."),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "cache_tokens": int(config.cache_config.num_gpu_blocks or 0) * int(config.cache_config.block_size or 0),
            "model_runner": "v2" if config.use_v2_model_runner else "v1",
        }

    @property
    def dead(self) -> BackendDied | None:
        if self._dead is None and self._llm.errored:
            self._dead = BackendDied("the vLLM engine died. Start it again, unless it is already.")
        return self._dead

    async def generate(self, request: VllmRequest) -> AsyncIterator[Any]:
        """vLLM's outputs. Leaving early aborts the request.

        Raises `BadPrompt` for what vLLM refuses, `BackendDied` when the engine dies.
        """
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
        from vllm.v1.engine.exceptions import EngineDeadError

        if (dead := self.dead) is not None:
            raise dead
        try:
            grammar, adapter = request.grammar, request.adapter
            sampling = SamplingParams(
                **request.fields,
                output_kind=RequestOutputKind.DELTA if request.growing else RequestOutputKind.FINAL_ONLY,
                structured_outputs=None if grammar is None else StructuredOutputsParams(grammar=grammar),
            )
            prompt = {"type": "token", "prompt_token_ids": request.tokens}
            lora = None if adapter is None else _lora(adapter)
            asked = self._llm.generate(prompt, sampling, request.number, lora_request=lora)
            try:
                async for output in asked:
                    yield output
            finally:
                await asked.aclose()
        except EngineDeadError:
            raise self.dead or BackendDied("the vLLM engine died. Ask again.") from None
        except (ValueError, VLLMClientError) as error:
            raise BadPrompt(f"vLLM refuses this prompt: {_line(error)} Correct it.") from None

    async def embed(self, request: VllmRequest) -> Any:
        """Its pooled state, float32 [hidden], not scaled. Raises as `generate` does."""
        from vllm import PoolingParams
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        if (dead := self.dead) is not None:
            raise dead
        prompt = {"type": "token", "prompt_token_ids": request.tokens}
        lora = None if request.adapter is None else _lora(request.adapter)
        asked = self._llm.encode(prompt, PoolingParams(task="embed"), request.number, lora_request=lora)
        found: Any = None
        try:
            async for output in asked:
                if output.error is not None:
                    raise BadPrompt(f"vLLM refuses this prompt: {_line(output.error)} Correct it.")
                found = output.outputs.data
        except EngineDeadError:
            raise self.dead or BackendDied("the vLLM engine died. Ask again.") from None
        except (ValueError, VLLMClientError) as error:
            raise BadPrompt(f"vLLM refuses this prompt: {_line(error)} Correct it.") from None
        finally:
            await asked.aclose()
        return found.float().cpu().numpy()

    async def try_out(self) -> None:
        """Answer trial requests: what vLLM prepares at first use is ready before work comes."""
        if self.pooling is not None:
            await self.embed(VllmRequest("try-0", [0], {}))
            self.counting.forget()
            return
        for number, fields in enumerate(TRIED):
            request = VllmRequest(f"try-{number}", [0], {**fields, "max_tokens": 2, "detokenize": False})
            async for _ in self.generate(request):
                pass
        self.counting.forget()

    async def load(self, one: VllmAdapter) -> None:
        """Raises `UsageError` for an adapter that does not fit."""
        config = self._llm.vllm_config.lora_config
        if config is None:
            raise UsageError(
                "this vLLM engine was started without room for adapters. Start it with -B enable_lora=true."
            )
        try:
            added = await asyncio.wait_for(self._llm.add_lora(_lora(one)), WAIT_S)
        except Exception as error:
            raise self._failure(error, f"the adapter in '{one.folder}' cannot be used") from error
        if not added:
            raise UsageError(f"vLLM has not loaded the adapter in '{one.folder}'. See the engine's log.")

    async def unload(self, one: VllmAdapter) -> None:
        if self.dead is None:
            await asyncio.wait_for(self._llm.remove_lora(one.number), WAIT_S)

    async def reload(self, folder: str, *, version: str, drain: bool, changed: Callable[[], None]) -> None:
        """Load other weights of the same shape. With `drain` the answers under way are finished first; without, they go
        on, and their cached keys and values are computed anew. `changed` is called once the old weights are unused.
        """
        try:
            await self._llm.pause_generation(mode="wait" if drain else "keep", clear_cache=drain)
            try:
                await asyncio.wait_for(
                    self._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder}), WAIT_S
                )
                if not await self._llm.reset_prefix_cache(reset_running_requests=not drain):
                    raise RuntimeError("the prefix cache could not be emptied")
                await self._llm.engine_core.set_weight_version_async(version)
                changed()
            finally:
                await self._llm.resume_generation()
        except Exception as error:
            raise self._failure(error, f"the weights in '{folder}' cannot be used") from error

    def _failure(self, error: Exception, what: str) -> GpuinferError:
        return self.dead or UsageError(f"{what}: {_line(error)} Give one that was made for this model.")

    def close(self) -> None:
        """End its processes."""
        self._llm.shutdown(timeout=2.0)


def _lora(one: VllmAdapter) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(one.called, one.number, one.folder)


TOKENIZERS = ("tokenizer.*", "vocab*", "*.model", "*.tiktoken", "*.spm", "tekken.json", "tokenization_*.py")


def refuse_without_tokenizer(name: str, folder: Path) -> None:
    """Raises `UsageError` for a folder without one, for which transformers would make an empty one up."""
    if folder.is_dir() and not any(True for pattern in TOKENIZERS for _ in folder.glob(pattern)):
        raise UsageError(f"'{name}' has no tokenizer. Copy tokenizer.json, or what else it has, into its folder.")


def _reason(error: BaseException) -> str:
    """What vLLM says of arguments, without pydantic's frame and the rest of a long list."""
    text = str(error).partition("Value error, ")[2] or str(error)
    text = " ".join(text.partition(" [type=")[0].split())
    if "trust_remote_code" in text:
        return "it needs code that comes with the checkpoint. Where you trust that, give --trust-remote-code."
    if isinstance(error, FileNotFoundError):  # huggingface_hub's, of its cache
        return (
            "there is no such folder, and it is not in the cache of Hugging Face either. Download it first, or correct "
            "the name."
        )
    if "do not support `--runner generate`" in text:
        return "Embedding models do not support `--runner generate`. Serve its embeddings: -B runner=pooling."
    for more in (" Supported architectures:", " This could be because", " Use `--"):
        text = text.partition(more)[0]
    return _stopped(text[:400] or type(error).__name__)


def _line(error: BaseException) -> str:
    """The first line of what it says, with a stop at its end."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return _stopped(" ".join(lines[:3])[:400] or type(error).__name__)


def _stopped(text: str) -> str:
    return text if text.endswith(".") else f"{text}."
