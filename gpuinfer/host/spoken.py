"""What a stranger's exception or object says of itself: nothing that its `__str__` or `__repr__` does gets further.

Whoever puts into words what is not ours, in an error or a log, asks here: an exception that raises when it is formatted
would end those who only wanted to report it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LONGEST = 10_000  # characters


def said(thing: Any) -> str:
    """`str(thing)`, which can be encoded, and is cut where it is very long."""
    return _asked(str, thing)


def shown(thing: Any) -> str:
    """`repr(thing)`, likewise."""
    return _asked(repr, thing)


def kind_of(thing: Any) -> str:
    """The name of its class."""
    name: str = type.__dict__["__name__"].__get__(type(thing))  # a metaclass may have another
    return name


def in_full(error: BaseException) -> str:
    """Such as `ValueError: no such row`; of one that says nothing only `ValueError`."""
    text = said(error)
    return f"{kind_of(error)}: {text}" if text else kind_of(error)


def in_short(error: BaseException) -> str:
    """The same with the first line of what it says, if it says anything, and without its full stop."""
    first = (said(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{kind_of(error)}: {first}" if first else kind_of(error)


def _asked(way: Callable[[Any], str], thing: Any) -> str:
    try:
        text = str.__str__(way(thing))  # an exact str, whatever it derives from
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 (it may even leave)
        return f"<{kind_of(thing)} whose {way.__name__}() raises {kind_of(error)}>"
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"
    return text.encode("utf-8", "replace").decode()  # half a surrogate goes over no wire
