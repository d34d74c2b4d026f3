"""Answers as they come: a stream's events are counted by their bytes, and few of them are ever parsed.

A sender that parsed a thousand streams' events would measure itself. An event's content matters only until the first
one that has some, and at the end, where the usage is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import msgspec

from gpuinfer.bench.serve.record import Record

EVENT = b"\ndata:"
TAIL = 16 << 10  # bytes of the end that are kept: the last events with content, usage and end


class Events:
    """The events of one stream. Tell it each part of the body with the time it came, and then `finish`."""

    __slots__ = ("_begun", "_edge", "_record", "_tail", "_times")

    def __init__(self, record: Record) -> None:
        self._record = record
        self._times = record.events = array("d")
        self._edge = b"\n"  # the end of what came before: an event's first bytes may come in two parts
        self._tail = b""
        self._begun = False

    def feed(self, at: float, data: bytes) -> None:
        tail = self._tail + data
        self._tail = tail[-TAIL:] if len(tail) > TAIL else tail
        window = self._edge + data
        count = window.count(EVENT)
        self._edge = window[1 - len(EVENT) :]
        if self._begun:
            for _ in range(count):
                self._times.append(at)
        elif b"\n" in data:
            self._look_for_content(at)

    def _look_for_content(self, at: float) -> None:
        """From the first event that has some on, all are counted: those without stand at the end."""
        whole = self._tail[: self._tail.rfind(b"\n") + 1]
        for before, line in enumerate(lines(whole)):
            if has_content(decoded(line)):
                self._begun = True
                self._record.first = at
                for _ in range((b"\n" + self._tail).count(EVENT) - before):
                    self._times.append(at)
                return

    def finish(self) -> None:
        """Take the events without content off the end, and read the usage or the error there."""
        record, trailing, done = self._record, 0, False
        for line in reversed(list(lines(self._tail))):
            if line == b"[DONE]":
                trailing, done = trailing + 1, True
                continue
            event = decoded(line)
            if event.get("error"):
                record.error = "error in the stream"
            usage = event.get("usage")
            if isinstance(usage, dict) and record.tokens is None:
                record.tokens, record.input_tokens = usage.get("completion_tokens"), usage.get("prompt_tokens")
            if has_content(event):
                break
            trailing += 1
        if self._begun and trailing:
            del self._times[max(1, len(self._times) - trailing) :]
        record.last = self._times[-1] if self._times else 0.0
        if not done and record.error is None:
            record.error = "stream cut off"


def lines(data: bytes) -> Iterator[bytes]:
    """What follows `data:` in each whole line; a first line whose beginning is gone is none."""
    for line in data.split(b"\n"):
        if line.startswith(b"data:"):
            yield line[5:].strip()


def decoded(data: bytes) -> dict[str, Any]:
    """A JSON object; what is none is empty."""
    try:
        found = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def has_content(event: dict[str, Any]) -> bool:
    """Whether any of its choices says something."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta")
        if delta is None:
            if choice.get("text"):
                return True
        elif any(value for name, value in delta.items() if name != "role"):
            return True
    return False


def read_whole(record: Record, body: bytes) -> None:
    """The usage of an answer that came at once; anything else is an error."""
    answer = decoded(body)
    usage = answer.get("usage")
    if isinstance(usage, dict):
        record.tokens, record.input_tokens = usage.get("completion_tokens"), usage.get("prompt_tokens")
    if not answer.get("choices"):
        record.error = "no answer in the body"
