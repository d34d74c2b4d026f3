"""transformers as a second opinion, in a process of its own: neither its noise nor its end is ours."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer import children
from gpuinfer.errors import WorkError
from gpuinfer.verifying import peer_child
from gpuinfer.verifying.positions import Pieces, Tokens, piece
from gpuinfer.verifying.rig import Rig

LOAD_S, ANSWER_S, LEAVE_S = 900.0, 600.0, 3.0


OWN = ("nanogpt", "null")  # families that transformers has not


class PeerFailed(WorkError):
    """transformers did not do what was asked: that says nothing about us."""


class Peer:
    """A model in transformers. `logits` are float32 [positions, vocabulary], in pieces."""

    def __init__(self, channel: Connection, process: Any, size: int) -> None:
        self._channel, self._process, self._size = channel, process, size

    def logits(self, tokens: Tokens) -> Pieces:
        """Raises `PeerFailed` when transformers fails, ends, or takes too long."""
        self._channel.send_bytes(json.dumps(tokens.tolist()).encode())
        width = int(self.told(ANSWER_S)["vocabulary"])
        for _ in range(0, len(tokens), self._size):
            yield _rows(self._taken(ANSWER_S), width)

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
                raise PeerFailed(f"transformers took over {seconds:g} s. Use --no-transformers, or --limit 4.")
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
    """A process with the model, ended afterwards."""
    with tempfile.TemporaryDirectory(prefix="gpuinfer-verify-") as drafts:
        folder = rig.checkpoint.folder or _written(rig, Path(drafts) / "model")
        ours, theirs = multiprocessing.Pipe()
        size = piece(rig.checkpoint.shape.vocabulary)
        arguments = (theirs, str(folder), rig.setup.dtype, rig.facts["device"], rig.threads, size)
        process = multiprocessing.get_context("spawn").Process(
            target=peer_child.main, args=arguments, name="gpuinfer-transformers", daemon=True
        )
        with children.deaf():
            process.start()
        theirs.close()
        peer = Peer(ours, process, size)
        try:
            peer.told(LOAD_S)
            yield peer
            ours.close()
            process.join(LEAVE_S)  # left to itself it ends when nobody listens any more
        finally:
            ours.close()
            process.kill()
            process.join(LEAVE_S)


def _written(rig: Rig, folder: Path) -> Path:
    """The built-in model as files."""
    from gpuinfer.models.text.checkpoint.export import save_folder

    save_folder(rig.checkpoint, folder)
    return folder


def _rows(raw: bytes, width: int) -> NDArray[np.float32]:
    return np.frombuffer(raw, np.float32).reshape(-1, width)
