"""From a run's setup to a generator: checkpoint, estimate, weights, language, decoder.

What does not fit in memory, or cannot be loaded, is refused before anything is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gpuinfer.api import BackendContext, Lane, ModelSpec, Setup
from gpuinfer.errors import UsageError
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.host.machine import cores
from gpuinfer.host.process_memory import return_free_memory
from gpuinfer.models.device import resolve_device, resolve_devices, resolve_dtype
from gpuinfer.models.model_options import compile_name, torch_compile_mode
from gpuinfer.models.out_of_memory import keep_freed_memory
from gpuinfer.text.checkpoint import open_checkpoint, read_adapter
from gpuinfer.text.checkpoint.memory_estimate import refuse_short
from gpuinfer.text.generator.adapter_versions import check_name
from gpuinfer.text.generator.draft_model import DraftModel, draft_memory, open_draft, refuse_other_vocabulary
from gpuinfer.text.generator.embedding_queue import pooling_of
from gpuinfer.text.generator.generator import Generator
from gpuinfer.text.generator.prompts import Prepared
from gpuinfer.text.generator.speculation import PromptLookup, Proposer
from gpuinfer.text.stages.open_staged_decoder import places_for
from gpuinfer.text.text_options import FIRST_VERSION, TorchModelOptions, WeightFormat, adapter_folders_given
from gpuinfer.text.transformer import PAGE, Decoder, Shape

if TYPE_CHECKING:
    from gpuinfer.text.checkpoint import Checkpoint, Estimate
    from gpuinfer.text.diffusion.diffusion_generator import DiffusionGenerator
    from gpuinfer.text.generator.slot_table import SlotTable
    from gpuinfer.text.language import Language

LONGEST = 4096  # positions of a row unless the user asks for more
SHORTEST = 256  # below it the user has to ask
SHARE = 0.9  # of what is free: the rest of the program grows too


def fit_to_memory(
    checkpoint: Checkpoint,
    slots: int | None,
    pages: int | None,
    context: int | None,
    dtype: torch.dtype,
    free_bytes: int,
    beside: int = 0,
    own: bool = False,
    quantised: WeightFormat | None = None,
) -> tuple[int, Estimate]:
    """Positions of a row, and what that takes with steps of `slots` rows (None: one, the least that makes sense),
    `pages` (None: those of one row) and `beside` bytes of adapters. `own`: our own kernels compute;
    `quantised`: what matrices are rounded to.

    A context that the user has not set is halved until one row fits. Raises `UsageError` with the numbers when none
    does, for pages that do not fit, and for fewer than one row takes.
    """
    from gpuinfer.text.checkpoint.memory_estimate import refuse_oversized, refuse_short, row_pages

    room, length = int(free_bytes * SHARE), checked_context(checkpoint.shape, context)
    refuse_short(pages, length)

    def estimated() -> Estimate:
        return checkpoint.estimate(slots or 1, pages or row_pages(length), length, dtype, beside, own, quantised)

    while context is None and pages is None and estimated().peak_bytes > room and length > SHORTEST:
        length = max(SHORTEST, length // 2)
    refuse_oversized(checkpoint.name, estimated(), room, pages=pages or row_pages(length), length=length, dtype=dtype)
    return length, estimated()


def checked_context(shape: Shape, context: int | None) -> int:
    """Positions of a row. Raises `UsageError` for more than the model supports."""
    if context is None:
        return min(shape.positions, LONGEST)
    if not 1 <= context <= shape.positions:
        raise UsageError(
            f"a context of {context} positions, and the model was made for {shape.positions}. "
            f"Use --context N with N from 1 to {shape.positions}."
        )
    return context


CPU_STEP_TOKENS, CUDA_STEP_TOKENS = 512, 2048
CPU_CANVAS_TOKENS, CUDA_CANVAS_TOKENS = 2048, 8192  # of diffusion models, whose rows bring all of their positions
CUDA_GATHER_STEPS = 8  # a step of many tokens of prompts is no captured graph, and takes as long as several that are
NULL_STEP_TOKENS = 1 << 16  # where nothing is computed a step never takes long


KERNELS, COMPILED_SAMPLING, SHARED_PREFIXES = PARTS = ("kernels", "sampling", "prefixes")
"""What `open_generator` can leave out: kernels of our own for the layers, those that draw tokens, and what prompts
share."""


def open_generator(
    spec: ModelSpec,
    setup: Setup,
    tuning: TorchModelOptions,
    lane: Callable[[str], Lane] | None = None,
    without: Collection[str] = (),
) -> Generator | DiffusionGenerator:
    """A generator for a model of kind "text", on `setup.device`, or in stages on all of `setup.devices`.
    `spec.arguments` may carry slots, pages, context and step_tokens: those of the tuning take precedence. Its `facts`
    are estimated and actual sizes. `lane` makes a lane of the ledger for each stage. `without`: those of `PARTS` that
    are left out, to measure what they bring; answers are the same but for rounding.

    Raises `UsageError` when the model cannot be opened on this device, or does not fit.
    """
    from gpuinfer.text.checkpoint import adapter_bytes
    from gpuinfer.text.checkpoint.loader import read_other_weights
    from gpuinfer.text.decoder import open_sized, own_kernels
    from gpuinfer.text.decoder.open_decoder import free_memory
    from gpuinfer.text.language import open_language
    from gpuinfer.text.stages.open_staged_decoder import open_in_stages
    from gpuinfer.text.stages.staged_decoder import StagedDecoder

    devices = [resolve_device(setup.device)] if tuning.parallel == "data" else resolve_devices(setup.devices)
    device, dtype = devices[0], resolve_dtype(setup.dtype)
    keep_freed_memory()
    checkpoint = open_checkpoint(spec, tuning.decoder)
    wanted = resolved_tuning(spec, tuning, setup, device, checkpoint.shape)
    threads, step_tokens = wanted.threads or 1, wanted.step_tokens or CPU_STEP_TOKENS
    adapters = {name: read_adapter(checkpoint, place) for name, place in (wanted.adapters or {}).items()}
    beside = sum(adapter_bytes(one) for one in adapters.values())
    draft: tuple[Decoder, Language] | None = None
    if wanted.draft is not None:
        draft = open_draft(
            wanted.draft, setup, wanted, device, dtype, checked_context(checkpoint.shape, wanted.context)
        )
        beside += draft[0].cache_bytes() if device.type == "cpu" else 0  # it is taken as it is written to
    torch_compile_mode(  # refused before any weight is read
        wanted.compile, device.type, graphs=wanted.graphs, deterministic=setup.deterministic
    )
    own = KERNELS not in without and own_kernels(checkpoint.shape, dtype, device, wanted.compile)
    free = sum(map(free_memory, dict.fromkeys(devices)))
    sized = (wanted.slots, wanted.pages, wanted.context, dtype, free, beside, own, wanted.weights)
    length, estimate = fit_to_memory(checkpoint, *sized)
    with ThreadPoolExecutor(2, "gpuinfer-opening") as others:  # while weights are read, which needs no Python
        language = others.submit(open_language, checkpoint.language, checkpoint.shape)
        if own:
            from gpuinfer.models.kernel_cache import load_compiler

            others.submit(load_compiler)
        sizes: dict[str, Any] = {
            "slots": wanted.slots,
            "pages": wanted.pages,
            "length": length,
            "sharing": setup.processes,
            "step_tokens": step_tokens,
        }
        if tuning.parallel == "data":
            how: dict[str, Any] = {"deterministic": setup.deterministic, "compile": wanted.compile}
            how |= {"graphs": wanted.graphs, "quantised": wanted.weights, "kernels": KERNELS not in without}
            decoder, sizing = open_sized(checkpoint, dtype, device, threads=threads, **how, **sizes)
        else:
            lane = lane or BackendContext().lane
            decoder, sizing = open_in_stages(checkpoint, dtype, setup, tuning, lane=lane, **sizes)
        spoken = language.result()
    if draft is not None and wanted.draft is not None:
        refuse_other_vocabulary(wanted.draft, draft[1], spoken, checkpoint.name)
    draft_bytes = 0
    if wanted.draft is not None:
        draft_bytes = sum(draft_memory(wanted.draft, wanted, device, dtype, length))
    measured = sizing.measured_bytes  # of cache and step at the peak, where it was tried
    common: dict[str, Any] = {
        "seed": setup.seed,
        "end_tokens": spoken.end_tokens,
        "step_tokens": step_tokens,
        "threads": threads,
        "read": partial(read_other_weights, checkpoint, dtype=dtype),
        "read_adapter": partial(read_adapter, checkpoint),
        "max_adapters": wanted.max_adapters,
        "facts": {
            "model": checkpoint.name,
            "family": checkpoint.shape.family,
            "diffusion": checkpoint.shape.masking is not None,
            "device": str(decoder.device),
            "dtype": setup.dtype,
            "computes_in": decoder.computes_in,
            "weights": wanted.weights or setup.dtype,
            "slots": decoder.slots,
            "pages": decoder.pages,
            "page_positions": PAGE,
            "context": decoder.length,
            "step_tokens": step_tokens,
            "threads": threads,
            "compile": compile_name(wanted.compile),
            "speculate": wanted.speculation,
            "draft": wanted.draft,
            "draft_bytes": draft_bytes,
            "estimated_weights_bytes": estimate.weights_bytes,
            "estimated_cache_bytes": sizing.cache_bytes,
            "estimated_bytes": estimate.weights_bytes + draft_bytes + sizing.estimated_bytes,
            "cache_bytes": decoder.cache_bytes(),
            "measured_bytes": None if measured is None else estimate.weights_bytes + draft_bytes + measured,
            **(decoder.in_force if isinstance(decoder, StagedDecoder) else {}),
        },
    }
    generator: Generator | DiffusionGenerator
    if decoder.shape.masking is not None:
        from gpuinfer.text.diffusion.diffusion_generator import DiffusionGenerator
        from gpuinfer.text.diffusion.unmasking_plan import usual_unmasking

        common["facts"].update(usual_unmasking(checkpoint.shape))
        generator = DiffusionGenerator(decoder, spoken, **common)
    else:
        graphs = decoder.device.type == "cuda" and wanted.graphs and wanted.parallel == "data"
        gather_steps = CUDA_GATHER_STEPS if graphs else 0
        common |= {"deterministic": setup.deterministic, "gather_steps": gather_steps}
        common["pooling"] = common["facts"]["pooling"] = pooling_of(checkpoint.language.folder)
        generator = Generator(decoder, spoken, **common, compiled_sampling=COMPILED_SAMPLING not in without)
        if SHARED_PREFIXES in without:
            generator.keep_apart()
    for name, adapter in adapters.items():
        check_name(name)
        generator.load_adapter(name, FIRST_VERSION, generator.decoder.pack_adapter(adapter))
    return_free_memory()  # what weights were read into, before they were packed
    _warm_up(generator)
    if isinstance(generator, Generator) and wanted.speculation != "off":
        proposer: Callable[[SlotTable], Proposer] = PromptLookup
        if draft is not None:
            of_both = partial(DraftModel, decoder=draft[0], target=generator.decoder)
            proposer = partial(of_both, seed=setup.seed, threads=threads)
        generator.speculate(proposer, wanted.speculate_tokens)
    return generator


def _warm_up(generator: Generator | DiffusionGenerator) -> None:
    """Answer two prompts of one token, one by the likeliest tokens and one by drawn ones with their log-probabilities,
    at once where there are slots for both. So kernels are compiled and pages are resident before the first request.
    Kernels for lists of texts are left out: no step waits for them.
    """
    most = min(2, generator.decoder.length - 1)
    for temperature, logprobs in ((0.0, None), (1.0, 1)):
        sampling = Sampling(max_tokens=most, temperature=temperature, logprobs=logprobs)
        (prepared,) = generator.prepare([Prompt(tokens=(0,), sampling=sampling)])
        if not isinstance(prepared, Prepared):
            return
        while not generator.free_slots:
            generator.step()
        generator.add(f"warm-up at {temperature}", prepared)
    while generator.busy:
        generator.step()


def resolved_tuning(
    spec: ModelSpec, tuning: TorchModelOptions, setup: Setup, device: torch.device, shape: Shape
) -> TorchModelOptions:
    """The user's tuning, with what follows from the machine and the model.

    Raises `UsageError` for numbers below 1, and for more threads than there are cores.
    """
    given: dict[str, Any] = {}
    for name in ("slots", "pages", "context", "step_tokens"):
        own = getattr(tuning, name)
        value = given[name] = spec.arguments.get(name) if own is None else own
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UsageError(f"{name} is {value!r}. Use a whole number from 1.")
    cpu_tokens, cuda_tokens = CPU_STEP_TOKENS, CUDA_STEP_TOKENS
    if shape.masking is not None:
        cpu_tokens, cuda_tokens = CPU_CANVAS_TOKENS, CUDA_CANVAS_TOKENS
    elif not shape.layers:
        cpu_tokens = cuda_tokens = NULL_STEP_TOKENS
    given["step_tokens"] = given["step_tokens"] or (cuda_tokens if device.type == "cuda" else cpu_tokens)
    given["threads"] = threads = tuning.threads or max(1, cores() // setup.processes)
    if threads > cores():
        raise UsageError(
            f"{threads} threads, and this process may use {cores()} cores: more would only wait for one another. "
            f"Use -B threads=N with N from 1 to {cores()}, or leave it out."
        )
    if tuning.speculation != "off" and (why := speculation_refusal(shape, tuning)):
        raise UsageError(f"-B speculate={tuning.speculation}: {why}")
    if tuning.weights is not None and tuning.parallel != "data":
        raise UsageError(
            f"-B weights={tuning.weights} is for a model that one device holds, and parallel={tuning.parallel} cuts "
            "it. Leave one of them out."
        )
    given["adapters"] = adapter_folders_given(tuning.adapters, spec.arguments)
    return tuning.model_copy(update=given)


def speculation_refusal(shape: Shape, tuning: TorchModelOptions) -> str:
    """Why tokens cannot be proposed for this model, with the cure; "" where they can."""
    if shape.masking is not None:
        return "a diffusion model fills several masks in at once by itself. Leave it out."
    if tuning.parallel != "data":
        return f"a model in stages (-B parallel={tuning.parallel}) proposes nothing. Leave one of them out."
    return ""


def refuse_unloadable(spec: ModelSpec, setup: Setup, options: TorchModelOptions) -> None:
    """Raises `UsageError` for a model that is not there, a context that is longer than its own, pages for less than one
    row of it, more threads than cores, stages that its layers do not allow, and adapters that are not for it. Of the
    model's own files only headers are read.
    """
    checkpoint, devices = open_checkpoint(spec, options.decoder), resolve_devices(setup.devices)
    wanted = resolved_tuning(spec, options, setup, devices[0], checkpoint.shape)
    refuse_short(wanted.pages, checked_context(checkpoint.shape, wanted.context))
    if options.parallel != "data":
        places_for(checkpoint, setup, options)
    if wanted.draft is not None:
        open_checkpoint(ModelSpec(name=wanted.draft, kind="text"))
    for folder in (wanted.adapters or {}).values():
        read_adapter(checkpoint, folder)
