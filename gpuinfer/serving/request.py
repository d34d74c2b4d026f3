"""The context of one request beside its prompt (id, class, deadline, client, trace), the bounds that requests are
checked against first, and errors as responses: status, OpenAI's shape, Retry-After. Internal details stay in the log.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gpuinfer.api import Priority
from gpuinfer.errors import BackendDied, BadPrompt, BadResult, Closed, Expired, GpuinferError, QueueFull, RequestError
from gpuinfer.generation import Constraint, Prompt
from gpuinfer.host import error_text
from gpuinfer.host.error_text import nearest_error_type
from gpuinfer.http.http_exchange import CREATED, error_body
from gpuinfer.serving.openai.requests import BadRequest
from gpuinfer.serving.openai.responses import error_of, status_of
from gpuinfer.serving.telemetry.spans import NO_SPAN, RequestSpan

CLASSES = {"high": Priority.HIGH, "normal": Priority.NORMAL, "low": Priority.LOW}
PLAIN = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")  # an id that can stand in a header and a log
TRACE = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")  # W3C Trace Context, version 00 and on
MOST_S = 86_400.0  # of a deadline

_prefix, _numbers = secrets.token_hex(6), itertools.count(1)


@dataclass(slots=True)
class RequestContext:
    """One request's context. `begun`: bytes at the body's beginning that tell what the client has been sent already."""

    id: str
    priority: Priority = Priority.NORMAL
    timeout_s: float = math.inf
    client: str | None = None
    traceparent: str | None = None
    created: int | None = None  # when its first attempt was begun, in seconds since 1970
    begun: int = 0
    span: RequestSpan = NO_SPAN


def request_context(headers: Mapping[str, str], behind_router: bool) -> RequestContext:
    """From the headers. Raises `BadRequest` for a wrong class or deadline. A router's headers count only behind one."""
    given = headers.get("x-request-id")
    asking = RequestContext(given if given is not None and PLAIN.fullmatch(given) else new_id())
    if (name := headers.get("x-gpuinfer-priority")) is not None:
        if name not in CLASSES:
            words = ", ".join(CLASSES)
            raise BadRequest(f"X-Gpuinfer-Priority is none of {words}. Write one of them, or leave it out.")
        asking.priority = CLASSES[name]
    if (text := headers.get("x-gpuinfer-timeout")) is not None:
        try:
            asking.timeout_s = float(text)
        except ValueError:
            asking.timeout_s = math.nan
        if not 0 < asking.timeout_s <= MOST_S:
            raise BadRequest(
                f"X-Gpuinfer-Timeout is no number of seconds from 0 to {MOST_S:,.0f}. Write one, such as 30."
            )
    if (client := headers.get("x-gpuinfer-client")) is not None and PLAIN.fullmatch(client):
        asking.client = client
    if (trace := headers.get("traceparent")) is not None and len(trace) <= 128 and TRACE.fullmatch(trace):
        asking.traceparent = trace
    if behind_router:
        asking.created = _whole(headers, CREATED)
        asking.begun = _whole(headers, "x-gpuinfer-begun") or 0
    return asking


def resumed_bytes(headers: Mapping[str, str], behind_router: bool) -> int:
    """The bytes before a body (`RequestContext.begun`); 0 where the header is missing or no number."""
    text = headers.get("x-gpuinfer-begun", "") if behind_router else ""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 15 else 0


def new_id() -> str:
    """A unique id that cannot be guessed from outside."""
    return f"{_prefix}-{next(_numbers):x}"


def _whole(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 15):
        raise BadRequest(f"{name} is no whole number. Leave it out.")
    return int(text)


