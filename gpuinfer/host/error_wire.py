"""Errors as plain values, from one process to another: the nearest of our own types, and the message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuinfer import errors
from gpuinfer.errors import BackendError, GpuinferError, QueueFull
from gpuinfer.host import spoken

LONGEST_MESSAGE = 2_000  # characters of an error's text


def error_to_wire(error: GpuinferError) -> dict[str, Any]:
    """{type, message, retry_after_s?}"""
    message = spoken.said(error)
    if len(message) > LONGEST_MESSAGE:
        message = f"{message[: LONGEST_MESSAGE // 2]} … {message[-LONGEST_MESSAGE // 2 :]}"
    wire: dict[str, Any] = {"type": nearest(error) or "BackendError", "message": message}
    retry_after_s = getattr(error, "retry_after_s", None)
    return wire if retry_after_s is None else {**wire, "retry_after_s": retry_after_s}


def error_from_wire(told: Mapping[str, Any]) -> GpuinferError:
    """The error, as far as what has come tells it."""
    message = str(told.get("message", "it did not say why"))
    error = rebuilt(str(told.get("type", "")), message) or BackendError(message)
    if isinstance(error, QueueFull) and isinstance(after := told.get("retry_after_s"), int | float):
        error.retry_after_s = float(after)
    return error


def nearest(error: BaseException) -> str | None:
    """The name of the most special of our own types that the error is of; None when it is none of ours."""
    ours = (kind.__name__ for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
    return next(ours, None)


def rebuilt(name: str, message: str) -> GpuinferError | None:
    """The error of ours that `nearest` named; None for any other name."""
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, GpuinferError)):
        return None
    error: GpuinferError = kind.__new__(kind)
    GpuinferError.__init__(error, message)  # some of ours build their message from other arguments
    return error
