"""The weights in training with the state of AdamW, and the folder that keeps them: settings, last whole checkpoint,
loss of each step, and in the end the weights. Imports torch.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gpuinfer.api import ModelSpec
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.gradients import Gradients
from gpuinfer.host.extras import missing_extra
from gpuinfer.host.files import RecordFolder, unwritable
from gpuinfer.host.journal import AppendFile
from gpuinfer.models.load import with_weights
from gpuinfer.models.out_of_memory import first_line, is_out_of_memory
from gpuinfer.report import plotting

BETAS = (0.9, 0.999)
WEIGHTS, ADAMW = "weights/", "adamw/"  # before the names of tensors in a checkpoint
HOST = torch.device("cpu")


class Stepper:
    """AdamW (Loshchilov and Hutter 2019) over float32 weights. Matrices decay, vectors do not.

    Weights and moments are on the CPU at first, and move to the device on which gradients are. There a step waits once,
    for the gradients' norm.
    """

    def __init__(self, spec: ModelSpec, seed: int, weight_decay: float, clip_norm: float) -> None:
        module = with_weights(spec, seed).float()
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
                moments = self._moments()
                self._hold(self._tensors, device)
                self._take(moments)
            for name, parameter in self._parameters.items():
                parameter.grad = found.get(name)
            norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._clip))
            if not norm < float("inf"):
                raise WorkError(
                    f"the gradients' norm is {norm}: training has diverged. Lower --learning-rate or --clip-norm, "
                    "raise --warmup-steps, and go on from the last checkpoint with --resume, or begin again."
                )
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            for name, value in gradients.buffers.items():
                self._tensors[name].copy_(_tensor(value))
            for parameter in self._parameters.values():
                parameter.grad = None  # memory for the next pass
            return norm
        except (RuntimeError, MemoryError) as error:
            if device == HOST or not is_out_of_memory(error):
                raise
            raise WorkError(
                f"out of memory in a step of the optimizer, which keeps two numbers for each weight on {device}: "
                f"{first_line(error)}. Leave more for it: a smaller --batch-size, or -B checkpoint_segments=auto."
            ) from None  # its frames hold on to the memory

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


log = logging.getLogger(__name__)

SCHEMA = "gpuinfer.training/1"
CHECKPOINT = "checkpoint.safetensors"
TRAINED = "weights.safetensors"


class TrainingFolder(RecordFolder):
    """The folder that `--out` names. A checkpoint replaces the one before it once it is whole."""

    tells: ClassVar[Sequence[str]] = (plotting.LOSS_FILE, plotting.LOSS_PICTURE)

    def __init__(self, path: Path) -> None:
        super().__init__(path, SCHEMA, ".safetensors", holds="a training run")

    def keep(self, step: int, loss: str, state: Mapping[str, Tensor]) -> None:
        """On the disk when this returns. Raises `WorkError` when it cannot be written."""
        self._put(CHECKPOINT, state, {"loss": loss, "step": str(step)})

    def last(self) -> tuple[int, str, dict[str, Tensor]] | None:
        """Step, loss and state of the last checkpoint; None where there is none. Raises `UsageError`."""
        path = self.path / CHECKPOINT
        if not path.is_file():
            return None
        try:
            with safe_open(path, "pt") as file:
                told = file.metadata() or {}
                return int(told["step"]), told["loss"], {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, KeyError, ValueError, OSError) as error:
            raise UsageError(
                f"{path} cannot be read ({error}). Delete it, and --resume begins again with the first step."
            ) from error

    def finish(self, step: int, loss: str, state: Mapping[str, Tensor]) -> None:
        """Write the weights alone, as `--weights` takes them. Raises `WorkError` when they cannot be written."""
        weights = {name.removeprefix(WEIGHTS): one for name, one in state.items() if name.startswith(WEIGHTS)}
        self._put(TRAINED, weights, {"format": "pt", "loss": loss, "step": str(step)})

    def _put(self, name: str, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
        """The same tensors and metadata are the same bytes: safetensors itself writes metadata in the order of a hash
        table, which is another one each time.
        """
        # Each in memory of its own, as the format wants it: tensors that share theirs, or have gaps, as copies.
        seen: set[int] = set()
        apart: dict[str, Tensor] = {}
        for key, one in tensors.items():
            place = one.untyped_storage().data_ptr()
            whole = one.is_contiguous() and one.untyped_storage().nbytes() == one.nbytes
            apart[key] = one if whole and place not in seen else one.contiguous().clone()
            seen.add(place)
        content = memoryview(save(apart, metadata))
        begins = 8 + int.from_bytes(content[:8], "little")  # the header's size, the header, then the tensors
        told = msgspec.json.encode({**msgspec.json.decode(content[8:begins]), "__metadata__": metadata})
        told += b" " * (-len(told) % 8)  # aligns the tensors, as the format wants it
        self.put(name, lambda file: file.writelines((len(told).to_bytes(8, "little"), told, content[begins:])))

    def begin_curve(self, step: int) -> None:
        """Forget what the curve says of steps after this one: they are done again. Raises `WorkError`."""
        rows = [row for row in plotting.read_losses(self.path / plotting.LOSS_FILE) if row["step"] <= step]
        content = b"".join(map(_line, rows))
        self.put(plotting.LOSS_FILE, lambda file: file.write(content))

    def add_to_curve(self, rows: Sequence[plotting.LossRow]) -> None:
        """Raises `WorkError` when it cannot be written."""
        try:
            with contextlib.closing(AppendFile(self.path / plotting.LOSS_FILE)) as file:
                file.append(b"".join(map(_line, rows)))
        except OSError as error:
            raise unwritable(self.path, error, self._holds) from error

    def draw_curve(self) -> None:
        """A picture of it, where the extra `plots` is installed. Raises `WorkError` when it cannot be written."""
        if (problem := missing_extra("plots", plotting.LOSS_PICTURE)) is not None:
            log.warning("%s", problem)
        elif rows := plotting.read_losses(self.path / plotting.LOSS_FILE):
            content = plotting.image(plotting.plot_losses(rows), "svg")
            self.put(plotting.LOSS_PICTURE, lambda file: file.write(content))


def _line(row: plotting.LossRow) -> bytes:
    return msgspec.json.encode(row) + b"\n"
