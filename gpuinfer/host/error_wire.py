"""Errors as plain values, from one process to another: the nearest of our own types, and the message."""

from __future__ import annotations

from gpuinfer import errors
from gpuinfer.errors import GpuinferError


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
