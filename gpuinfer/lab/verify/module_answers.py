"""What a network of rows answers when its module is simply called, one row at a time and all rows at once, and whether
it answers alike when it is called twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import GpuinferError, WorkError
from gpuinfer.host import error_text
from gpuinfer.lab.bench import parity
from gpuinfer.lab.network_options import sizes_named

if TYPE_CHECKING:
    from torch import nn

POLICY, VALUE = "policy", "value"
CALLED_TWICE = 16  # rows

Outputs = Mapping[str, NDArray[np.float32]]  # by name, each [rows, …]


@dataclass(frozen=True, slots=True)
class ModuleAnswers:
    """`alone`: the reference, one row a call. `batched`: all rows in one call; None where that failed, as `failure`
    says. `apart`: the largest difference between two calls with the same row. `in_training`: the modules that
    `eval()` has left in training mode, for people; "" without any.
    """

    alone: Outputs
    batched: Outputs | None
    failure: str
    apart: float
    in_training: str

    def cause(self, tolerance: float) -> str:
        """Why no way can answer as the module alone does, whatever its batches; "" for no such reason."""
        if bad := [name for name, answer in self.alone.items() if np.isnan(answer).any()]:
            return f"The module alone answers NaN in {', '.join(bad)}: check its weights"
        if self.apart > tolerance:
            return "The module does not answer alike when it is called twice with the same row (random numbers, state?)"
        return ""


def answers_of_module(spec: ModelSpec, setup: Setup, rows: NDArray[Any]) -> ModuleAnswers:
    """Raises `UsageError` for a model that cannot be had, `WorkError` where the module raises for one row."""
    import torch

    from gpuinfer.models.load import build, resolve_device, resolve_dtype, title

    device, dtype = resolve_device(setup.devices[0]), resolve_dtype(setup.dtype)
    with sizes_named(spec):
        module = build(spec, device=device, dtype=dtype, seed=setup.seed)
    in_training = modules_in_training(module)
    with torch.inference_mode():
        inputs = torch.from_numpy(rows).to(device=device, dtype=dtype)
        try:
            first = module(inputs[:1])
            alone = joined_answers([first, *(module(inputs[at : at + 1]) for at in range(1, len(rows)))])
            again = joined_answers([module(inputs[at : at + 1]) for at in range(min(len(rows), CALLED_TWICE))])
        except GpuinferError:
            raise
        except Exception as error:
            cure = (
                f"{in_training}: let eval() reach them" if in_training else "Mend it, or call it by hand with one row"
            )
            raise WorkError(
                f"{title(spec.name)} raised for one row alone, with which all ways are compared: "
                f"{error_text.full_message(error)}. {cure}."
            ) from error
        names = output_names(first, spec, alone)
        together: list[NDArray[np.float32]] | None = None
        failure = ""
        try:
            together = parity.arrays(module(inputs))
        except Exception as error:  # noqa: BLE001  a module may raise anything
            failure = f"the module raised for {len(rows):,} rows: {error_text.full_message(error)}"
        if together is not None and len(together) != len(names):
            failure = f"the module gave {len(together)} outputs, and {len(names)} for one row"
            together = None
    return ModuleAnswers(
        dict(zip(names, alone, strict=True)),
        None if together is None else dict(zip(names, together, strict=True)),
        failure,
        parity.difference(again, [one[:CALLED_TWICE] for one in alone]),
        in_training,
    )


def joined_answers(answers: Sequence[Any]) -> list[NDArray[np.float32]]:
    """The outputs of all rows, of the answers to one row each."""
    return [np.concatenate(column) for column in zip(*map(parity.arrays, answers), strict=True)]


def modules_in_training(module: nn.Module) -> str:
    """A sentence's beginning on those parts of a model that are in training mode although eval() was called; "" without
    any.
    """
    names = [f"'{path}' ({type(part).__name__})" for path, part in module.named_modules() if path and part.training]
    return f"In training mode in spite of eval(): {', '.join(names)}" if names else ""


def output_names(answer: Any, spec: ModelSpec, outputs: Sequence[NDArray[Any]]) -> list[str]:
    """What the outputs are called: policy and value where they have a game's sizes, keys of a dict, else numbers."""
    if isinstance(answer, Mapping):
        return [str(key) for key in sorted(answer)]
    widths = [int(np.prod(one.shape[1:])) for one in outputs]
    if widths == [spec.arguments.get("actions"), spec.arguments.get("seats")]:
        return [POLICY, VALUE]
    return [f"output {number}" for number in range(len(outputs))]
