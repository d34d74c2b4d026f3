"""From a run's setup to a model that answers blocks: built, tried out, and bound to its device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import nn

from gpuinfer.api import Limits, ModelSpec, Roofline, Setup
from gpuinfer.errors import UsageError
from gpuinfer.host.machine import cores
from gpuinfer.models.device import Gauge
from gpuinfer.models.forward import CpuForward
from gpuinfer.models.forward_cuda import DETERMINISTIC_CHUNK_ROWS, CudaForward
from gpuinfer.models.frozen import unpack
from gpuinfer.models.layouts import BITS, AnswerLayout, called, row_dtype
from gpuinfer.models.load import build, probe, resolve_device, resolve_dtype
from gpuinfer.models.memory import LARGEST, LARGEST_OF_ROWS, first_line, keep_freed_memory
from gpuinfer.models.pinned import Registration, register
from gpuinfer.models.processor import computed_in
from gpuinfer.models.staging import Block

CPU_MAX_ROWS = 4096
CPU_ENOUGH_ROWS = 512  # where the larger networks come within a few percent of their best on a core
CUDA_MAX_ROWS = 65_536  # for the whole device
CUDA_LEAST_ROWS = 8192  # for one of many processes


class ForwardTuning(Protocol):
    """How the user wants it run; None and False leave it to us."""

    @property
    def max_rows(self) -> int | None: ...
    @property
    def threads(self) -> int | None: ...
    @property
    def in_flight(self) -> int | None: ...
    @property
    def chunk_rows(self) -> int | None: ...
    @property
    def compute(self) -> str: ...
    @property
    def compile(self) -> bool: ...
    @property
    def graphs(self) -> bool: ...


Write = Callable[[Sequence[Block], Sequence[Sequence[Block]]], Sequence[bool]]
"""See `CudaForward.write`."""


@dataclass(frozen=True)
class Opened:
    """A model at work. As many threads as `limits.in_flight` may call `forward` at once."""

    spec: ModelSpec
    limits: Limits
    forward: Callable[[Sequence[Block]], list[Any]]
    answer: AnswerLayout  # what `forward` answers to each block
    device: Callable[[], Mapping[str, Any]]
    pin: Callable[[NDArray[Any]], Registration]  # memory of blocks and answers, so that the device itself uses it
    close: Callable[[], None] = lambda: None  # ends threads of its own, within seconds, and fails what they are at
    waits_for: Callable[[], str] = lambda: ""  # as `Backend.waits_for`
    write: Write | None = None  # as `forward`, where the device itself writes answers and finds faults in them


def open_model(spec: ModelSpec, setup: Setup, tuning: ForwardTuning, roofline: Roofline | None = None) -> Opened:
    """Build the model, try it out, and divide the device. Sets threads and the allocator for the whole process.

    Threads that call `forward` are to be started afterwards: torch tells each its number of threads as it first
    computes. Raises `UsageError` when the model cannot be had on this device.
    """
    row_dtype(spec)  # refuses one that is unknown before anything is built
    device, dtype = resolve_device(setup.device), resolve_dtype(setup.dtype)
    computed = computed_in(setup.dtype, tuning.compute, device.type == "cpu")
    compute = resolve_dtype(computed)
    limits = limits_for(device, setup, tuning, roofline)
    divide_cores(setup, tuning)
    keep_freed_memory(LARGEST_OF_ROWS if device.type == "cpu" else LARGEST)
    module = build(spec, device=device, dtype=dtype, seed=setup.seed, compute=compute)
    answer = probe(module, spec, device=device, dtype=compute)
    if tuning.compile:
        module = compiled(module, spec, device, compute)
    forward: CpuForward | CudaForward
    if device.type == "cuda":
        forward = cuda_forward(module, spec, device, compute, limits, setup, tuning)
    else:
        # A compiled module is compiled again for each new batch size: give it one.
        fixed_shape = setup.deterministic or tuning.compile
        bits = spec.inputs if spec.input_dtype == BITS else None
        forward = CpuForward(module, compute, tuning.chunk_rows, fixed_shape=fixed_shape, bits=bits, whose=called(spec))
    gauge, threads = Gauge(device), threads_for(setup, tuning)
    in_force = {"max_rows": limits.max_rows, "in_flight": limits.in_flight, "threads": threads}
    return Opened(
        spec,
        limits,
        forward,
        answer,
        lambda: {
            **gauge.read(),
            "computes_in": computed,
            "threads": computing_threads(device, threads),
            "in_force": in_force,
        },
        partial(register, device=device),
        write=forward.write if isinstance(forward, CudaForward) else None,
    )


def limits_for(device: torch.device, setup: Setup, tuning: ForwardTuning, roofline: Roofline | None = None) -> Limits:
    if device.type == "cuda":
        rows = max(CUDA_LEAST_ROWS, CUDA_MAX_ROWS // setup.processes)
        return Limits(tuning.max_rows or rows, tuning.in_flight or 2)  # one batch's copies behind the other's kernels
    in_flight = cores_of(setup) // threads_for(setup, tuning) if setup.deterministic else 1
    enough_rows = roofline.at_rows if roofline is not None else CPU_ENOUGH_ROWS
    max_rows = tuning.max_rows or CPU_MAX_ROWS
    return Limits(max_rows, tuning.in_flight or max(1, in_flight), enough_rows=min(enough_rows, max_rows))


def threads_for(setup: Setup, tuning: ForwardTuning) -> int:
    """For one forward. A row's answer must not depend on how many threads its matrix products are divided among."""
    return tuning.threads or (1 if setup.deterministic else cores_of(setup))


def computing_threads(device: torch.device, threads: int) -> int:
    """How many threads a forward keeps busy while it computes: on a CUDA device the one that launches it."""
    return threads if device.type == "cpu" else 1


def divide_cores(setup: Setup, tuning: ForwardTuning) -> None:
    torch.set_num_threads(threads_for(setup, tuning))
    with contextlib.suppress(RuntimeError):  # this one can be set only once in a process
        torch.set_num_interop_threads(1)


def compute_with(threads: int) -> None:
    """The calling thread computes with so many from now on."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def cuda_forward(
    module: nn.Module,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    limits: Limits,
    setup: Setup,
    tuning: ForwardTuning,
) -> CudaForward:
    chunk_rows = tuning.chunk_rows or (DETERMINISTIC_CHUNK_ROWS if setup.deterministic else limits.max_rows)
    return CudaForward(
        module,
        spec,
        device=device,
        dtype=dtype,
        chunk_rows=chunk_rows if setup.deterministic else min(chunk_rows, limits.max_rows),
        slots=limits.in_flight,
        graphs=tuning.graphs,
        fixed_shape=setup.deterministic,
    )


def cores_of(setup: Setup) -> int:
    """This process's share of the machine's cores."""
    return max(1, cores() // setup.processes)


def compiled(module: nn.Module, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Through torch.compile, and tried out. Raises `UsageError` when that does not work here."""
    unpack(module)
    fast: Any = torch.compile(module)
    try:
        with torch.inference_mode():
            fast(torch.ones(2, spec.inputs, device=device, dtype=dtype))
    except Exception as error:
        raise UsageError(
            f"torch.compile cannot compile model '{spec.name}' here: {type(error).__name__}: {first_line(error)}. "
            "Leave -B compile=true out, or install a C++ compiler."
        ) from error
    return fast  # type: ignore[no-any-return]
