"""A backend's options as vLLM's engine arguments: those that are typed here, and the rest by vLLM's own names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import Field

from gpuinfer import api
from gpuinfer.api import Setup
from gpuinfer.errors import UnknownName, UsageError

LogprobsMode = Literal["processed_logprobs", "raw_logprobs"]

PASSED_ON = (
    "max_num_seqs",
    "max_model_len",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "kv_cache_dtype",
    "block_size",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "enforce_eager",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "quantization",
    "load_format",
    "enable_lora",
    "max_loras",
    "max_cpu_loras",
    "max_lora_rank",
    "attention_backend",
    "speculative_config",
    "logprobs_mode",
    "runner",
)
CONTEXT = 4096  # tokens of prompt and answer, where nobody says otherwise and the model has as many
LORAS = 4
OURS = {
    "model": "name it with --model",
    "tokenizer": "it lies with the model",
    "served_model_name": "clients know the model by the run's name for it",
    "seed": "give --seed",
    "dtype": "give --dtype",
    "trust_remote_code": "give --trust-remote-code",
    "skip_tokenizer_init": "prompts and answers need the tokenizer",
    "generation_config": "what a request does not say is gpuinfer's default, the same for all backends",
    "logits_processors": "gpuinfer puts its own there",
    "worker_extension_cls": "gpuinfer puts its own there",
    "disable_log_stats": "the report is made of them",
    "structured_outputs_config": "constraints mean what they mean with the other backends",
    "convert": "-B runner=pooling makes embeddings of a model that generates",
}


class EngineOptions(api.Options):
    """Those of `AsyncEngineArgs` that are asked for most, by its own names, and a way to give the others."""

    max_num_seqs: int | None = Field(None, ge=1, le=65_536, description="rows generated at once; default 64 on a CPU")
    max_model_len: int | None = Field(None, ge=1, description="most tokens of prompt and answer; default 4096")
    max_num_batched_tokens: int | None = Field(None, ge=1, description="most tokens of one forward step")
    gpu_memory_utilization: float | None = Field(
        None, gt=0, le=1, description="share of the GPU's memory that it takes"
    )
    kv_cache_memory_bytes: int | None = Field(None, ge=1, description="for keys and values; default 1 GiB on a CPU")
    kv_cache_dtype: str | None = Field(None, description="number format of keys and values: auto, fp8, …")
    block_size: int | None = Field(None, ge=1, description="tokens in one block of keys and values")
    enable_prefix_caching: bool | None = Field(None, description="take over what an earlier prompt began with alike")
    enable_chunked_prefill: bool | None = Field(
        None, description="let prompts go through in pieces; never on a CPU, where seeded draws kill vLLM then"
    )
    enforce_eager: bool | None = Field(None, description="compile nothing, capture no graphs; default true on a CPU")
    tensor_parallel_size: int | None = Field(None, ge=1, description="GPUs that share each layer")
    pipeline_parallel_size: int | None = Field(None, ge=1, description="groups of GPUs that share the layers")
    quantization: str | None = Field(None, description="how the weights are packed, where the model does not say")
    load_format: str | None = Field(None, description="how weights are read; default safetensors as they are")
    enable_lora: bool | None = Field(None, description="make room for adapters; default when some are named")
    max_loras: int | None = Field(None, ge=1, description="adapters in one forward step; default 4")
    max_cpu_loras: int | None = Field(None, ge=1, description="adapters kept in memory")
    max_lora_rank: int | None = Field(None, ge=1, description="largest rank of an adapter")
    attention_backend: str | None = Field(None, description="which attention kernels")
    speculative_config: dict[str, Any] | None = Field(None, description="vLLM's own, as JSON")
    logprobs_mode: LogprobsMode = Field(
        "processed_logprobs", description="which log-probabilities a step gives: after temperature and filters, or raw"
    )
    runner: Literal["generate", "pooling"] = Field(
        "generate", description="what the engine computes, answers or embeddings; it cannot do both"
    )
    engine_args: dict[str, Any] = Field({}, description='any other of vLLM\'s, as JSON: {"optimization_level": 0}')


def most_positions(setup: Setup) -> int:
    """The `max_model_len` of an engine whose options do not say it, for a model that was made for as many: one more
    than the context, as vLLM keeps one for a token even where none is to be drawn.
    """
    given: Mapping[str, Any] = {} if setup.model is None else setup.model.arguments
    return int(given.get("context") or CONTEXT) + 1


def engine_arguments(own: EngineOptions, setup: Setup, model: str, *, on_cpu: bool, adapters: int) -> dict[str, Any]:
    """What `AsyncEngineArgs` is made of, as far as anything but its own defaults is wanted.

    `model`: as vLLM knows it. `adapters`: versions of LoRA adapters that are to be loaded at once.
    """
    given: Mapping[str, Any] = {} if setup.model is None else setup.model.arguments
    for name in own.engine_args:
        if name in PASSED_ON:
            raise UsageError(f"-B engine_args has '{name}', which is an option of its own. Give -B {name}=VALUE.")
        if name in OURS:
            raise UsageError(f"-B engine_args has '{name}', which gpuinfer sets itself: {OURS[name]}. Leave it out.")
    if on_cpu and own.enable_chunked_prefill:
        raise UsageError(
            "vLLM on a CPU ends when a prompt goes through in pieces and its answer is drawn with a seed, as all "
            "answers here are. Leave -B enable_chunked_prefill out."
        )
    draws = own.runner == "generate"
    arguments: dict[str, Any] = {
        "model": model,
        "seed": setup.seed,
        "dtype": setup.dtype,
        "trust_remote_code": bool(given.get("trust_remote_code")),
        "generation_config": "vllm",
        "structured_outputs_config": {"backend": "guidance"} if draws else None,
        "worker_extension_cls": "gpuinfer.backends.vllm_engine.worker_extension.WorkerExtension",
        "max_num_seqs": given.get("slots") or (64 if on_cpu else None),
        "max_num_batched_tokens": None if on_cpu else given.get("step_tokens"),  # there whole prompts must fit
        "enable_chunked_prefill": False if on_cpu else None,
        "enforce_eager": True if on_cpu else None,
        "enable_prefix_caching": True if draws else None,  # not every way of pooling can
        "enable_lora": True if adapters else None,
        "max_loras": min(adapters, LORAS) or None,
        "max_cpu_loras": max(adapters, own.max_loras or 0) or None,
        "tensor_parallel_size": len(setup.devices) if len(setup.devices) > 1 else None,
        "kv_cache_memory_bytes": 1 << 30 if on_cpu else None,
    }
    for name in PASSED_ON:
        if (value := getattr(own, name)) is not None:
            arguments[name] = value
    arguments.update(own.engine_args)
    return {name: value for name, value in arguments.items() if value is not None}


def refuse_unknown(arguments: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises `UnknownName` for one that this vLLM does not have, with the nearest that it has."""
    fields = sorted(known)
    for name in arguments:
        if name not in fields:
            raise _Unknown(name, fields)


class _Unknown(UnknownName):
    def __init__(self, name: str, known: list[str]) -> None:
        super().__init__("engine argument of vLLM", name, known, "There are")
        text = str(self)
        self.args = (text if len(text) < 600 else f"{text.partition(' There are:')[0]} See vLLM's EngineArgs.",)
