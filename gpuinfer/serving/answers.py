"""Errors as responses: the status, OpenAI's shape, when to come again. What is internal stays in the log."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from gpuinfer.errors import BackendDied, BadPrompt, BadResult, Closed, Expired, GpuinferError, QueueFull, RequestError
from gpuinfer.host import spoken
from gpuinfer.host.error_wire import nearest
from gpuinfer.openai.responses import error_body, error_of, status_of

log = logging.getLogger(__name__)

encode = msgspec.json.Encoder().encode
DRAINING = "this server is shutting down, and takes no new requests. Ask again, or ask another."
STARTING = "this server is still loading its model. Ask again in a moment."
MOST_RETRY_S = 60
SAID = (BadPrompt, Expired, QueueFull, Closed)  # whose words are for the client


class NoSuchModel(BadPrompt):
    """A model by a name that is not served here."""


class Unavailable(Closed):
    """Nothing new is taken: not yet, or not any more."""


class Refused:
    """One error as a response."""

    __slots__ = ("body", "headers", "message", "status")

    def __init__(
        self, error: BaseException, request_id: str, retry_s: float | None = None, model: str | None = None
    ) -> None:
        """`model`: by its name, where one has been asked."""
        ours = error if isinstance(error, GpuinferError) else None
        self.status = status(error)
        body = told(error, request_id, model)
        self.body, self.message = encode(body), str(body["error"]["message"])
        self.headers: list[tuple[str, str]] = []
        if ours is not None and (name := nearest(ours)):
            self.headers.append(("X-Gpuinfer-Error", name))  # by which another process of ours makes it again
        if self.status in (429, 503):
            self.headers.append(("Retry-After", str(seconds_to_wait(error, retry_s))))


def status(error: BaseException) -> int:
    """422: what was asked can be understood, and the model's answer to it is no answer."""
    if isinstance(error, NoSuchModel):
        return 404
    if isinstance(error, BadResult):
        return 422
    if type(error) is RequestError:  # more rows than a batch takes, a class that is none
        return 400
    return status_of(error) if isinstance(error, GpuinferError) else 500


def told(error: BaseException, request_id: str, model: str | None = None) -> dict[str, Any]:
    """The body, in OpenAI's shape. What may name something internal is written to the log, under the request's id."""
    if isinstance(error, NoSuchModel):
        return error_body(str(error), "invalid_request_error", "model", "model_not_found")
    if isinstance(error, SAID) or type(error) is RequestError:
        ours = error if type(error) is not RequestError else BadPrompt(str(error))
        return error_of(ours)
    log.warning("request %s failed: %s: %s", request_id, spoken.kind_of(error), spoken.said(error))
    if isinstance(error, BadResult):
        why = "the model's answer to this holds NaN or +inf, or has the wrong shape. Check the values that were sent."
        return error_body(why, "invalid_request_error", None, "no_answer")
    if isinstance(error, BackendDied):
        which = "the model" if model is None else f"the model '{model}'"
        why = f"{which} behind this server is gone. Ask again in a while, or another server."
        return error_body(why, "overloaded_error")
    why = f"the model failed at this request. The server's log says why, under the request's id {request_id}."
    return error_body(why, "server_error")


def seconds_to_wait(error: BaseException, otherwise: float | None) -> int:
    """Whole seconds for Retry-After: what the strategy said, or what the queue's rate says."""
    said = getattr(error, "retry_after_s", None)
    seconds = said if said is not None else otherwise
    if seconds is None or not math.isfinite(seconds):
        return 1
    return max(1, min(MOST_RETRY_S, math.ceil(seconds)))


def plain_headers(request_id: str, more: Sequence[tuple[str, str]] = ()) -> list[tuple[str, str]]:
    """What every response of ours says."""
    return [("X-Request-Id", request_id), *more]
