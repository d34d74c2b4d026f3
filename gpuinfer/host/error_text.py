"""The text of exceptions and objects that are not ours, safely, and errors as plain values that travel between
processes. Nothing that a foreign `__str__` or `__repr__` does gets further than here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpuinfer import errors
from gpuinfer.errors import BackendError, GpuinferError, QueueFull

LONGEST_TEXT = 10_000  # characters


def safe_str(thing: Any) -> str:
    """`str(thing)`, which can be encoded, and is cut where it is very long."""
    return _guarded(str, thing)


def safe_repr(thing: Any) -> str:
    """`repr(thing)`, likewise."""
    return _guarded(repr, thing)


def type_name(thing: Any) -> str:
    """The name of its class."""
    name: str = type.__dict__["__name__"].__get__(type(thing))  # a metaclass may have another
    return name


def full_message(error: BaseException) -> str:
    """Such as `ValueError: no such row`; of one that says nothing only `ValueError`."""
    text = safe_str(error)
    return f"{type_name(error)}: {text}" if text else type_name(error)


def short_message(error: BaseException) -> str:
    """The same with the first line of what it says, if it says anything, and without its full stop."""
    first = (safe_str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type_name(error)}: {first}" if first else type_name(error)


def _guarded(way: Callable[[Any], str], thing: Any) -> str:
    try:
        text = str.__str__(way(thing))  # an exact str, whatever it derives from
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 (it may even leave)
        return f"<{type_name(thing)} whose {way.__name__}() raises {type_name(error)}>"
    if len(text) > LONGEST_TEXT:
        text = f"{text[: LONGEST_TEXT // 2]} … {text[-LONGEST_TEXT // 2 :]}"
    return text.encode("utf-8", "replace").decode()  # half a surrogate goes over no wire


LONGEST_MESSAGE = 2_000  # characters of an error's text


def error_to_wire(error: GpuinferError) -> dict[str, Any]:
    """{type, message, retry_after_s?}"""
    message = safe_str(error)
    if len(message) > LONGEST_MESSAGE:
        message = f"{message[: LONGEST_MESSAGE // 2]} … {message[-LONGEST_MESSAGE // 2 :]}"
    wire: dict[str, Any] = {"type": nearest_error_type(error) or "BackendError", "message": message}
    retry_after_s = getattr(error, "retry_after_s", None)
    return wire if retry_after_s is None else {**wire, "retry_after_s": retry_after_s}


def error_from_wire(told: Mapping[str, Any]) -> GpuinferError:
    """The error, as far as what has come tells it."""
    message = str(told.get("message", "it did not say why"))
    error = rebuilt_error(str(told.get("type", "")), message) or BackendError(message)
    if isinstance(error, QueueFull) and isinstance(after := told.get("retry_after_s"), int | float):
        error.retry_after_s = float(after)
    return error


def nearest_error_type(error: BaseException) -> str | None:
    """The name of the most special of our own types that the error is of; None when it is none of ours."""
    ours = (kind.__name__ for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
    return next(ours, None)


def rebuilt_error(name: str, message: str) -> GpuinferError | None:
    """The error of ours that `nearest` named; None for any other name."""
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, GpuinferError)):
        return None
    error: GpuinferError = kind.__new__(kind)
    GpuinferError.__init__(error, message)  # some of ours build their message from other arguments
    return error
