"""Weights from files: safetensors, or torch files of which only plain tensors are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gpuinfer.errors import UsageError

SHOWN = 3  # mismatched keys in a message
WRAPPERS = ("state_dict", "model")  # training scripts often keep the weights under one of these keys


def load_weights(module: nn.Module, path: str, model: str) -> None:
    """Put the weights in file `path` into `module`. Raises `UsageError` unless every key and shape fits."""
    weights = read_weights(Path(path))
    wanted = module.state_dict()
    if problems := mismatches(wanted, weights):
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise UsageError(
            f"the weights in {path} do not fit model '{model}': {'; '.join(problems[:SHOWN])}{more}. "
            "Use the model and the game sizes that they were trained with."
        )
    module.load_state_dict(weights)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Raises `UsageError` when the file is absent, damaged, or holds anything but named tensors."""
    if not path.is_file():
        raise UsageError(f"no weights file {path}. Check --weights.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each kind of damage raises a kind of its own
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"cannot read weights from {path}: {reason}. Save a plain state_dict, best as safetensors "
            "(safetensors.torch.save_file)."
        ) from error
    return named_tensors(content, path)


def named_tensors(content: Any, path: Path) -> dict[str, Tensor]:
    if isinstance(content, Mapping):
        for key in WRAPPERS:
            if isinstance(content.get(key), Mapping):
                content = content[key]
                break
        if all(isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()):
            return dict(content)
    raise UsageError(f"{path} does not hold a state_dict, names with tensors alone. Save model.state_dict() in it.")


def mismatches(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    """What does not fit, a phrase each: keys that are absent, keys that are unknown, shapes that differ."""
    problems = [f"'{key}' {list(wanted[key].shape)} is missing" for key in wanted if key not in given]
    problems += [f"'{key}' {list(given[key].shape)} is unknown to it" for key in given if key not in wanted]
    problems += [
        f"'{key}' is {list(given[key].shape)} where it has {list(tensor.shape)}"
        for key, tensor in wanted.items()
        if key in given and given[key].shape != tensor.shape
    ]
    return problems
