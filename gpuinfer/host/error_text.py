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
    """`str(thing)`, in encodable characters, cut where it is very long."""
    return _guarded(str, thing)


def safe_repr(thing: Any) -> str:
    """`repr(thing)`, likewise."""
    return _guarded(repr, thing)


def type_name(thing: Any) -> str:
    name: str = type.__dict__["__name__"].__get__(type(thing))  # a metaclass may have another
    return name


def full_message(error: BaseException) -> str:
    """Such as `ValueError: no such row`; only `ValueError` without a message."""
    text = safe_str(error)
    return f"{type_name(error)}: {text}" if text else type_name(error)


def short_message(error: BaseException) -> str:
    """`full_message` with the first line of the message alone, without its full stop."""
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


def error_from_wire(wire: Mapping[str, Any]) -> GpuinferError:
    """The inverse of `error_to_wire`; `BackendError` for an unknown type."""
    message = str(wire.get("message", "it did not say why"))
    error = rebuilt_error(str(wire.get("type", "")), message) or BackendError(message)
    if isinstance(error, QueueFull) and isinstance(after := wire.get("retry_after_s"), int | float):
        error.retry_after_s = float(after)
    return error


def nearest_error_type(error: BaseException) -> str | None:
    """The name of the error's most special type among ours; None for a foreign error."""
    ours = (kind.__name__ for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
    return next(ours, None)


def rebuilt_error(name: str, message: str) -> GpuinferError | None:
    """An error of the type that `nearest_error_type` named; None for any other name."""
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, GpuinferError)):
        return None
    error: GpuinferError = kind.__new__(kind)
    GpuinferError.__init__(error, message)  # some of ours build their message from other arguments
    return error
