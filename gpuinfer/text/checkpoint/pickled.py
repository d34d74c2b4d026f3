"""Reads what training scripts save with `torch.save`: plain values and tensors only, mapped rather than read whole."""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.assembly import Stored
from gpuinfer.text.checkpoint.digests import Digests, DigestSource, digests_of

CODE = ("Unsupported global", "Unsupported class", "Trying to ")  # torch's words for what is not allowed
SAVE_AGAIN = (
    "Save it again with plain values: torch.save({'model': model.state_dict(), 'model_args': dict(…)}, 'model.pt')."
)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def read_torch_file(path: Path) -> dict[str, Any]:
    """The mapping in the file; tensors are mapped into memory, so that an optimiser's state costs nothing.

    Raises `UsageError` for a file that is absent, damaged, or asks for code to be run.
    """
    if not path.is_file():
        raise UsageError(f"there is no checkpoint file {path}. Check --checkpoint.")
    try:
        content = _load(path)
    except Exception as error:  # noqa: BLE001 - each kind of damage raises a kind of its own
        if type(error).__name__ == "UnpicklingError":  # torch's text advises to open it all the same: not passed on
            code = any(sign in str(error) for sign in CODE)
            why = "would run code when opened: it holds" if code else "cannot be read: it is damaged, or holds"
            raise UsageError(f"{path} {why} more than tensors and plain values. {SAVE_AGAIN}") from None
        reason = str(error).strip().partition("\n")[0][:200]
        raise UsageError(
            f"cannot read {path} as plain tensors ({type(error).__name__}: {reason}). {SAVE_AGAIN}"
        ) from None
    if not isinstance(content, Mapping):
        raise UsageError(f"{path} holds no mapping with 'model' and 'model_args'. Save it as nanoGPT's train.py does.")
    return dict(content)


def _load(path: Path) -> Any:
    if zipfile.is_zipfile(path):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return torch.load(path, map_location="cpu", weights_only=True)  # as torch saved before 1.6


class TensorStore:
    """Tensors that a file was read into."""

    def __init__(self, where: str, tensors: Mapping[str, Tensor]) -> None:
        self.where, self._tensors = where, tensors
        self.tensors = {name: Stored(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    def read(self, name: str, into: Tensor) -> None:
        into.copy_(self._tensors[name])

    def digests(self, names: Collection[str]) -> Digests:
        return digests_of({name: _source(self._tensors[name]) for name in names})


def _source(tensor: Tensor) -> DigestSource:
    values: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    content = memoryview(values)
    return DigestSource(content.nbytes, lambda start, length: content[start : start + length])


def plain_tensors(content: Mapping[Any, Any], where: str) -> dict[str, Tensor]:
    """`content` as a state dict of dense floating-point tensors. Raises `UsageError` when it is something else."""
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise UsageError(f"{where}: 'model' holds more than named tensors. Save model.state_dict() in it.")
        if tensor.layout != torch.strided or tensor.dtype not in FLOATS or tensor.device.type != "cpu":
            raise UsageError(
                f"{where}: tensor '{name[:80]}' is {tensor.dtype} on {tensor.device} ({tensor.layout}), not plain "
                "floating-point numbers. Save model.state_dict() of the model as it was trained."
            )
    return dict(content)
