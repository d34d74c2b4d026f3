"""From a run's setup to a model that answers blocks: built, tried, and bound to its device, or one copy on each of
several devices.

One queue lies before this, and no batch is divided: a device gets the next batch when one of its lanes is free. A
device that fails is given up; its batch, and later ones of its lanes, go to the other devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import nn

from gpuinfer.api import Limits, ModelSpec, Roofline, Setup, lane_device, retire_lane
from gpuinfer.errors import BackendDied, DeviceLost, UsageError
from gpuinfer.host.machine import cores
from gpuinfer.models import forward_cpu
from gpuinfer.models.copy_overlap import CopyOverlap
from gpuinfer.models.device import Gauge, device_labels, merged_readings, resolve_devices, setups_of
from gpuinfer.models.forward_cpu import CpuForward
from gpuinfer.models.forward_cuda import DETERMINISTIC_CHUNK_ROWS, CudaForward
from gpuinfer.models.forward_leaves import LeavesForward
from gpuinfer.models.forward_leaves_cuda import CudaLeavesForward
from gpuinfer.models.load import build, probe, resolve_device, resolve_dtype
from gpuinfer.models.model_options import CompileMode, compile_name, torch_compile_mode
from gpuinfer.models.networks import unpack
from gpuinfer.models.out_of_memory import (
    LARGEST,
    LARGEST_OF_ROWS,
    first_line,
    is_lost,
    is_the_rows_fault,
    keep_freed_memory,
)
from gpuinfer.models.pinned_memory import Registration, register
from gpuinfer.models.processor import computed_in
from gpuinfer.models.row_blocks import Block
from gpuinfer.models.row_format import BITS, AnswerLayout, network_title, row_dtype
from gpuinfer.stats import DeviceCount

CPU_MAX_ROWS = 4096
OMP_PAUSE_SOFT = 1  # of <omp.h>
CPU_ENOUGH_ROWS = 512  # where the larger networks come within a few percent of their best on a core
CUDA_MAX_ROWS = 65_536  # for the whole device
CUDA_LEAST_ROWS = 8192  # for one of many processes
BATCH_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}  # of rows of any shape: a batch of images has fewer rows
LEAST_ROWS = 64  # however large they are
FIXED_CHUNK_ROWS = {"cpu": forward_cpu.DETERMINISTIC_CHUNK_ROWS, "cuda": DETERMINISTIC_CHUNK_ROWS}


class ForwardTuning(Protocol):
    """The user's options for forwards; None and False: the default."""

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
    def compile(self) -> CompileMode: ...
    @property
    def graphs(self) -> bool: ...


Write = Callable[[Sequence[Block], Sequence[Sequence[Block]]], Sequence[bool]]
"""See `CudaForward.write`."""


@dataclass(frozen=True)
class Opened:
    """A model at work. As many threads as `limits.in_flight` may call `forward` at once."""

    spec: ModelSpec
    limits: Limits
    forward: Callable[[Sequence[Any]], list[Any]]  # blocks, or what `spec.layout` describes
    answer: AnswerLayout  # what `forward` answers to each block
    device: Callable[[], Mapping[str, Any]]
    pin: Callable[[NDArray[Any]], Registration]  # memory of blocks and answers, so that the device itself uses it
    close: Callable[[], None] = lambda: None  # ends threads of its own, within seconds, and fails what they are at
    waits_for: Callable[[], str] = lambda: ""  # as `Backend.waits_for`
    seconds_of: Callable[[int], float] | None = None
    """What a batch of so many rows takes, tried here: on a CPU, of a model that does nothing but compute."""
    write: Write | None = None  # as `forward`, where the device itself writes answers and finds faults in them


