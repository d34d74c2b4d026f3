"""What a trainer over HTTP says, and what it is answered: JSON, or msgpack where it says so."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from gpuinfer.errors import UsageError
from gpuinfer.http.exchange import Exchange
from gpuinfer.rollouts.record import Group

JSON, MSGPACK = "application/json", "application/msgpack"
MOST_GROUPS = 1 << 16

Logprobs = dict[str, list[list[float]]]
Metrics = Annotated[dict[str, float], Meta(max_length=256)]
Number = Annotated[int, Meta(ge=0, le=1 << 53)]
Seconds = Annotated[float, Meta(ge=0)]


class Told(Struct, forbid_unknown_fields=True, kw_only=True):
    """What each request may say of the batch that is done."""

    version: Number | None = None  # of the trainer's weights now
    logprobs: Logprobs | None = None  # as in `Trained.logprobs`
    metrics: Metrics = {}


class Taking(Told, forbid_unknown_fields=True, kw_only=True):
    """The body of `take`."""

    groups: Annotated[int, Meta(ge=1, le=MOST_GROUPS)] | None = (
        None  # None: as many as the run's batches have, and no more
    )
    wait_s: Seconds = 0.0  # a minute at most counts
    done: Number | None = None  # the batch that was taken before, and is trained on


class Done(Told, forbid_unknown_fields=True, kw_only=True):
    """The body of `ack`."""

    batch: Number


class Updating(Told, forbid_unknown_fields=True, kw_only=True):
    """The body of `update`, which names a version."""

    weights: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None  # a path, as the run's machine has it
    adapter: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    batch: Number | None = None  # that is done


class Given(Struct, kw_only=True):
    """What `take` answers. Without a batch: ask again, unless it is over."""

    batch: int | None
    version: int
    step: int | None = None
    again: bool = False  # it was given before, and nobody has said that it is done
    groups: tuple[Group, ...] = ()
    over: bool = False  # nothing more will come
    waits_for: str | None = None  # "rollouts", or "version": no more groups are begun before the weights are newer


T = TypeVar("T", bound=Struct)


def read(exchange: Exchange, wanted: type[T]) -> T:
    """The body of a request; an empty one says nothing. Raises `UsageError`."""
    body = exchange.body or b"{}"
    packed = bool(exchange.body) and exchange.headers.get("content-type", "").startswith(MSGPACK)
    try:
        return msgspec.msgpack.decode(body, type=wanted) if packed else msgspec.json.decode(body, type=wanted)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        form = "msgpack" if packed else "one JSON object"
        fields = ", ".join(wanted.__struct_fields__)
        raise UsageError(f"{error}. Send {form} with some of {fields}.") from None


def answer(exchange: Exchange, said: Any) -> tuple[bytes, str]:
    """The body and its type, in the form that the request accepts."""
    if MSGPACK in exchange.headers.get("accept", ""):
        return msgspec.msgpack.encode(said), MSGPACK
    return msgspec.json.encode(said), JSON
