"""The folder of a training run: how it is trained, the last whole checkpoint, and in the end the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.host.records import RecordFolder
from gpuinfer.workloads.train.stepping import WEIGHTS

SCHEMA = "gpuinfer.training/1"
CHECKPOINT = "checkpoint.safetensors"
TRAINED = "weights.safetensors"


class TrainingFolder(RecordFolder):
    """The folder that `--out` names. A checkpoint replaces the one before it once it is whole."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, SCHEMA, ".safetensors", holds="a training run")

    def keep(self, step: int, loss: str, state: Mapping[str, Tensor]) -> None:
        """On the disk when this returns. Raises `WorkError` when it cannot be written."""
        content = save(_apart(state), _told(step, loss))
        self.put(CHECKPOINT, lambda file: file.write(content))

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
        content = save(_apart(weights), {"format": "pt", **_told(step, loss)})
        self.put(TRAINED, lambda file: file.write(content))


def _apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each in memory of its own, as the format wants it: those that share theirs, or have gaps, as copies."""
    seen: set[int] = set()
    found = {}
    for name, one in state.items():
        place = one.untyped_storage().data_ptr()
        whole = one.is_contiguous() and one.untyped_storage().nbytes() == one.nbytes
        found[name] = one if whole and place not in seen else one.contiguous().clone()
        seen.add(place)
    return found


def _told(step: int, loss: str) -> dict[str, Any]:
    return {"step": str(step), "loss": loss}
