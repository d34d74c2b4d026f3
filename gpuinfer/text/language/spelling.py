"""What each token adds to a text.

Two kinds of vocabularies. In the first a token is a run of bytes, and a text is all of them together, read as UTF-8
with what is no UTF-8 replaced (byte-level BPE, Radford et al. 2019; bytes; characters). In the second a token is a
piece of text, but for those that stand for one byte: a run of such bytes is one text when it is UTF-8 as a whole, and
else one replacement character for each (byte fallback, Kudo and Richardson 2018, as `tokenizers` decodes it).

What a tokenizer is to the rest of the program, whatever it is made of.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import BadPrompt, UsageError
from gpuinfer.text.checkpoint.keys import ANOTHER_PROGRAM

REPLACEMENT = "�"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Piece = str | bytes | None  # of the second kind: bytes is one byte; None adds nothing at all, as if it were not there


class Spelling:
    """The pieces of a vocabulary, each looked up once. Threads may share one.

    `raw`: the first kind, all pieces are bytes. `strip`: how many spaces the text loses at its beginning; `lead`: the
    first piece of a text differs from the same piece further on; `joins`: tokens are words, with a space between.
    """

    def __init__(
        self,
        raw: bool,
        piece: Callable[[int], Piece],
        lead: Callable[[int], Piece] | None = None,
        strip: int = 0,
        joins: bool = False,
    ) -> None:
        self.raw, self.strip, self.lead, self.joins = raw, strip, lead, joins
        self._look_up = piece
        self._pieces: dict[int, Piece] = {}

    @property
    def eats_spaces(self) -> bool:
        """Whether a space at the very beginning is lost."""
        return self.strip > 0 or self.lead is not None

    def piece(self, token: int) -> Piece:
        """What the token adds anywhere but at the beginning."""
        try:
            return self._pieces[token]
        except KeyError:
            found = self._pieces[token] = self._look_up(token)
            return found


def byte_level_table() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes: themselves if printable (Radford et al. 2019)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {**{chr(byte): byte for byte in plain}, **{chr(256 + n): byte for n, byte in enumerate(others)}}


def spelling_of(decoder: Any, text_of: Callable[[int], str | None]) -> Spelling:
    """How a decoder of `tokenizers` spells. `text_of` gives a token as its vocabulary writes it, None for one that is
    left out of texts. Raises `UsageError` for a decoder whose tokens depend on what comes after them.
    """
    steps = _flat(json.loads(decoder.__getstate__())) if decoder is not None else []
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _byte_level(text_of)
    if not steps:
        return Spelling(False, lambda token: _spaced(text_of(token)), text_of, joins=True)
    return _pieces(steps, text_of)


def _flat(step: Any) -> list[dict[str, Any]]:
    if step["type"] == "Sequence":
        return [one for inner in step["decoders"] for one in _flat(inner)]
    return [step]


def _byte_level(text_of: Callable[[int], str | None]) -> Spelling:
    table = byte_level_table()

    def piece(token: int) -> bytes | None:
        text = text_of(token)
        if text is None:
            return None
        try:
            return bytes([table[character] for character in text])
        except KeyError:  # an added token, written as it is
            return text.encode()

    return Spelling(True, piece)


def _spaced(text: str | None) -> str | None:
    return None if text is None else " " + text


def _pieces(steps: list[dict[str, Any]], text_of: Callable[[int], str | None]) -> Spelling:
    """Steps that change each token alone, then perhaps one that strips the whole."""
    kinds = [step["type"] for step in steps]
    whole = steps[kinds.index("Fuse") :] if "Fuse" in kinds else []
    alone = steps[: len(steps) - len(whole)]
    changes = [_change(step) for step in alone]
    if "ByteFallback" in kinds[:-1] and kinds[kinds.index("ByteFallback") + 1] != "Fuse":
        raise _unknown("ByteFallback before " + kinds[kinds.index("ByteFallback") + 1])
    strip = sum(_stripped(step) for step in whole[1:])

    def piece(token: int, first: bool = False) -> Piece:
        text: Piece = text_of(token)
        for change in changes:
            if isinstance(text, str):
                text = change(text, first)
        return text

    lead = (lambda token: piece(token, True)) if "Metaspace" in kinds else None
    return Spelling(False, piece, lead, strip)


def _stripped(step: dict[str, Any]) -> int:
    if step["type"] == "Fuse":
        return 0
    if step["type"] != "Strip" or step["stop"] or step["content"] != " ":
        raise _unknown(f"{step['type']} after Fuse")
    return int(step["start"])


def _change(step: dict[str, Any]) -> Callable[[str, bool], Piece]:
    """A step as a function of a token's text and of whether it is the first."""
    kind = step["type"]
    if kind == "Replace" and "String" in step["pattern"]:
        return lambda text, first: text.replace(step["pattern"]["String"], step["content"])
    if kind == "ByteFallback":
        return lambda text, first: bytes([int(match[1], 16)]) if (match := _BYTE.fullmatch(text)) else text
    if kind == "Metaspace":
        mark, drops = step["replacement"], step.get("prepend_scheme", "always") != "never"
        return lambda text, first: text.replace(mark, "" if first and drops else " ")
    raise _unknown(kind)


def _unknown(what: str) -> UsageError:
    return UsageError(f"the tokenizer has a decoder that is not known here ({what}). {ANOTHER_PROGRAM}")


Encoded = NDArray[np.int32] | BadPrompt


class Codec(Protocol):
    """Texts to tokens and back. Threads may share one."""

    spelling: Spelling
    literal: Spelling  # in which special tokens have a text too
    size: int  # one more than the highest token
    hidden: frozenset[int]  # special tokens: never part of a text

    def encode(self, texts: Sequence[str], special_tokens: bool) -> list[Encoded]:
        """One result for each text, in order: tokens, or why it has none."""
        ...

    def decode(self, tokens: Sequence[int], special_tokens: bool = False) -> str:
        """Tokens that the vocabulary does not have are left out, and special ones unless they are wanted."""
        ...


def bad_unicode(error: UnicodeEncodeError) -> BadPrompt:
    return BadPrompt(
        f"the text is not valid Unicode: half a surrogate pair at character {error.start}. Write the whole character."
    )