def open_model(spec: ModelSpec, setup: Setup, tuning: ForwardTuning, roofline: Roofline | None = None) -> Opened:
    """Build the model, try it, and divide the device. Sets threads and the allocator for the whole process.

    Start threads that call `forward` afterwards: torch gives each its number of threads when it first computes. Raises
    `UsageError` when the model cannot run on this device.
    """
    row_dtype(spec)  # refuses one that is unknown before anything is built
    device, dtype = resolve_device(setup.device), resolve_dtype(setup.dtype)
    if getattr(spec.source, "takes_arrays", False):
        device = torch.device("cpu")  # where a function of arrays computes
    computed = computed_in(setup.dtype, tuning.compute, device.type == "cpu")
    compute = resolve_dtype(computed)
    compile_mode = torch_compile_mode(
        tuning.compile, device.type, graphs=tuning.graphs, deterministic=setup.deterministic
    )
    limits = limits_for(device, setup, tuning, roofline)
    divide_cores(setup, tuning)
    keep_freed_memory(LARGEST_OF_ROWS if device.type == "cpu" else LARGEST)
    module = build(spec, device=device, dtype=dtype, seed=setup.seed, compute=compute)
    gauge, threads = Gauge(device), threads_for(setup, tuning)
    in_force: dict[str, Any] = {"max_rows": limits.max_rows, "in_flight": limits.in_flight, "threads": threads}
    in_force |= {"compile": compile_name(tuning.compile)} if compile_mode else {}
    reading = {"computes_in": computed, "threads": computing_threads(device, threads), "in_force": in_force}

    copies = CopyOverlap(limits.in_flight) if device.type == "cuda" else None

    def read_device() -> Mapping[str, Any]:
        return {**gauge.read(), **reading, **({} if copies is None else copies.read())}

    if spec.layout is not None:
        leaves, found = open_leaves(module, spec, setup, tuning, limits, device, compute, compile_mode, copies)
        quick = device.type == "cpu" and not tuning.compile and waits_for_nothing(module)
        pin, seconds_of = partial(register, device=device), leaves.seconds_of if quick else None
        return Opened(spec, limits, leaves, found, read_device, pin, seconds_of=seconds_of)
    answer = probe(module, spec, device=device, dtype=compute)
    if compile_mode is not None:
        module = torch_compiled(module, spec, device, compute, compile_mode, tuning.compile)
    forward: CpuForward | CudaForward
    if device.type == "cuda":
        chunk_rows = tuning.chunk_rows or (DETERMINISTIC_CHUNK_ROWS if setup.deterministic else limits.max_rows)
        forward = CudaForward(
            module,
            spec,
            device=device,
            dtype=compute,
            chunk_rows=chunk_rows if setup.deterministic else min(chunk_rows, limits.max_rows),
            slots=limits.in_flight,
            graphs=tuning.graphs,
            fixed_shape=setup.deterministic,
            copies=copies,
        )
    else:
        # A compiled module is compiled again for each new batch size: give it one.
        fixed_shape = setup.deterministic or compile_mode is not None
        bits = spec.inputs if spec.input_dtype == BITS else None
        forward = CpuForward(
            module, compute, tuning.chunk_rows, fixed_shape=fixed_shape, bits=bits, whose=network_title(spec)
        )
    return Opened(
        spec,
        limits,
        forward,
        answer,
        read_device,
        partial(register, device=device),
        write=forward.write if isinstance(forward, CudaForward) else None,
    )


def waits_for_nothing(module: nn.Module) -> bool:
    """Whether it is made of torch's own modules alone, without hooks: what others do in their forward is not known."""
    return all(
        type(one).__module__.startswith("torch.nn.modules.") and not (one._forward_hooks or one._forward_pre_hooks)
        for one in module.modules()
    )


def open_leaves(
    module: nn.Module,
    spec: ModelSpec,
    setup: Setup,
    tuning: ForwardTuning,
    limits: Limits,
    device: torch.device,
    dtype: torch.dtype,
    compile_mode: str | None = None,
    copies: CopyOverlap | None = None,
) -> tuple[LeavesForward, AnswerLayout]:
    """The forward of rows of any shape, tried. `compile_mode`: of `torch_compile_mode`.

    Raises `UsageError` when the model does not take such rows."""
    chunk_rows = tuning.chunk_rows or (FIXED_CHUNK_ROWS[device.type] if setup.deterministic else limits.max_rows)
    options: dict[str, Any] = {
        "chunk_rows": min(chunk_rows, limits.max_rows),
        "check": spec.layout.check,
        "whose": f"model '{spec.name}'",
        "fixed_shape": setup.deterministic,
    }

    def opened(module: nn.Module) -> LeavesForward:
        if device.type == "cuda":
            lanes = limits.in_flight
            return CudaLeavesForward(module, spec.layout, device, dtype, lanes=lanes, copies=copies, **options)
        return LeavesForward(module, spec.layout, device, dtype, **options)

    leaves = opened(module)
    found = leaves.answer_layout()
    if compile_mode is not None:
        leaves = opened(torch.compile(module, mode=compile_mode))  # type: ignore[arg-type]
        with refusing_to_compile(spec, tuning.compile):
            leaves.answer_layout()
    return leaves, found


