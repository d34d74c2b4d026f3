"""transformers as a second opinion, in a process of its own: neither its noise nor its end is ours."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import WorkError
from gpuinfer.host import children
from gpuinfer.verifying import peer_child
from gpuinfer.verifying.positions import Pieces, Tokens, piece
from gpuinfer.verifying.rig import Rig

LOAD_S, ANSWER_S, LEAVE_S = 900.0, 600.0, 3.0


OWN = ("nanogpt", "null")  # families that transformers has not


class PeerFailed(WorkError):
    """transformers did not do what was asked: that says nothing about us."""


class Peer:
    """A model and its tokenizer in transformers. Everything here raises `PeerFailed` when transformers fails, ends, or
    takes too long.
    """

    def __init__(self, channel: Connection, process: Any, size: int) -> None:
        self._channel, self._process, self._size = channel, process, size
        self._late = ""  # why nothing more is asked: an answer to an earlier question may still come

    def tokens(self, texts: Sequence[tuple[str, bool]], chats: Sequence[Any]) -> dict[str, Any]:
        """The tokens of texts, with special tokens or without, and of chats: see `peer_child`."""
        self._ask(do="tokens", texts=list(texts), chats=list(chats))
        return self.told(LOAD_S)

    def open(self, dtype: str) -> None:
        """Load the model in a number format."""
        self._ask(do="open", dtype=dtype)
        self.told(LOAD_S)

    def logits(self, dtype: str, tokens: Tokens) -> Pieces:
        """Float32 [positions, vocabulary], in pieces."""
        self._ask(do="logits", dtype=dtype, tokens=tokens.tolist())
        width = int(self.told(ANSWER_S)["vocabulary"])
        for _ in range(0, len(tokens), self._size):
            yield _rows(self._taken(ANSWER_S), width)

    def _ask(self, **request: Any) -> None:
        if self._late:
            raise PeerFailed(self._late)
        with suppress(OSError):  # it is gone: what comes next says so
            self._channel.send_bytes(json.dumps(request).encode())

    def told(self, seconds: float) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(self._taken(seconds))
        if "error" in said:
            raise PeerFailed(
                f"transformers failed: {said['error'].rstrip('.')}. Use --no-transformers to go without it."
            )
        return said

    def _taken(self, seconds: float) -> bytes:
        try:
            if not self._channel.poll(seconds):
                self._late = f"transformers took over {seconds:g} s. Use --no-transformers, or --limit 4."
                raise PeerFailed(self._late)
            return self._channel.recv_bytes()
        except (EOFError, ConnectionError) as error:
            self._process.join(LEAVE_S)
            raise PeerFailed(
                f"the process with transformers ended with code {self._process.exitcode}; there may be too little "
                "memory for a second model. Use --no-transformers to go without it."
            ) from error


def missing(rig: Rig) -> str | None:
    """Why there is nothing to compare with; None when there is."""
    if not rig.options.transformers:
        return "--no-transformers"
    if find_spec("transformers") is None:
        return "transformers is not installed"
    if rig.checkpoint.shape.family in OWN:
        return f"transformers has no {rig.checkpoint.shape.family} models"
    return None


@contextmanager
def opened(rig: Rig) -> Iterator[Peer]:
    """A process that has transformers, ended afterwards."""
    with tempfile.TemporaryDirectory(prefix="gpuinfer-verify-") as drafts:
        folder = rig.checkpoint.folder or _written(rig, Path(drafts) / "model")
        ours, theirs = multiprocessing.Pipe()
        size = piece(rig.checkpoint.shape.vocabulary)
        process = started(theirs, str(folder), rig.facts["device"], rig.threads, size)
        try:
            yield Peer(ours, process, size)
            ours.close()
            process.join(LEAVE_S)  # left to itself it ends when nobody listens any more
        finally:
            ours.close()
            children.end(process, LEAVE_S)


def started(channel: Connection, *arguments: Any) -> Any:
    """The process, which has the other end of the channel."""
    process = children.spawn(peer_child.main, channel, *arguments, name="gpuinfer-transformers", daemon=True)
    channel.close()
    return process


def _written(rig: Rig, folder: Path) -> Path:
    """A model that is no folder, as one."""
    from gpuinfer.text.checkpoint.export import save_folder

    save_folder(rig.checkpoint, folder)
    return folder


def _rows(raw: bytes, width: int) -> NDArray[np.float32]:
    return np.frombuffer(raw, np.float32).reshape(-1, width)
