"""The weights in training, and what the optimizer knows of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.api import ModelSpec
from gpuinfer.errors import WorkError
from gpuinfer.gradients import Gradients
from gpuinfer.models.load import trainable
from gpuinfer.models.networks import load_weights

BETAS = (0.9, 0.999)
WEIGHTS, ADAMW = "weights/", "adamw/"  # before the names of tensors in a checkpoint


class Stepper:
    """AdamW (Loshchilov and Hutter 2019) over float32 weights on the CPU. Matrices decay, vectors do not.

    `weights` are those of the model's `state_dict` as arrays, which each step changes where they lie.
    """

    def __init__(self, spec: ModelSpec, seed: int, weight_decay: float, clip_norm: float) -> None:
        module = trainable(spec, seed)
        if spec.weights is not None:
            load_weights(module, spec.weights, spec.name)
        self._module, self._clip = module.float(), clip_norm
        self._parameters = {name: one for name, one in module.named_parameters() if one.requires_grad}
        self._buffers = dict(module.named_buffers())
        self._tensors: dict[str, Tensor] = {name: one.detach() for name, one in module.state_dict().items()}
        self.weights: Mapping[str, NDArray[Any]] = {name: one.numpy() for name, one in self._tensors.items()}
        groups = [
            {"params": [one for one in self._parameters.values() if one.ndim > 1], "weight_decay": weight_decay},
            {"params": [one for one in self._parameters.values() if one.ndim <= 1], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=BETAS, fused=True
        )

    def step(self, gradients: Gradients, rate: float) -> float:
        """One step at this learning rate; the norm of all gradients before it was clipped. Raises `WorkError`."""
        for name, parameter in self._parameters.items():
            found = gradients.by_name.get(name)
            parameter.grad = None if found is None else torch.from_numpy(found)
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._clip))
        if not norm < float("inf"):
            raise WorkError(
                f"the gradients' norm is {norm}: training has diverged. Lower --learning-rate or --clip-norm, raise "
                "--warmup-steps, and go on from the last checkpoint with --resume, or begin again."
            )
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        for name, value in gradients.buffers.items():
            self._buffers[name].copy_(torch.from_numpy(value))
        return norm

    def state(self) -> dict[str, Tensor]:
        """All that the next step depends on."""
        found = {WEIGHTS + name: one for name, one in self._tensors.items()}
        for name, parameter in self._parameters.items():
            for kind, value in self._optimizer.state.get(parameter, {}).items():
                found[f"{ADAMW}{kind}/{name}"] = value
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave. Raises `KeyError` or `RuntimeError` for that of another model."""
        with torch.no_grad():
            for name, one in self._tensors.items():
                one.copy_(state[WEIGHTS + name])
        for key, value in state.items():
            if key.startswith(ADAMW):
                kind, _, name = key.removeprefix(ADAMW).partition("/")
                self._optimizer.state[self._parameters[name]][kind] = value.clone()
