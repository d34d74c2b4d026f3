"""A network of rows in training: weights, gradients, the optimizer's state, and activations with and without
checkpointing, as `gpuinfer train` has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.gradients import TrainingBatch
from gpuinfer.lab.memory.batch_trials import MemoryParts, StageParts, Stopwatch
from gpuinfer.lab.memory.rows_memory import MOST, block_of
from gpuinfer.lab.network_options import sizes_named
from gpuinfer.models.device import resolve_dtype
from gpuinfer.models.footprint import Activations, weight_bytes
from gpuinfer.models.gradients import GradientPass
from gpuinfer.models.load import probe, with_weights
from gpuinfer.models.losses import POLICY_VALUE, Loss, find_loss
from gpuinfer.models.open_model import divide_cores
from gpuinfer.models.out_of_memory import keep_freed_memory
from gpuinfer.models.processor import computed_in, refuse_float16_gradients
from gpuinfer.models.row_blocks import tensors_of
from gpuinfer.models.row_format import AnswerLayout

Segments = int | Literal["auto"]
LOOKED_AT = (128, 512)  # batch sizes whose activations are counted
USUAL = 256  # positions in a step of `gpuinfer train`
STEPS = 2  # the optimizer's state is there from the first on
WARM_UP = ModelSpec("blobnet-small", inputs=64, arguments={"actions": 8, "seats": 2})
FLOAT = 4  # bytes of a weight in training
MOMENTS = 2  # numbers that AdamW keeps of each weight


def mean_square(answers: Any, targets: Mapping[str, Tensor]) -> Tensor:
    """Stands in for the loss of a model whose answers are no policy and values: it holds what any loss of them does."""
    return torch.stack([functional.mse_loss(one, torch.zeros_like(one)) for one in tensors_of(answers)]).sum()


class TrainingStep:
    """A model and its optimizer on the device, for steps on made-up rows; `segments` as `-B checkpoint_segments`."""

    def __init__(
        self, spec: ModelSpec, setup: Setup, options: Mapping[str, Any], device: torch.device, segments: Segments | None
    ) -> None:
        """Raises `UsageError` for a model that cannot be loaded, or whose layers cannot be distinguished."""
        refuse_float16_gradients(setup)
        divide_cores(setup, SimpleNamespace(**options))
        keep_freed_memory()
        self._spec, self._device = spec, device
        computed = computed_in(setup.dtype, options["compute"], device.type == "cpu")
        with sizes_named(spec):
            module = with_weights(spec, setup.seed).float().to(device)
        self.answer = probe(module.eval(), spec, device=device, dtype=torch.float32)
        self.weights_bytes = weight_bytes(module)
        self.trained_bytes = sum(one.nbytes for one in module.parameters() if one.requires_grad)
        loss, name = _loss_for(self.answer, options["loss"])
        autocast = resolve_dtype(computed) if computed == "bfloat16" else None
        how: dict[str, Any] = {"loss": loss, "loss_name": name, "autocast": autocast, "seed": setup.seed}
        how |= {"checkpoint_segments": segments, "layers": options["layers"]}
        self._pass = GradientPass(module, spec, **how)
        self.loss_name, self.segments = name, self._pass.segments
        with sizes_named(spec):
            own = with_weights(spec, setup.seed).float().to(device)  # as those that `train` changes
        self._trained = {name: one for name, one in own.named_parameters() if one.requires_grad}
        self._weights = {name: one.detach() for name, one in own.state_dict(keep_vars=True).items()}
        self._optimizer = torch.optim.AdamW(self._trained.values(), lr=0.0, fused=True)
        self._version = 0

    def batch(self, rows: int) -> TrainingBatch:
        """Made-up rows and targets, with the optimizer's weights."""
        features, shapes = block_of(self._spec, rows), self.answer.shapes
        targets: dict[str, np.ndarray[Any, Any]] = {}
        if _answers_policy_and_values(self.answer):
            (actions,), (seats,) = shapes
            targets = {
                "policy": np.full((rows, actions), 1 / actions, np.float32),
                "value": np.zeros((rows, seats), np.float32),
                "legal": np.ones((rows, actions), np.bool_),
            }
        on_cpu = self._device.type == "cpu"
        weights = {name: one.numpy() if on_cpu else one for name, one in self._weights.items()}
        return TrainingBatch(features, targets, weights, self._version, keep_on_device=not on_cpu)

    def step(self, rows: int) -> int:
        """A pass and a step of the optimizer. The bytes of activations, without gradients."""
        found = self._pass(self.batch(rows))
        for name, parameter in self._trained.items():
            grad = found.by_name.get(name)
            parameter.grad = torch.from_numpy(grad) if isinstance(grad, np.ndarray) else grad
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._version += 1
        return found.activation_bytes


