"""Forward and backward of a batch: the gradients of a loss by a model's parameters, whatever weights it is given, and
the memory that the pass holds for its way back.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from gpuinfer.api import Limits, ModelSpec, Setup, enter_station
from gpuinfer.errors import BackendError, UsageError
from gpuinfer.gradients import Gradients, TrainingBatch
from gpuinfer.models import losses, model_layers
from gpuinfer.models.device import Gauge, resolve_device, resolve_devices, setups_of
from gpuinfer.models.load import probe, with_weights
from gpuinfer.models.model_layers import check_same
from gpuinfer.models.networks import mismatch
from gpuinfer.models.open_model import ForwardTuning, compute_with, computing_threads, divide_cores, threads_for
from gpuinfer.models.out_of_memory import first_line, is_out_of_memory, keep_freed_memory
from gpuinfer.models.pinned_memory import queued
from gpuinfer.models.processor import computed_in, refuse_float16_gradients
from gpuinfer.models.row_blocks import as_tensor, rearranged, tensors_of
from gpuinfer.models.row_format import BITS, misfit, row_dtype


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, within this block, the bytes of all storages that operations have made and that are alive: `now`, and
    `most` at the peak.

    Costs some microseconds an operation: used for one pass of each shape.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._alive: dict[int, tuple[int, Any]] = {}  # by the storage's address: bytes, a reference that tells its end

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {_key(one) for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)}
        for one in tree_iter(made):
            if not isinstance(one, Tensor) or (key := _key(one)) in given or key in self._alive:
                continue
            storage = one.untyped_storage()
            size = storage.nbytes()
            self._alive[key] = size, weakref.ref(storage, functools.partial(self._leave, key))
            self.now += size
            self.most = max(self.most, self.now)
        return made

    def leave(self, tensor: Tensor) -> None:
        """Stop counting a tensor's storage, which has become a parameter's gradient."""
        self._leave(_key(tensor))

    def _leave(self, key: int, _: object = None) -> None:
        if (known := self._alive.pop(key, None)) is not None:
            self.now -= known[0]


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


MAX_ROWS = 65_536
RANKS_APART = 1 << 40  # between the seeds of two ranks: each draws other numbers for its part of a batch
SPREAD = 0x9E3779B97F4A7C15  # odd and large: seeds that follow one another draw other numbers at all steps
TRIED_ROWS = 3  # for whether a model in segments still answers as it did


class GradientTuning(ForwardTuning, Protocol):
    """The user's options for training passes; None: the default."""

    @property
    def loss(self) -> str | None: ...
    @property
    def checkpoint_segments(self) -> model_layers.Segments | None: ...
    @property
    def layers(self) -> str | None: ...


@dataclass(frozen=True)
class OpenedGradients:
    """A model in training. One thread at a time may call `passed`, which computes with the threads that were set when
    the model was opened.
    """

    limits: Limits
    passed: Callable[[TrainingBatch], Gradients]
    device: Callable[[], Mapping[str, Any]]
    close: Callable[[], None] = lambda: None


def open_gradients(spec: ModelSpec, setup: Setup, tuning: GradientTuning) -> OpenedGradients:
    """Build the model in its trainable form with float32 weights, and try it. Sets threads for the whole process. On
    several devices each batch is divided among them (`data_parallel.py`).

    Raises `UsageError` when the model or the loss cannot be loaded, or the model's layers cannot be told apart.
    """
    devices = resolve_devices(setup.devices)
    if len(devices) > 1:
        from gpuinfer.models.data_parallel import open_data_parallel

        return open_data_parallel(spec, setups_of(setup, devices), tuning)
    passes, facts = open_pass(spec, setup, tuning)
    gauge, threads = Gauge(devices[0]), threads_for(setup, tuning)

    def passed(batch: TrainingBatch) -> Gradients:
        compute_with(threads)  # another thread may have set another number
        return passes(batch)

    return OpenedGradients(Limits(facts["in_force"]["max_rows"]), passed, lambda: {**gauge.read(), **facts})


