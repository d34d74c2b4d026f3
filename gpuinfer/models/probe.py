"""A model is tried on two small batches before any work relies on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpuinfer.api import ModelSpec
from gpuinfer.errors import UsageError
from gpuinfer.layouts import AnswerLayout
from gpuinfer.models.answers import layout_of, tensors_of

BATCHES = (2, 3)  # two sizes, so that an answer that does not follow the batch is seen


def probe(module: nn.Module, spec: ModelSpec, *, device: torch.device, dtype: torch.dtype) -> AnswerLayout:
    """How the model's answers are laid out.

    Raises `UsageError`, naming the model and the shapes, unless the answers have the right ones and are numbers.
    """
    few, more = (attempt(module, spec, rows, device, dtype) for rows in BATCHES)
    if few != more:
        raise UsageError(
            f"model '{spec.name}' answered {BATCHES[0]} rows with {few} a row and {BATCHES[1]} rows with {more}. "
            "Let the answer to a row look the same in every batch."
        )
    return few


def attempt(module: nn.Module, spec: ModelSpec, rows: int, device: torch.device, dtype: torch.dtype) -> AnswerLayout:
    """How a batch of so many rows is answered."""
    features = torch.ones(rows, spec.inputs, device=device, dtype=dtype)
    with torch.inference_mode():
        try:
            answer = module(features)
        except Exception as error:
            raise UsageError(
                f"model '{spec.name}' raised {type(error).__name__}: {error}. It was given features "
                f"{list(features.shape)} of {str(dtype).removeprefix('torch.')} on {device}. "
                "Let it take that shape and dtype, or try --dtype float32."
            ) from error
    return check(answer, rows, spec)


def check(answer: Any, rows: int, spec: ModelSpec) -> AnswerLayout:
    expected = expected_shapes(spec, rows)
    wanted = " and ".join(f"{name} {shape}" for name, shape in expected) or f"tensors of {rows} rows"
    try:
        found, layout = tensors_of(answer), layout_of(answer)
    except TypeError as error:
        raise UsageError(f"model '{spec.name}' answered with {error}. Let it return {wanted}.") from None
    shapes = [list(tensor.shape) for tensor in found]
    if expected and (shapes != [shape for _, shape in expected] or not isinstance(answer, tuple | list)):
        raise wrong_shapes(spec, rows, shapes, wanted)
    if not found or any(not shape or shape[0] != rows for shape in shapes):
        raise wrong_shapes(spec, rows, shapes, wanted)
    check_numbers(found, spec)
    return layout


def expected_shapes(spec: ModelSpec, rows: int) -> Sequence[tuple[str, list[int]]]:
    """What the work asks of the model; nothing in particular when it names neither actions nor seats."""
    if "actions" not in spec.arguments or "seats" not in spec.arguments:
        return []
    return [("policy logits", [rows, spec.arguments["actions"]]), ("values", [rows, spec.arguments["seats"]])]


def wrong_shapes(spec: ModelSpec, rows: int, shapes: list[list[int]], wanted: str) -> UsageError:
    answered = " and ".join(map(str, shapes)) or "nothing"
    return UsageError(
        f"model '{spec.name}' answered a batch of {rows} rows with {answered}. Let it return {wanted}"
        f"{' as a tuple' if ' and ' in wanted else ''}."
    )


def check_numbers(found: list[Tensor], spec: ModelSpec) -> None:
    for place, tensor in enumerate(found):
        bad = "NaN" if bool(tensor.isnan().any()) else "+inf" if bool(tensor.isposinf().any()) else None
        if bad:
            raise UsageError(
                f"model '{spec.name}' answered with {bad} in output {place} {list(tensor.shape)}. "
                "Check its weights; in float16 large values overflow: try --dtype bfloat16 or float32."
            )
