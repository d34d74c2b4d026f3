"""One line for each request: who asked what, what it was answered, and what it cost; for people, or as JSON."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuinfer.http.exchange import Exchange

log = logging.getLogger("gpuinfer.requests")
UNIX = "unix"  # the peer of a fleet's own application: the router, which logs the request itself
GONE = 499  # in place of a status, as nginx writes it: the client went away before its answer
LONGEST = 200  # characters of a path
LONGEST_REASON = 1000  # and of why a request was refused, which may repeat what a client wrote


def of_exchange(exchange: Exchange) -> None:
    """Log a request that is over. What is asked again and again, such as /health, is left to -vv."""
    level = logging.DEBUG if exchange.routine and "refused" not in exchange.notes else logging.INFO
    if log.isEnabledFor(level) and exchange.peer != UNIX:
        took_s = time.monotonic() - exchange.began
        write(level, exchange.method, exchange.path, exchange.status or GONE, took_s, exchange.peer, exchange.notes)


def of_nobody(peer: str, status: int, why: str) -> None:
    """Log what could not be read as a request."""
    write(logging.INFO, "", "", status, 0.0, peer, {"refused": why})


def write(
    level: int, method: str, path: str, status: int, took_s: float, peer: str, notes: Mapping[str, object]
) -> None:
    """`notes`, as far as they are known: id, trace, key (its name), model, input_tokens, output_tokens, replica, and
    refused (why). A path comes without its query, which may hold what is private.
    """
    if not log.isEnabledFor(level):
        return
    fields: dict[str, object] = {"method": method, "path": path[:LONGEST], "status": status}
    fields |= {"took_ms": round(1e3 * took_s, 1), "peer": peer, **notes}
    if "refused" in fields:
        fields["refused"] = str(fields["refused"])[:LONGEST_REASON]
    log.log(level, "%s", _Line(fields), extra={"request": fields})


class _Line:
    """The fields for people, put together only where people read them."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        self._fields = fields

    def __str__(self) -> str:
        fields = self._fields
        asked = f"{fields['method']} {fields['path']}" if fields["method"] else "no request"
        parts = [f"{asked} {fields['status']} in {fields['took_ms']:.1f} ms"]
        if "output_tokens" in fields:
            parts.append(f"{fields.get('input_tokens', '?')}+{fields['output_tokens']} tokens")
        named = ("model", "key", "replica", "id", "trace")
        parts += [f"{name} {fields[name]}" for name in named if fields.get(name) is not None]
        parts.append(f"from {fields['peer']}")
        if fields.get("refused"):
            parts[-1] += f": {' '.join(str(fields['refused']).split())}"
        said = ", ".join(parts)  # of which a client has chosen some
        return "".join(one if one.isprintable() else "?" for one in said)


class JsonLines(logging.Formatter):
    """A line of JSON for each message: time, level, and a request's fields or the message."""

    def format(self, record: logging.LogRecord) -> str:
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        told: dict[str, Any] = {"time": f"{second}.{int(record.msecs):03}Z", "level": record.levelname.lower()}
        request = getattr(record, "request", None)
        told |= {"message": record.getMessage()} if request is None else request
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)