MOST_PROMPTS = 256  # in one request for completions
MOST_PATTERN = 32 << 10  # characters of a regular expression
MOST_GRAMMAR = 128 << 10  # of a grammar
MOST_NODES = 20_000  # values in a JSON schema
MOST_DEPTH = 64  # of its nesting
MOST_VALUE = 1_000  # characters of a template's argument
TEMPLATE_ARGUMENTS = frozenset(
    ("enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "preserve_thinking", "date_string", "today")
)
"""The arguments of a chat template that clients may give: models read these; others mean whatever a template likes."""


def check_request(prompt: Prompt, widest: int) -> None:
    """Raises `BadRequest`, which names the field. `widest`: the most rows of one request."""
    if prompt.samples > widest:
        raise BadRequest(
            f"`n` is {prompt.samples}, and {widest} answers at once are the most here. Ask for fewer.", "n"
        )
    for name, value in prompt.rendering.variables.items():
        if name not in TEMPLATE_ARGUMENTS:
            known = ", ".join(sorted(TEMPLATE_ARGUMENTS))
            why = f"`{name[:60]}` is no argument of a chat template that may be given here. Choose from {known}."
            raise BadRequest(why, "chat_template_kwargs")
        if not isinstance(value, bool | int | float | str | None) or len(str(value)) > MOST_VALUE:
            why = f"`{name}` is no plain value of at most {MOST_VALUE} characters."
            raise BadRequest(f"{why} Give a text, a number, true or false.", "chat_template_kwargs")
    wanted = prompt.sampling.constraint or Constraint()
    for what, text, most in (("pattern", wanted.regex, MOST_PATTERN), ("grammar", wanted.grammar, MOST_GRAMMAR)):
        if text is not None and len(text) > most:
            raise BadRequest(f"a {what} of {len(text):,} characters; {most:,} are the most. Shorten it.")
    level: list[Any] = [wanted.json_schema]
    seen = depth = 0
    while level:  # level by level, so that no schema is too deep for the check itself
        seen, depth = seen + len(level), depth + 1
        if seen > MOST_NODES:
            raise BadRequest(f"a JSON schema of more than {MOST_NODES:,} values. Make it smaller.", "response_format")
        if depth > MOST_DEPTH:
            raise BadRequest(f"a JSON schema nested more than {MOST_DEPTH} deep. Make it flatter.", "response_format")
        containers = [value for value in level if isinstance(value, Mapping | list)]
        level = [one for value in containers for one in (value.values() if isinstance(value, Mapping) else value)]


log = logging.getLogger(__name__)

encode = msgspec.json.Encoder().encode
DRAINING = "this server is shutting down, and takes no new requests. Ask again, or ask another."
STARTING = "this server is still loading its model. Ask again in a moment."
MOST_RETRY_S = 60
FAILED_HERE = "the model failed at this request. The server's log says why, under the request's id {id}."
SAID = (BadPrompt, Expired, QueueFull, Closed)  # errors whose message is for the client


class NoSuchModel(BadPrompt):
    """A model by a name that is not served here."""


class Unavailable(Closed):
    """The server takes no requests: it still loads its model, or drains."""


class ErrorResponse:
    """One error as a response, in OpenAI's shape: what is internal is written to the log, under the request's id."""

    __slots__ = ("body", "headers", "message", "status")

    def __init__(
        self, error: BaseException, request_id: str, retry_s: float | None = None, model: str | None = None
    ) -> None:
        """`model`: its name, where the request has reached one. Status 422: the model's answer is invalid."""
        plain = type(error) is RequestError  # more rows than a batch takes, an unknown class
        self.status = status_of(error) if isinstance(error, GpuinferError) else 500
        if isinstance(error, NoSuchModel):
            self.status, body = 404, error_body(str(error), "invalid_request_error", "model", "model_not_found")
        elif isinstance(error, SAID) or plain:
            ours = error if isinstance(error, SAID) else BadPrompt(str(error))
            self.status, body = status_of(ours), error_of(ours)
        else:
            what = error_text.type_name(error), error_text.safe_str(error)
            log.warning("request %s failed: %s: %s", request_id, *what)
            if isinstance(error, BadResult):
                why = "the model's answer to this holds NaN or +inf, or has the wrong shape."
                why = f"{why} Check the values that were sent."
                self.status, body = 422, error_body(why, "invalid_request_error", None, "no_answer")
            elif isinstance(error, BackendDied):
                which = "the model" if model is None else f"the model '{model}'"
                why = f"{which} behind this server is gone. Ask again in a while, or another server."
                body = error_body(why, "overloaded_error")
            else:
                body = error_body(FAILED_HERE.format(id=request_id), "server_error")
        self.body, self.message = encode(body), str(body["error"]["message"])
        self.headers: list[tuple[str, str]] = []
        if isinstance(error, GpuinferError) and (name := nearest_error_type(error)):
            self.headers.append(("X-Gpuinfer-Error", name))  # by which another process of ours makes it again
        if self.status in (429, 503):  # after what the strategy says, or else the queue's rate
            seconds = getattr(error, "retry_after_s", None)
            seconds = retry_s if seconds is None else seconds
            finite_s = 1.0 if seconds is None or not math.isfinite(seconds) else seconds
            self.headers.append(("Retry-After", str(max(1, min(MOST_RETRY_S, math.ceil(finite_s))))))


def plain_headers(request_id: str, more: Sequence[tuple[str, str]] = ()) -> list[tuple[str, str]]:
    """The headers of every response."""
    return [("X-Request-Id", request_id), *more]
