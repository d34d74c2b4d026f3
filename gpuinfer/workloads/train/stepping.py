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
from gpuinfer.models.memory import first_line, is_out_of_memory
from gpuinfer.models.networks import load_weights

BETAS = (0.9, 0.999)
WEIGHTS, ADAMW = "weights/", "adamw/"  # before the names of tensors in a checkpoint
HOST = torch.device("cpu")


class Stepper:
    """AdamW (Loshchilov and Hutter 2019) over float32 weights. Matrices decay, vectors do not.

    Weights and moments are on the CPU at first, and move to the device on which gradients are. There a step waits once,
    for the gradients' norm.
    """

    def __init__(self, spec: ModelSpec, seed: int, weight_decay: float, clip_norm: float) -> None:
        module = trainable(spec, seed)
        if spec.weights is not None:
            load_weights(module, spec.weights, spec.name)
        module = module.float()
        self._weight_decay, self._clip = weight_decay, clip_norm
        self._trained = [name for name, one in module.named_parameters() if one.requires_grad]
        self._hold(module.state_dict(keep_vars=True), HOST)

    def _hold(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Have these as weights, on this device, and an optimizer that knows nothing of them yet."""
        # Names that share a tensor go on to share one.
        own = {id(one): one.detach().to(device).contiguous() for one in tensors.values()}
        self._device = device
        self._tensors = {name: own[id(one)] for name, one in tensors.items()}
        self._parameters = {name: self._tensors[name] for name in self._trained}
        self.weights: Mapping[str, NDArray[Any] | Tensor] = self._tensors
        if device == HOST:
            self.weights = {name: one.numpy() for name, one in self._tensors.items()}
        groups = [
            {"params": [one for one in self._parameters.values() if one.ndim > 1], "weight_decay": self._weight_decay},
            {"params": [one for one in self._parameters.values() if one.ndim <= 1], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=BETAS, fused=True
        )

    def step(self, gradients: Gradients, rate: float) -> float:
        """One step at this learning rate; the norm of all gradients before it was clipped. `weights` are the new ones
        from then on: arrays on a CPU, changed where they lie, and tensors on any other device.

        Raises `WorkError` when the norm is not finite, with the weights as they were, and when memory runs out, which
        ends the training: some weights may be new then.
        """
        found = {name: _tensor(one) for name, one in gradients.by_name.items()}
        device = next((one.device for one in found.values()), self._device)
        try:
            if device != self._device:
                self._move(device)
            return self._step(found, gradients.buffers, rate)
        except (RuntimeError, MemoryError) as error:
            if device == HOST or not is_out_of_memory(error):
                raise
            raise WorkError(
                f"out of memory in a step of the optimizer, which keeps two numbers for each weight on {device}: "
                f"{first_line(error)}. Leave more for it: a smaller --batch-size, or -B checkpoint_segments=auto."
            ) from None  # its frames hold on to the memory

    def _step(self, found: Mapping[str, Tensor], buffers: Mapping[str, Any], rate: float) -> float:
        for name, parameter in self._parameters.items():
            parameter.grad = found.get(name)
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._clip))
        if not norm < float("inf"):
            raise WorkError(
                f"the gradients' norm is {norm}: training has diverged. Lower --learning-rate or --clip-norm, raise "
                "--warmup-steps, and go on from the last checkpoint with --resume, or begin again."
            )
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        for name, value in buffers.items():
            self._tensors[name].copy_(_tensor(value))
        for parameter in self._parameters.values():
            parameter.grad = None  # memory for the next pass
        return norm

    def _move(self, device: torch.device) -> None:
        moments = self._moments()
        self._hold(self._tensors, device)
        self._take(moments)

    def state(self) -> dict[str, Tensor]:
        """All that the next step depends on, in memory of the host."""
        found = {WEIGHTS + name: one for name, one in self._tensors.items()} | self._moments()
        return {name: one.cpu() for name, one in found.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave. Raises `KeyError` or `RuntimeError` for that of another model."""
        for name, one in self._tensors.items():
            one.copy_(state[WEIGHTS + name])
        self._take({key: value for key, value in state.items() if key.startswith(ADAMW)})

    def _moments(self) -> dict[str, Tensor]:
        return {
            f"{ADAMW}{kind}/{name}": value
            for name, parameter in self._parameters.items()
            for kind, value in self._optimizer.state.get(parameter, {}).items()
        }

    def _take(self, moments: Mapping[str, Tensor]) -> None:
        for key, value in moments.items():
            kind, _, name = key.removeprefix(ADAMW).partition("/")
            self._optimizer.state[self._parameters[name]][kind] = value.to(self._device, copy=True)


def _tensor(value: NDArray[Any] | Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.from_numpy(value)
