"""What a module may answer: one tensor, or a tuple, list or dict of tensors, all of the same rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gpuinfer.layouts import AnswerLayout


def tensors_of(answer: Any) -> list[Tensor]:
    """The tensors of an answer, in order. Raises `TypeError` for anything else that lies in it."""
    parts = list(answer.values()) if isinstance(answer, Mapping) else answer
    parts = list(parts) if isinstance(parts, tuple | list) else [parts]
    for part in parts:
        if not isinstance(part, Tensor):
            raise TypeError(f"{type(part).__name__} among the answers")
    return parts


def layout_of(answer: Any) -> AnswerLayout:
    """How an answer is arranged, and the shape of one row of each tensor. Raises `TypeError` for another answer."""
    shapes = tuple(tuple(tensor.shape[1:]) for tensor in tensors_of(answer))
    if isinstance(answer, Mapping):
        if odd := [key for key in answer if not isinstance(key, str)]:
            raise TypeError(f"a dict in which {odd[0]!r} is a key where strings should be")
        return AnswerLayout("dict", shapes, tuple(answer))
    return AnswerLayout("tuple" if isinstance(answer, tuple | list) else "tensor", shapes)


def like(answer: Any, parts: list[Any]) -> Any:
    """`parts` arranged as the tensors of `answer` are: alone, in a tuple, or in a dict with the same keys."""
    if isinstance(answer, Mapping):
        return dict(zip(answer, parts, strict=True))
    return tuple(parts) if isinstance(answer, tuple | list) else parts[0]
