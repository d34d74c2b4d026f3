"""The folder of a training run: how it is trained, the last whole checkpoint, the loss of each step, and in the end the
weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.host.records import RecordFolder, unwritable
from gpuinfer.report import loss_curve, plotting
from gpuinfer.workloads.train.stepping import WEIGHTS

SCHEMA = "gpuinfer.training/1"
CHECKPOINT = "checkpoint.safetensors"
TRAINED = "weights.safetensors"


class TrainingFolder(RecordFolder):
    """The folder that `--out` names. A checkpoint replaces the one before it once it is whole."""

    tells: ClassVar[Sequence[str]] = (loss_curve.NAME, loss_curve.PICTURE)

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
        content = memoryview(save(_apart(tensors), metadata))
        begins = 8 + int.from_bytes(content[:8], "little")  # the header's size, the header, then the tensors
        told = msgspec.json.encode({**msgspec.json.decode(content[8:begins]), "__metadata__": metadata})
        told += b" " * (-len(told) % 8)  # aligns the tensors, as the format wants it
        self.put(name, lambda file: file.writelines((len(told).to_bytes(8, "little"), told, content[begins:])))

    def begin_curve(self, step: int) -> None:
        """Forget what the curve says of steps after this one: they are done again. Raises `WorkError`."""
        rows = [row for row in loss_curve.read(self.path / loss_curve.NAME) if row["step"] <= step]
        content = b"".join(map(_line, rows))
        self.put(loss_curve.NAME, lambda file: file.write(content))

    def add_to_curve(self, rows: Sequence[loss_curve.Row]) -> None:
        """Raises `WorkError` when it cannot be written."""
        try:
            with (self.path / loss_curve.NAME).open("ab") as file:
                file.write(b"".join(map(_line, rows)))
        except OSError as error:
            raise unwritable(self.path, error, self._holds) from error

    def draw_curve(self) -> None:
        """A picture of it. Raises `WorkError` when it cannot be written."""
        if rows := loss_curve.read(self.path / loss_curve.NAME):
            content = plotting.image(loss_curve.plot(rows), "svg")
            self.put(loss_curve.PICTURE, lambda file: file.write(content))


def _line(row: loss_curve.Row) -> bytes:
    return msgspec.json.encode(row) + b"\n"


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
