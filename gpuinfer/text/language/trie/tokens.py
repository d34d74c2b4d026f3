"""What each token of a vocabulary says, as bytes in one array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import BadPrompt
from gpuinfer.text.language.spelling import Piece, Spelling

NOTHING, TEXT, BYTE = 0, 1, 2  # as in cpu_tag.py
Ints = NDArray[np.int32]
Bytes = NDArray[np.uint8]


class TokenBytes:
    """Token t says `data[starts[t]:starts[t + 1]]`; `kinds` uint8 [tokens]: NOTHING, TEXT, or one BYTE of a run.

    At the beginning of a text tokens say what is in `lead`, and `strip` spaces are lost. Making one takes some tenths
    of a second for 150,000 tokens. Raises `BadPrompt` for a vocabulary of whole words.
    """

    def __init__(self, spelling: Spelling, vocabulary: int) -> None:
        if spelling.joins:
            raise BadPrompt("this model's tokens are whole words, and cannot follow a constraint. Leave it out.")
        pieces = [spelling.piece(token) for token in range(vocabulary)]
        self.raw, self.strip = spelling.raw, spelling.strip
        self.starts, self.data = _joined(pieces)
        self.kinds = np.array([_kind(piece, spelling.raw) for piece in pieces], np.uint8)
        self.differs = spelling.lead is not None
        self.lead = (self.starts, self.data)
        if spelling.lead is not None:
            self.lead = _joined([spelling.lead(token) for token in range(vocabulary)])

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """What kernels take."""
        return (self.starts, self.data, self.kinds, *self.lead)

    @property
    def vocabulary(self) -> int:
        return len(self.kinds)

    def said(self, tokens: Sequence[int]) -> list[bytes]:
        """What each of the tokens says, in the middle of a text."""
        starts, data = self.starts, self.data
        return [data[starts[token] : starts[token + 1]].tobytes() for token in tokens]


def _joined(pieces: Sequence[Piece]) -> tuple[NDArray[np.int64], Bytes]:
    written = [_bytes(piece) for piece in pieces]
    starts = np.zeros(len(written) + 1, np.int64)
    np.cumsum([len(one) for one in written], out=starts[1:])
    return starts, np.frombuffer(b"".join(written), np.uint8).copy()


def _bytes(piece: Piece) -> bytes:
    return piece.encode("utf-8", "replace") if isinstance(piece, str) else piece or b""


def _kind(piece: Piece, raw: bool) -> int:
    if piece is None:
        return NOTHING
    return BYTE if isinstance(piece, bytes) and not raw else TEXT
