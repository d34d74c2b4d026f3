"""`POST /profile`: a profile of this server's process, for so many seconds, as its answer. It needs the admin key,
since it slows the server down.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from gpuinfer.engine.profiler import Profile
from gpuinfer.errors import UsageError
from gpuinfer.http.http_exchange import Exchange
from gpuinfer.http.route_table import Route

MOST_S = 30.0
MOST_BYTES = 512 << 20  # of a trace that is sent
PATH = "/profile"
SUMMARY = "A profile of the next seconds: a Chrome trace of torch's operations and the lanes' stations."


class ProfileBody(Struct, forbid_unknown_fields=True):
    """The body of `POST /profile`."""

    seconds: Annotated[float, Meta(gt=0, le=MOST_S)] = 2.0
    worker: int | None = None  # which replica of a fleet


def profile_body(body: bytes) -> ProfileBody:
    """Raises `UsageError`."""
    try:
        return msgspec.json.decode(body or b"{}", type=ProfileBody)
    except (ValueError, RecursionError) as error:
        raise UsageError(f'{error}. Send {{"seconds": 2}}, of at most {MOST_S:g}, or nothing.') from None


async def profile(exchange: Exchange) -> None:
    """Answers with the trace; 409 while another profile is made."""
    try:
        body = profile_body(exchange.body)
    except UsageError as error:
        exchange.refuse(400, str(error))
        return
    made = Profile()
    try:
        made.start()
    except UsageError as error:
        exchange.refuse(409, str(error), [("Retry-After", "5")])
        return
    try:
        await asyncio.sleep(body.seconds)
    finally:
        made.stop()
    content = await asyncio.to_thread(_written, made)
    if content is None:
        exchange.refuse(413, f"the trace has more than {MOST_BYTES >> 20} MB. Ask for fewer seconds.")
        return
    named = [("Content-Disposition", f'attachment; filename="gpuinfer-{os.getpid()}.trace.json"')]
    exchange.respond(200, content, headers=named)


def _written(made: Profile) -> bytes | None:
    """None: there is too much of it."""
    with tempfile.TemporaryDirectory(prefix="gpuinfer-profile-") as folder:
        path = Path(folder, "trace.json")
        made.write(path)
        return path.read_bytes() if path.stat().st_size <= MOST_BYTES else None


def profile_route() -> Route:
    """The route of a replica."""
    trace = {"200": {"description": "The trace.", "content": {"application/json": {"schema": {"type": "object"}}}}}
    conflict = {"409": {"description": "Another profile is being made."}}
    return Route("POST", PATH, profile, "admin", SUMMARY, {"body": ProfileBody, "responses": {**trace, **conflict}})
