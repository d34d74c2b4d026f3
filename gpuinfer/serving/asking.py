"""What a request's headers say of it, beside its body."""

from __future__ import annotations

import itertools
import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from gpuinfer.api import Priority
from gpuinfer.openai.requests import BadRequest
from gpuinfer.serving.spans import NO_SPAN, Span

CLASSES = {"high": Priority.HIGH, "normal": Priority.NORMAL, "low": Priority.LOW}
PLAIN = re.compile(
    r"[A-Za-z0-9._:@/+=-]{1,128}"
)  # what an id may consist of, so that it can stand in a header and a log
TRACE = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")  # W3C Trace Context, version 00 and on
MOST_S = 86_400.0  # of a deadline

_prefix, _numbers = secrets.token_hex(6), itertools.count(1)


@dataclass(slots=True)
class Asking:
    """One request's own. `begun`: so many bytes at the body's beginning say what its client has been sent already."""

    id: str
    priority: Priority = Priority.NORMAL
    timeout_s: float = math.inf
    client: str | None = None
    traceparent: str | None = None
    created: int | None = None  # when its first attempt was begun, in seconds since 1970
    begun: int = 0
    span: Span = NO_SPAN


def asking_of(headers: Mapping[str, str], behind_router: bool) -> Asking:
    """Raises `BadRequest` for a class or a deadline that is none. What only a router may say counts only behind one."""
    given = headers.get("x-request-id")
    asking = Asking(given if given is not None and PLAIN.fullmatch(given) else new_id())
    if (name := headers.get("x-gpuinfer-priority")) is not None:
        asking.priority = _priority(name)
    if (text := headers.get("x-gpuinfer-timeout")) is not None:
        asking.timeout_s = _seconds(text)
    if (client := headers.get("x-gpuinfer-client")) is not None and PLAIN.fullmatch(client):
        asking.client = client
    if (trace := headers.get("traceparent")) is not None and len(trace) <= 128 and TRACE.fullmatch(trace):
        asking.traceparent = trace
    if behind_router:
        asking.created = _whole(headers, "x-gpuinfer-created")
        asking.begun = _whole(headers, "x-gpuinfer-begun") or 0
    return asking


def bytes_begun(headers: Mapping[str, str], behind_router: bool) -> int:
    """How many bytes stand before a body (`Asking.begun`); 0 where that is not told, or is no number."""
    text = headers.get("x-gpuinfer-begun", "") if behind_router else ""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 15 else 0


def new_id() -> str:
    """Not to be guessed from outside, and never twice."""
    return f"{_prefix}-{next(_numbers):x}"


def _priority(name: str) -> Priority:
    if name not in CLASSES:
        raise BadRequest(f"X-Gpuinfer-Priority is none of {', '.join(CLASSES)}. Write one of them, or leave it out.")
    return CLASSES[name]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MOST_S:
        raise BadRequest(f"X-Gpuinfer-Timeout is no number of seconds from 0 to {MOST_S:,.0f}. Write one, such as 30.")
    return seconds


def _whole(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 15):
        raise BadRequest(f"{name} is no whole number. Leave it out.")
    return int(text)
