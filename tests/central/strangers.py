"""A hand-made end of the server's protocol: says what no client of ours would, and counts every reply."""

from __future__ import annotations

import os
import socket
from typing import Any

import numpy as np

from gpuinfer.central.blocks import Block, BlockForm
from gpuinfer.central.protocol import HEADER, RecordKind, Unpacker, WireRecord, hello, pack_record
from gpuinfer.host import shared_memory


class Stranger:
    """One line to a server. Every wait has an end."""

    def __init__(self, server: Any, greet: bool = True, seconds: float = 60.0, client: bytes = b"") -> None:
        self.address = server.address
        self.line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.line.settimeout(seconds)
        self.line.connect(self.address.path)
        self.unpacker, self.records, self.blocks = Unpacker(), [], {}
        if greet or client:
            self.send(hello(self.address.token, client or os.urandom(16)))
        if greet:
            self.welcomed()

    def welcomed(self) -> None:
        """Wait until the server has let it in."""
        self.form = BlockForm.from_wire(self.next().body["form"])

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.line.close()

    def send(self, record: WireRecord, *descriptors: int) -> None:
        self.raw(pack_record(record), *descriptors)

    def raw(self, data: bytes, *descriptors: int) -> None:
        """Send bytes; a server that has hung up already is not an error."""
        try:
            if descriptors:
                socket.send_fds(self.line, [data], descriptors)
            else:
                self.line.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def present(self, number: int, rows: int) -> Block:
        """A block as it should be."""
        descriptor, mapping = shared_memory.create(self.form.size(rows))
        self.send(WireRecord(RecordKind.BLOCK, block=number, rows=rows), descriptor)
        os.close(descriptor)
        block = self.blocks[number] = Block(number, rows, mapping, self.form)
        return block

    def ask(self, number: int, block: int, payload: np.ndarray, left_s: float = float("inf"), **fields: Any) -> None:
        self.blocks[block].rows[: len(payload)] = payload
        self.send(WireRecord(RecordKind.ASK, block=block, number=number, rows=len(payload), left_s=left_s, **fields))

    def next(self) -> WireRecord:
        """The server's next record. Raises `EOFError` when it has hung up, `TimeoutError` when it says nothing."""
        while not self.records:
            try:
                data = self.line.recv(1 << 16)
            except ConnectionResetError:
                data = b""
            if not data:
                raise EOFError
            self.records += self.unpacker.feed(data)
        return self.records.pop(0)

    def dropped(self) -> bool:
        """Whether the server hangs up, whatever it says before. Waits for it."""
        try:
            while True:
                self.next()
        except EOFError:
            return True
        except TimeoutError:
            return False


def header(kind: int, *, block: int = 0, number: int = 0, rows: int = 0, body: int = 0, left_s: float = 0.0) -> bytes:
    """The fixed part of a record, with whatever numbers in it."""
    return HEADER.pack(kind, 0, block, number, 0, rows, body, left_s)
