"""What each token adds to a text.

Two kinds of vocabularies. In the first a token is a run of bytes, and a text is all of them together, read as UTF-8
with what is no UTF-8 replaced (byte-level BPE, Radford et al. 2019; bytes; characters). In the second a token is a
piece of text, but for those that stand for one byte: a run of such bytes is one text when it is UTF-8 as a whole, and
else one replacement character for each (byte fallback, Kudo and Richardson 2018, as `tokenizers` decodes it).

What a tokenizer is to the rest of the program, whatever it is made of.

A text as it grows token by token, and the stop strings in it.
"""

from __future__ import annotations

import codecs
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import BadPrompt, UsageError
from gpuinfer.text.checkpoint.config_keys import ANOTHER_PROGRAM

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


_utf8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """The text of one answer. Each token costs the same however long the text is.

    A stop string counts as soon as its last character is complete; of several, that which is complete first, and of
    those the longest. Where the tokens end makes no difference. If more tokens come after it, it did not count: the
    text goes on as if there had been no such string.
    """

    def __init__(self, spelling: Spelling, stop: Sequence[str] = (), *, incremental: bool = True) -> None:
        """`incremental`: `settled` is called, and what is certain is noted with each token."""
        self._spelling, self._stop = spelling, [one for one in stop if one]
        self._reach = max(map(len, self._stop), default=1) - 1  # characters of a stop string's beginning, at most
        self._tail = ""  # the last of them
        self._parts: list[str] = []
        self._length = 0  # characters in parts
        self._ends: list[int] = []  # characters after each token, for `kept`
        self._sure: list[int] = []  # of them, those that no later token can take back
        self._cut: int | None = None  # where the text ends, if a stop string has just been completed
        self._incremental = incremental
        self._given = self._given_tokens = 0  # characters and tokens that `settled` has told
        self._bytes = _utf8("replace" if spelling.raw else "strict")
        self._first = True
        self._strip = spelling.strip
        self._run = _Run()

    def push(self, token: int) -> str | None:
        """Append a token. Returns the stop string that it has completed, if any."""
        self._cut = None
        piece = self._spelling.piece(token)
        if self._first and piece is not None:
            self._first = False
            if self._spelling.lead is not None:
                piece = self._spelling.lead(token)
        new = self._written(piece)
        found = self._appended(new) if new else None
        self._ends.append(self._length)
        if self._incremental:
            self._sure.append(self._certain())
        return found

    def begin(self, tokens: Sequence[int]) -> int:
        """First tokens, which `settled` has told elsewhere. Returns how many characters it told with them."""
        for token in tokens:
            self.push(token)
        self._given, self._given_tokens = self._sure[-1] if self._sure else 0, len(tokens)
        return self._given

    @property
    def text(self) -> str:
        """The text of all tokens so far: what `decode` makes of them, cut before the stop string."""
        if self._cut is not None:
            return "".join(self._parts)[: self._cut]
        if self._run.open and self._bytes.getstate()[0]:  # half a character: with it the whole run is no text
            return "".join(self._parts[: self._run.parts]) + REPLACEMENT * self._run.bytes
        return "".join(self._parts) + self._rest()

    def settled(self) -> tuple[str, int]:
        """What has become certain since the last call: text, and how many tokens are certain in all.

        Half characters wait, and whatever may turn out to be the beginning of a stop string; so do the tokens of which
        a stop string would leave nothing. Texts joined are the beginning of `text`, now and later, and the tokens never
        more than `kept` if the answer ended with a stop string.

        Texts joined are what was certain when the last of these tokens came, though more may be by now: the tokens
        alone say how much has been told, whenever and however often that was.
        """
        tokens = max(self._given_tokens, self._certain_tokens())
        sure = self._sure[tokens - 1] if tokens else 0
        if sure == self._given and self._stop:  # nothing that anybody would see: the tokens wait for their text
            return "", self._given_tokens
        new = self._since(self._given)[: sure - self._given]
        self._given, self._given_tokens = sure, tokens
        return new, tokens

    @property
    def kept(self) -> int:
        """How many of the tokens the text needs; those after them were only of the stop string."""
        if self._cut is None:
            return len(self._ends)
        return bisect_left(self._ends, self._cut) + 1 if self._cut else 0

    def _written(self, piece: Piece) -> str:
        """The characters that a piece completes."""
        if piece is None:
            return ""
        if isinstance(piece, bytes):
            return self._bytes.decode(piece) if self._spelling.raw else self._byte(piece)
        closing = self._closed() if self._run.open else ""
        return closing + self._stripped(piece)

    def _byte(self, piece: bytes) -> str:
        """One byte of a run: its characters count as long as the whole run is text."""
        run = self._run
        if not run.open:
            self._run = run = _Run(True, len(self._parts), self._length, self._tail, self._strip)
        run.bytes += 1
        if run.broken:
            return REPLACEMENT
        try:
            return self._stripped(self._bytes.decode(piece))
        except UnicodeDecodeError:
            return self._broken()

    def _broken(self) -> str:
        """The run is no text: take its characters back, and put one replacement for each byte."""
        run = self._run
        run.broken = True
        self._bytes.reset()
        del self._parts[run.parts :]
        self._length, self._tail, self._strip = run.length, run.tail, 0
        return REPLACEMENT * run.bytes

    def _closed(self) -> str:
        """The run is over."""
        half = self._bytes.getstate()[0]
        lost = self._broken() if half else ""
        self._run = _Run()
        return lost

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text, self._strip = text[1:], self._strip - 1
        return text

    def _appended(self, new: str) -> str | None:
        self._parts.append(new)
        self._length += len(new)
        if not self._stop:
            return None
        window = self._tail + new
        found = self._find(window, len(self._tail))
        self._tail = window[-self._reach :] if self._reach else ""
        return found

    def _find(self, window: str, old: int) -> str | None:
        """The first stop string that ends after the first `old` characters of the window."""
        found, best = None, (len(window) + 1, 0)
        for one in self._stop:
            place = window.find(one, max(0, old - len(one) + 1))
            if place >= 0 and (place + len(one), place) < best:
                found, best = one, (place + len(one), place)
        if found is not None:
            self._cut = self._length - len(window) + best[1]
        return found

    @property
    def _unsure(self) -> bool:
        """Whether what was written last may still turn out to be no text."""
        return self._run.open and not self._run.broken

    def _certain(self) -> int:
        """How many characters no later token can change."""
        length, tail = (self._run.length, self._run.tail) if self._unsure else (self._length, self._tail)
        certain = length - self._held(tail)
        return certain if self._cut is None else min(certain, self._cut)

    def _certain_tokens(self) -> int:
        if not (self._stop or self._unsure or self._bytes.getstate()[0]):
            return len(self._ends)
        certain = self._sure[-1] if self._sure else 0
        return bisect_left(self._ends, certain) + 1 if certain else 0

    def _since(self, place: int) -> str:
        """The text from this character on."""
        lacking, found = self._length - place, []
        for part in reversed(self._parts):
            found.append(part)
            lacking -= len(part)
            if lacking <= 0:
                break
        return "".join(reversed(found))[-lacking:] if lacking else "".join(reversed(found))

    def _rest(self) -> str:
        """What the bytes that wait for more would be if nothing followed."""
        waiting = self._bytes.getstate()[0]
        return waiting.decode("utf-8", "replace")

    def _held(self, text: str) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        held = 0
        for one in self._stop:
            place = text.find(one[0], max(0, len(text) - len(one) + 1))
            while 0 <= place < len(text) - held:
                if one.startswith(text[place:]):
                    held = len(text) - place
                    break
                place = text.find(one[0], place + 1)
        return held


class _Run:
    """Bytes after one another in a vocabulary of texts, and how things stood before them."""

    __slots__ = ("broken", "bytes", "length", "open", "parts", "strip", "tail")

    def __init__(self, open: bool = False, parts: int = 0, length: int = 0, tail: str = "", strip: int = 0) -> None:
        self.open, self.parts, self.length, self.tail, self.strip = open, parts, length, tail, strip
        self.bytes = 0
        self.broken = False