def limits_for(device: torch.device, setup: Setup, tuning: ForwardTuning, roofline: Roofline | None = None) -> Limits:
    layout = None if setup.model is None else setup.model.layout
    most = math.inf if layout is None else max(LEAST_ROWS, BATCH_BYTES[device.type] // max(1, layout.row_bytes))
    if device.type == "cuda":
        rows = min(most, max(CUDA_LEAST_ROWS, CUDA_MAX_ROWS // setup.processes))
        lanes = tuning.in_flight or 2  # one batch's copies behind the other's kernels
        return Limits(tuning.max_rows or int(rows), lanes)
    in_flight = cores_of(setup) // threads_for(setup, tuning) if setup.deterministic else 1
    enough_rows = roofline.at_rows if roofline is not None else CPU_ENOUGH_ROWS
    max_rows = tuning.max_rows or int(min(most, CPU_MAX_ROWS))
    return Limits(max_rows, tuning.in_flight or max(1, in_flight), enough_rows=min(enough_rows, max_rows))


def threads_for(setup: Setup, tuning: ForwardTuning) -> int:
    """Threads of one forward. With `deterministic` one, since a row's answer must not depend on how many threads divide
    a matrix product.
    """
    return tuning.threads or (1 if setup.deterministic else cores_of(setup))


def computing_threads(device: torch.device, threads: int) -> int:
    """How many threads a forward keeps busy; on a CUDA device one, which launches."""
    return threads if device.type == "cpu" else 1


def divide_cores(setup: Setup, tuning: ForwardTuning) -> None:
    torch.set_num_threads(threads_for(setup, tuning))
    with contextlib.suppress(RuntimeError):  # this one can be set only once in a process
        torch.set_num_interop_threads(1)


def compute_with(threads: int) -> None:
    """Set the number of threads that the calling thread computes with."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def on_one_core() -> Iterator[None]:
    """The calling thread computes with one thread inside."""
    threads = torch.get_num_threads()
    compute_with(1)
    try:
        yield
    finally:
        compute_with(threads)


def end_thread_pool() -> None:
    """End the OpenMP threads that the calling thread has computed with; its next operation on a CPU starts others.

    Each thread that computes keeps such a pool. While all pools together have more threads than there are cores, GNU's
    OpenMP puts them to sleep after each operation, and has to wake them for the next: a forward of a millisecond takes
    twice as long then. Does nothing where torch comes with another OpenMP.
    """
    for library in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(str(library)).omp_pause_resource_all(OMP_PAUSE_SOFT)


def cores_of(setup: Setup) -> int:
    """This process's share of the machine's cores."""
    return max(1, cores() // setup.processes)


@contextlib.contextmanager
def refusing_to_compile(spec: ModelSpec, wanted: CompileMode) -> Iterator[None]:
    """Around the first call of a compiled module."""
    try:
        yield
    except Exception as error:
        raised = error.__cause__ if isinstance(error, UsageError) and error.__cause__ is not None else error
        raise UsageError(
            f"torch.compile cannot compile model '{spec.name}' here: {type(raised).__name__}: {first_line(raised)}. "
            f"Leave -B compile={compile_name(wanted)} out, or install a C++ compiler."
        ) from error


def torch_compiled(
    module: nn.Module, spec: ModelSpec, device: torch.device, dtype: torch.dtype, mode: str, wanted: CompileMode
) -> nn.Module:
    """The module through torch.compile, tried. Raises `UsageError` when that does not work here."""
    unpack(module)
    fast: Any = torch.compile(module, mode=mode)
    with refusing_to_compile(spec, wanted), torch.inference_mode():
        fast(torch.ones(2, spec.inputs, device=device, dtype=dtype))
    return fast  # type: ignore[no-any-return]


logger = logging.getLogger("gpuinfer")


def open_on_devices(spec: ModelSpec, setup: Setup, tuning: ForwardTuning, roofline: Roofline | None = None) -> Opened:
    """`open_model` on each of `setup.devices`; with several, the answers come from whichever device a lane is of.

    `tuning.in_flight` and `threads` are of one device. Raises `UsageError` as `open_model` and `resolve_devices` do.
    """
    devices = resolve_devices(setup.devices)
    opened = [open_model(spec, of_one, tuning, roofline) for of_one in setups_of(setup, devices)]
    if len(opened) == 1:
        return opened[0]
    copies = [ModelCopy(*one) for one in zip(device_labels(devices), devices, opened, strict=True)]
    several = DataParallel(copies)
    limits = [one.limits for one in opened]
    most = max(one.in_flight for one in limits)
    lanes = [
        copy.label for turn in range(most) for copy, one in zip(copies, limits, strict=True) if turn < one.in_flight
    ]
    enough = [one.enough_rows for one in limits if one.enough_rows is not None]
    return replace(
        opened[0],
        # a batch must fit each device; the lanes are those of all, the first of each device at the front
        limits=Limits(
            min(one.max_rows for one in limits),
            len(lanes),
            enough_rows=max(enough) if enough else None,
            devices=tuple(lanes),
        ),
        forward=several,
        device=several.device,
        write=several.write if all(copy.opened.write is not None for copy in copies) else None,
    )


def open_with_weights(
    before: Opened, weights: str, setup: Setup, tuning: Any, roofline: Roofline | None = None
) -> Opened:
    """The same model with the weights of a file, to take the place of `before`: of as many lanes, for batches as large.
    Takes as much memory again until `before` is gone. `tuning`: the options of its backend, `TorchModelOptions`.

    Raises `UsageError` for weights that do not fit.
    """
    if tuning.parallel != "data":
        raise UsageError(
            f"-B parallel={tuning.parallel}: a model in stages keeps its weights while it runs. Leave it out, or end "
            "the run and start another with the new ones."
        )
    in_force = before.device()["in_force"]
    fixed = {name: in_force[name] for name in ("max_rows", "in_flight", "threads")}
    opened = open_on_devices(replace(before.spec, weights=weights), setup, tuning.model_copy(update=fixed), roofline)
    if isinstance(opened.forward, DataParallel) and isinstance(before.forward, DataParallel):
        opened.forward.go_on_counting(before.forward)
    return opened


class ModelCopy:
    """The model on one of the devices."""

    def __init__(self, label: str, device: torch.device, opened: Opened) -> None:
        self.label, self.device, self.opened = label, device, opened
        self.count = DeviceCount()

    def run(self, blocks: Sequence[Block], compute: Callable[[Opened], Sequence[Any]]) -> Sequence[Any]:
        rows = 0
        self.count.begin()
        try:
            answers = compute(self.opened)
            rows = sum(map(len, blocks))
            return answers
        finally:
            self.count.end(rows)


class DataParallel:
    """Answers blocks as `Opened.forward` does, on the device of the calling lane; outside of lanes on the least busy
    device. As many threads as there are lanes may call it.
    """

    def __init__(self, copies: Sequence[ModelCopy]) -> None:
        self._copies = copies
        self._lock = threading.Lock()

    def go_on_counting(self, before: DataParallel) -> None:
        """What `before` has counted of the same devices is counted here from now on."""
        for copy, other in zip(self._copies, before._copies, strict=True):
            copy.count = other.count

    def __call__(self, blocks: Sequence[Block]) -> list[Any]:
        """Raises what the model raises; `DeviceLost` for a batch that two devices failed with, or whose rows are at
        fault; `BackendDied` when all devices have failed.
        """
        return list(self._run(blocks, lambda opened: opened.forward(blocks)))

    def write(self, blocks: Sequence[Block], targets: Sequence[Sequence[Block]]) -> Sequence[bool]:
        """As `Opened.write`, if all devices have it. Raises as `__call__` does."""

        def compute(opened: Opened) -> Sequence[bool]:
            assert opened.write is not None
            return opened.write(blocks, targets)

        return self._run(blocks, compute)

    def _run(self, blocks: Sequence[Block], compute: Callable[[Opened], Sequence[Any]]) -> Sequence[Any]:
        label = lane_device()
        own = next((copy for copy in self._copies if copy.label == label), None)
        if own is not None and own.count.failed:
            self._retire()
            own = None
        copy = own or self._other()
        for last in (False, True):
            try:
                return copy.run(blocks, compute)
            except Exception as error:
                if not is_lost(error, copy.device):
                    raise
                self._lose(copy, error)
                other = self._other()
                if last or is_the_rows_fault(error):
                    raise DeviceLost(
                        f"this batch took device {copy.label} along ({first_line(error)}), and is not tried on a "
                        "further one. Look at its rows, and at the model."
                    ) from error
                copy = other
        raise AssertionError("the second try has returned or raised")

    def _other(self) -> ModelCopy:
        """The least busy device of those that work. Raises `BackendDied`."""
        alive = [copy for copy in self._copies if not copy.count.failed]
        if not alive:
            told = "; ".join(f"{copy.label}: {copy.count.failed}" for copy in self._copies)
            raise BackendDied(f"all devices have failed ({told}). Start again; `gpuinfer doctor` tells what is there.")
        return min(alive, key=lambda copy: copy.count.running / copy.opened.limits.in_flight)

    def _lose(self, copy: ModelCopy, error: Exception) -> None:
        """Log the failure once, and retire the lane, unless the device is the last: its lane reports the failure to
        callers.
        """
        with self._lock:
            first, copy.count.failed = not copy.count.failed, copy.count.failed or first_line(error)
        if first:
            logger.error(
                "device %s failed (%s): its batches go to the others. Start again to have it back.",
                copy.label,
                first_line(error),
            )
        self._retire()

    def _retire(self) -> None:
        with self._lock:
            if any(not copy.count.failed for copy in self._copies):
                retire_lane()

    def device(self) -> Mapping[str, Any]:
        """What `Backend.device` returns: all devices together, and under `devices` each by itself."""
        told = [copy.opened.device() for copy in self._copies]
        shared = {key: told[0][key] for key in ("computes_in", "threads", "in_force") if key in told[0]}
        own = [
            {key: value for key, value in one.items() if key not in shared} | copy.count.told()
            for copy, one in zip(self._copies, told, strict=True)
        ]
        labels = [copy.label for copy in self._copies]
        return {**merged_readings(told), **shared, "devices": dict(zip(labels, own, strict=True))}
