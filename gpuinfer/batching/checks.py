"""What a backend may answer: one row of output for each row of input, and no NaN or +inf anywhere.

Arrays are known by what they offer (`shape`, `dtype`, `max`), so that NumPy, torch and others are all checked, and none
of them is imported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

PLAIN = frozenset({type(None), bool, int, float, str, bytes})  # by far the most common answers that hold no array


def find_fault(result: Any, rows: int) -> str | None:
    """What is wrong with one request's result, ending with the cure; None when nothing is.

    Arrays count wherever they lie in tuples, lists and mappings. -inf is allowed: it is how logits are masked.
    """
    if type(result) in PLAIN:
        return None
    try:
        return _fault_of(result, rows, "the result")
    except Exception as error:  # noqa: BLE001 (an odd object must fail its own request, not the engine)
        return f"the result cannot be checked: {error!r}. Return arrays [rows, ...], or plain values."


def _fault_of(value: Any, rows: int, name: str) -> str | None:
    parts: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, tuple | list):
        parts = enumerate(value)
    else:
        shape = getattr(value, "shape", None)
        is_array = isinstance(shape, tuple) and hasattr(value, "dtype")
        return _fault_of_array(value, shape, rows, name) if is_array else None
    for key, part in parts:
        if type(part) not in PLAIN and (fault := _fault_of(part, rows, f"{name}[{key!r}]")):
            return fault
    return None


def _fault_of_array(array: Any, shape: Any, rows: int, name: str) -> str | None:
    if not shape or shape[0] != rows:
        return (
            f"{name} has shape {list(shape)} for a request of {rows} {'row' if rows == 1 else 'rows'}. "
            f"Return [{rows}, ...]: one row of output for each row of input."
        )
    if _is_floating(array.dtype) and 0 not in shape and not float(array.max()) < math.inf:  # a NaN wins every max
        return (
            f"{name}, {array.dtype} {list(shape)}, holds NaN or +inf. "
            f"Check the model's weights and inputs; to mask logits use -inf."
        )
    return None


def _is_floating(dtype: Any) -> bool:
    floating = getattr(dtype, "is_floating_point", None)  # torch
    return bool(floating) if floating is not None else getattr(dtype, "kind", "") == "f"