def _answers_policy_and_values(answer: AnswerLayout) -> bool:
    return answer.kind == "tuple" and [len(shape) for shape in answer.shapes] == [1, 1]


def _loss_for(answer: AnswerLayout, named: str | None) -> tuple[Loss, str]:
    if named is not None or _answers_policy_and_values(answer):
        return find_loss(named), named or POLICY_VALUE
    return mean_square, "mean square"


class TrainingSubject:
    """Implements `MemorySubject`: a batch counts the positions of a step."""

    timed = True

    def __init__(
        self,
        spec: ModelSpec,
        setup: Setup,
        options: Mapping[str, Any],
        device: torch.device,
        segments: Segments | None = None,
        not_divided: str = "",
    ) -> None:
        """`not_divided`: why its layers cannot be divided into segments, where they cannot."""
        self._spec, self._setup, self._options, self._device, self._requested = spec, setup, options, device, segments
        self._not_divided = not_divided
        self.most, self.first, self.usual = MOST, LOOKED_AT[0], USUAL
        self.process = self._weights = self._gradients = self._row_bytes = 0
        self._activations = Activations()
        self.segments: int | None = None  # of which activations are kept; None: all of them
        self._loss = ""

    def warm_up(self) -> None:
        TrainingStep(WARM_UP, self._setup, {**self._options, "loss": None, "layers": None}, self._device, None).step(8)

    def describe(self) -> None:
        """Raises `UsageError` for layers that cannot be distinguished."""
        if self._loss:
            return
        opened = TrainingStep(self._spec, self._setup, self._options, self._device, self._requested)
        few, more = LOOKED_AT
        small, large = (opened.step(rows) for rows in LOOKED_AT)
        each = max(0.0, (large - small) / (more - few))
        self._activations = Activations(max(0.0, large - each * more), each)
        self._weights, self._gradients = opened.weights_bytes, opened.trained_bytes
        batch = opened.batch(few)
        batch_bytes = sum(one.nbytes for one in (batch.features, *batch.targets.values()))
        self._row_bytes = round(batch_bytes / few)
        self.segments = None if self._requested is None else opened.segments
        self._loss = opened.loss_name

    def parts(self, batch: int) -> MemoryParts:
        """Weights are there twice: those that the model was built with, and those in training."""
        found = self._activations
        on_cpu = self._device.type == "cpu"  # where a process holds more than its tensors
        held = found.resident_bytes(batch) if on_cpu else round(found.fixed + found.each * batch)
        optimizer = MOMENTS * self._gradients
        return MemoryParts(
            self.process, 2 * self._weights, 0, held, batch * self._row_bytes, self._gradients, optimizer
        )

    def tensor_bytes(self, batch: int) -> int:
        """Of all tensors at the peak of a step, without the process and its other memory."""
        found, parts = self._activations, self.parts(batch)
        return parts.total - parts.process - parts.activations + round(found.fixed + found.each * batch)

    def stages(self, batch: int) -> Sequence[StageParts]:
        return ()

    def pages(self, free: int) -> None:
        """Rows keep nothing."""

    def run(self, batch: int) -> float:
        opened = TrainingStep(self._spec, self._setup, self._options, self._device, self._requested)
        seconds = []
        for _ in range(STEPS):
            watch = Stopwatch()
            opened.step(batch)
            seconds.append(watch.seconds())
        return min(seconds)

    def facts(self) -> Mapping[str, Any]:
        sizes = {name: self._spec.arguments[name] for name in ("actions", "seats") if name in self._spec.arguments}
        why = {"not_divided": self._not_divided} if self._not_divided else {}
        return {"features": self._spec.inputs, **sizes, "training": True, "loss": self._loss, **why}

    def setting(self) -> Mapping[str, Any]:
        """What tells this way of training from others on the same device."""
        return {"checkpoint_segments": self.segments, "activation_row_bytes": round(self._activations.each)}