def open_pass(spec: ModelSpec, setup: Setup, tuning: GradientTuning) -> tuple[GradientPass, dict[str, Any]]:
    """The model on its one device, as `open_gradients` opens it, and what the report says of it."""
    refuse_float16_gradients(setup)
    if (tuning.in_flight or 1) > 1:
        raise UsageError(
            f"-B in_flight={tuning.in_flight}: a device computes gradients one batch at a time. Leave it out."
        )
    if tuning.compile:
        raise UsageError("-B compile=true is for answers, not for gradients. Leave it out.")
    row_dtype(spec)
    loss = losses.find_loss(tuning.loss)
    device = resolve_device(setup.device)
    computed = computed_in(setup.dtype, tuning.compute, device.type == "cpu")
    divide_cores(setup, tuning)
    keep_freed_memory()
    module = with_weights(spec, setup.seed).float().to(device)
    probe(module.eval(), spec, device=device, dtype=torch.float32)
    passes = GradientPass(
        module,
        spec,
        loss=loss,
        loss_name=tuning.loss or losses.POLICY_VALUE,
        autocast=torch.bfloat16 if computed == "bfloat16" else None,
        seed=setup.seed,
        checkpoint_segments=tuning.checkpoint_segments,
        layers=tuning.layers,
    )
    threads = threads_for(setup, tuning)
    in_force = {
        "max_rows": tuning.max_rows or MAX_ROWS,
        "in_flight": 1,
        "threads": threads,
        "segments": passes.segments,
    }
    facts = {"computes_in": computed, "threads": computing_threads(device, threads), "in_force": in_force}
    return passes, facts


