"""Messages between the router's owner and its processes: msgpack over a socket pair, each after its length."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

LARGEST = 16 << 20
_LENGTH = struct.Struct("<I")


class Frames(asyncio.Protocol):
    """One end. The other end's messages are plain values."""

    def __init__(self, on_message: Callable[[Mapping[str, Any]], None], on_lost: Callable[[], None]) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._transport = cast(asyncio.Transport, None)
        self._part = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, message: Any) -> None:
        """What is sent after the other end is gone is lost."""
        if not self._transport.is_closing():
            packed = msgspec.msgpack.encode(message)
            self._transport.write(_LENGTH.pack(len(packed)) + packed)

    def data_received(self, data: bytes) -> None:
        data = self._part + data
        at = 0
        while len(data) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(data, at)
            if size > LARGEST:
                self._transport.abort()
                return
            end = at + _LENGTH.size + size
            if end > len(data):
                break
            self._on_message(msgspec.msgpack.decode(data[at + _LENGTH.size : end]))
            at = end
        self._part = data[at:]

    def close(self) -> None:
        self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._on_lost()