class GradientPass:
    """`module` in training, on the device where its parameters are. One thread at a time.

    What is random in it (dropout) is drawn from `seed` and the version of the weights: the same batch with the same
    weights gives the same gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: ModelSpec,
        *,
        loss: losses.Loss = losses.policy_value,
        loss_name: str = losses.POLICY_VALUE,
        autocast: torch.dtype | None = None,
        seed: int = 0,
        checkpoint_segments: model_layers.Segments | None = None,
        layers: str | None = None,
    ) -> None:
        self._spec, self._loss, self._loss_name, self._seed, self._autocast = spec, loss, loss_name, seed, autocast
        # By their own names, which segments would change.
        self._parameters = dict(module.named_parameters())
        self._states = set(module.state_dict())
        self._buffers = {name: one for name, one in module.named_buffers() if name in self._states}
        self._own = {name: one.data for name, one in self._parameters.items()}
        self._own_buffers = {name: one.clone() for name, one in self._buffers.items()}
        self._device = next(iter(self._own.values()), torch.empty(0)).device
        self._loaded: int | None = None  # the version of the weights in it; None: its own
        self._measured: dict[int, int] = {}  # rows → bytes of activations
        self.segments = 1
        if checkpoint_segments is not None:
            rows = torch.ones(TRIED_ROWS, spec.inputs, device=self._device)
            with torch.inference_mode():
                before = module.eval()(rows)
            module, self.segments = model_layers.divide(module, checkpoint_segments, layers, spec.name)
            cure = (
                "Its layers must each be called with the last one's answer: name others with -B layers=attribute, or "
                f"{model_layers.CURE}."
            )
            divided = module
            check_same(spec.name, before, lambda: divided.eval()(rows), "with its layers in segments", cure)
        self.module = module
        self._replica: nn.Module | None = None  # the same, averaging gradients over ranks; made by the first pass
        self._parts = 1  # into which each batch is divided

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        return self._device

    def distribute(self, rank: int, ranks: int) -> None:
        """Compute one of `ranks` parts of each batch from now on, in the default process group of torch.distributed,
        which all ranks have joined: gradients are those of the whole batch, on every rank.
        """
        self._parts = ranks
        self._seed += rank * RANKS_APART

    def __call__(self, batch: TrainingBatch, rows_in_all: int | None = None) -> Gradients:
        """Where the batch is a part, the whole has `rows_in_all` rows; loss, parts and buffers are those of the part.

        Raises `BackendError` for a batch that does not fit the model, a loss that is not a number, and when memory
        runs out.
        """
        self.refuse_misfit(batch)
        try:
            enter_station("transfer")
            self._use(batch)
            if not batch.backward:
                return self._tried(batch)
            if self._parts > 1:
                self._take_first_weights()
                self._replica = self._replica or self._replicated(batch)
            rows = len(batch.features)
            return self._passed(batch, 1.0 if rows_in_all is None else rows * self._parts / rows_in_all)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            cure = "auto" if self.segments == 1 else "more"
            raise BackendError(
                f"out of memory on the way forward and back of {len(batch.features):,} rows: {first_line(error)}. Send "
                f"fewer rows (--batch-size), or keep fewer activations: -B checkpoint_segments={cure}."
            ) from None  # its frames hold references to the memory
        finally:
            for parameter in self._parameters.values():
                parameter.grad = None

    def refuse_misfit(self, batch: TrainingBatch) -> None:
        """Raises `BackendError` for a batch that does not fit the model."""
        if fault := self._misfit(batch):
            raise fault

    def _take_first_weights(self) -> None:
        """Have the parameters that the first rank has for this batch, by one broadcast. Buffers follow in the
        forward.
        """
        parameters = list(self._parameters.values())
        flat = torch.cat([one.detach().reshape(-1) for one in parameters])
        distributed.broadcast(flat, 0)
        if distributed.get_rank() > 0:
            with torch.no_grad():
                for one, part in zip(parameters, torch.split(flat, [one.numel() for one in parameters]), strict=True):
                    one.copy_(part.view_as(one))

    def _replicated(self, batch: TrainingBatch) -> nn.Module:
        """The module as DistributedDataParallel. Whether the loss depends on all parameters is tried on this batch: the
        search for those that it does not depend on costs time in each pass.
        """
        self.module.train()
        buffers = {name: one.detach().clone() for name, one in self._buffers.items()}
        with self._random(batch.version):
            loss, _ = self._forward(batch, self.module)
            loss.backward()  # type: ignore[no-untyped-call]
        unused = any(one.requires_grad and one.grad is None for one in self._parameters.values())
        for parameter in self._parameters.values():
            parameter.grad = None
        with torch.no_grad():
            for name, buffer in self._buffers.items():
                buffer.copy_(buffers[name])
        on_any = torch.tensor(float(unused), device=self._device)
        distributed.all_reduce(on_any, distributed.ReduceOp.MAX)
        return nn.parallel.DistributedDataParallel(self.module, find_unused_parameters=bool(on_any))

    def _misfit(self, batch: TrainingBatch) -> BackendError | None:
        if not isinstance(batch, TrainingBatch):
            return BackendError(
                f"a request for gradients is a gpuinfer.gradients.TrainingBatch, and this is {type(batch).__name__}. "
                "Send one, or leave -B backward out."
            )
        rows = len(batch.features)
        for name, target in batch.targets.items():
            if not isinstance(target, np.ndarray) or target.shape[:1] != (rows,):
                found = list(target.shape) if isinstance(target, np.ndarray) else type(target).__name__
                return BackendError(f"the target '{name}' is {found} for {rows} rows. Send an array [{rows}, ...].")
        return misfit(batch.features, rows, self._spec)

    def _use(self, batch: TrainingBatch) -> None:
        """Load the batch's weights into the model, unless their version is loaded."""
        weights = batch.weights
        if weights is None:
            if self._loaded is not None:
                for name, own in self._own.items():
                    self._parameters[name].data = own
            source: Mapping[str, Tensor] = self._own_buffers
        else:
            if batch.version != self._loaded:
                known: dict[str, Tensor] = {**self._parameters, **self._buffers}
                given: dict[str, Any] = {
                    name: one for name, one in weights.items() if name in known or name not in self._states
                }
                if problems := mismatch(known, given):
                    raise BackendError(
                        f"the weights of the batch do not fit model '{self._spec.name}': {problems}. Send those of its "
                        "state_dict."
                    )
                for name, parameter in self._parameters.items():
                    parameter.data = _tensor(weights[name]).to(self._device, parameter.dtype)
            source = {name: _tensor(weights[name]) for name in self._buffers}
        self._loaded = None if weights is None else batch.version
        with torch.no_grad():
            for name, buffer in self._buffers.items():
                buffer.copy_(source[name])

    def _passed(self, batch: TrainingBatch, weight: float) -> Gradients:
        kept = batch.keep_on_device and self._device.type != "cpu"
        self.module.train()
        with self._counted(len(batch.features)), self._random(batch.version):
            began = self._mark()
            loss, parts = self._forward(batch, self._replica or self.module)
            # Before the way back, in which layers in segments go forward once more.
            buffers = {name: one.detach().clone() for name, one in self._buffers.items()}
            half = self._mark()
            enter_station("backward")
            # What ranks compute is averaged with equal weights, however many rows each has had.
            (loss if weight == 1.0 else loss * weight).backward()  # type: ignore[no-untyped-call]
            ended = self._mark()
        number, named = self._read(loss, parts, batch)
        enter_station("transfer")
        return Gradients(
            number,
            self._gradients(kept),
            named,
            buffers if kept else {name: one.cpu().numpy() for name, one in buffers.items()},
            self._measured[len(batch.features)],
            seconds_between(began, half),
            seconds_between(half, ended),
            self._loss_name,
        )

    def _tried(self, batch: TrainingBatch) -> Gradients:
        self.module.eval()
        with torch.no_grad():
            began = self._mark()
            loss, parts = self._forward(batch, self.module)
            ended = self._mark()
            number, named = self._read(loss, parts, batch)
        return Gradients(number, {}, named, forward_s=seconds_between(began, ended), loss_name=self._loss_name)

    def _forward(
        self, batch: TrainingBatch, module: Callable[[Tensor], Any]
    ) -> tuple[Tensor, dict[str, float | Tensor]]:
        rows = batch.features
        if self._spec.input_dtype == BITS:
            rows = np.unpackbits(rows, axis=1, count=self._spec.inputs, bitorder="little")
        inputs = queued(rows, self._device).float()
        targets = {name: queued(one, self._device) for name, one in batch.targets.items()}
        enter_station("forward")
        with torch.autocast(self._device.type, self._autocast, enabled=self._autocast is not None):
            answers = module(inputs)
        answers = rearranged(answers, [one.float() for one in tensors_of(answers)])
        return losses.loss_and_parts(self._loss_name, self._loss, answers, targets, batch.settings)

    def _read(
        self, loss: Tensor, parts: Mapping[str, float | Tensor], batch: TrainingBatch
    ) -> tuple[float, dict[str, float]]:
        """The loss and its parts as numbers, with one wait for the device. Raises `BackendError`
        for NaN and infinity.
        """
        value, named = losses.read_loss(loss, parts)
        if not math.isfinite(value):
            for what, rows in {"features": batch.features, **batch.targets}.items():
                if rows.dtype.kind == "f" and not np.isfinite(rows).all():
                    raise BackendError(
                        f"the loss '{self._loss_name}' is {value}, since {what} in the records are not finite: their "
                        "game wrote them. Mend the game, and play again."
                    )
            raise BackendError(
                f"the loss '{self._loss_name}' is {value}. Lower the learning rate, clip gradients more tightly, or "
                "look for NaN in the targets."
            )
        return value, named

    def _gradients(self, kept: bool) -> dict[str, Any]:
        """Gradients by name: arrays in memory of their own, or, if `kept` on the device, tensors."""
        found = {name: one.grad for name, one in self._parameters.items() if one.grad is not None}
        if kept:
            return {name: grad.float() for name, grad in found.items()}
        if self._device.type == "cpu":
            return {name: grad.float().contiguous().numpy() for name, grad in found.items()}
        flat = torch.cat([grad.float().reshape(-1) for grad in found.values()]).cpu().numpy()  # one copy, not hundreds
        bounds = np.cumsum([grad.numel() for grad in found.values()])[:-1]
        pieces = np.split(flat, bounds)
        return {name: piece.reshape(tuple(found[name].shape)) for name, piece in zip(found, pieces, strict=True)}

    def _mark(self) -> float | torch.cuda.Event:
        """A timestamp; on a CUDA device an event, to be read once the host has waited for it."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))  # type: ignore[no-untyped-call]
        return event

    @contextlib.contextmanager
    def _random(self, version: int) -> Iterator[None]:
        drawn = (self._seed * SPREAD + version) % 2**63
        # not torch.manual_seed, which has every kind of device remember the call, and takes milliseconds for it
        generators = [torch.default_generator]
        if self._device.type == "cuda":
            generators.append(torch.cuda.default_generators[self._device.index or 0])
        before = [one.get_state() for one in generators]
        try:
            for one in generators:
                one.manual_seed(drawn)
            yield
        finally:
            for one, state in zip(generators, before, strict=True):
                one.set_state(state)

    @contextlib.contextmanager
    def _counted(self, rows: int) -> Iterator[None]:
        """Run a pass, measuring its activations if it is the first of its size: later passes of that size hold the
        same.
        """
        if rows in self._measured:
            yield
            return
        live = LiveBytes()
        hooks = [
            one.register_post_accumulate_grad_hook(lambda one: live.leave(one.grad))  # type: ignore[no-untyped-call]
            for one in self._parameters.values()
            if one.requires_grad
        ]
        try:
            with live:
                yield
        finally:
            for hook in hooks:
                hook.remove()
        self._measured[rows] = live.most


def _tensor(value: NDArray[Any] | Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else as_tensor(np.asarray(value))


def seconds_between(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    """Seconds between two marks of a pass that the host has waited for."""
    if isinstance(begin, float):
        assert isinstance(end, float)
        return end - begin
    return float(begin.elapsed_time(end)) / 1e3  # type: ignore[arg-type, no-untyped-call]


def answers_to(passed: Callable[[TrainingBatch], Gradients], batches: Sequence[TrainingBatch]) -> list[Any]:
    """One result for each batch: its gradients, or the error that it raised."""
    results: list[Any] = []
    for batch in batches:
        try:
            results.append(passed(batch))
        except Exception as error:  # noqa: BLE001 (a model may raise anything, which is its batch's answer)
            results.append(error)
    return results
