"""From tokens to text: what each token adds, and a text as it grows token by token, with the stop strings in it.

There are two kinds of vocabularies. In the first a token is a run of bytes, and a text is all bytes decoded as UTF-8,
with replacement characters for invalid bytes (byte-level BPE, Radford et al. 2019; bytes; characters). In the second a
token is a piece of text, except those that stand for one byte: a run of such bytes is decoded if it is UTF-8 as a
whole, and else becomes one replacement character per byte (byte fallback, Kudo and Richardson 2018, as `tokenizers`
decodes it).
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

REPLACEMENT = "�"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Piece = str | bytes | None  # of the second kind: bytes is one byte; None: the token is skipped


class Spelling:
    """The pieces of a vocabulary, each looked up once. Threads may share one.

    `raw`: the first kind, all pieces are bytes. `strip`: spaces dropped at the beginning of a text; `lead`: pieces at
    the beginning of a text, where they differ; `joins`: tokens are words, with a space between.
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
        """Whether a space at the beginning of a text is dropped."""
        return self.strip > 0 or self.lead is not None

    def piece(self, token: int) -> Piece:
        """The piece that the token adds after the beginning of a text."""
        try:
            return self._pieces[token]
        except KeyError:
            found = self._pieces[token] = self._look_up(token)
            return found


def spelling_of(decoder: Any, text_of: Callable[[int], str | None]) -> Spelling:
    """The spelling of a decoder of `tokenizers`. `text_of`: a token's text in the vocabulary, None if the token is left
    out of texts. Raises `UsageError` for a decoder whose pieces depend on later tokens.
    """

    def flat(step: Any) -> list[dict[str, Any]]:
        return [one for part in step["decoders"] for one in flat(part)] if step["type"] == "Sequence" else [step]

    steps = flat(json.loads(decoder.__getstate__())) if decoder is not None else []
    if not steps:
        return Spelling(
            False, lambda token: None if (text := text_of(token)) is None else " " + text, text_of, joins=True
        )
    if [step["type"] for step in steps] != ["ByteLevel"]:
        return _pieces(steps, text_of)
    # the characters that stand for bytes in byte-level vocabularies (Radford et al. 2019)
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    table = {**{chr(byte): byte for byte in plain}, **{chr(256 + n): byte for n, byte in enumerate(others)}}

    def piece(token: int) -> bytes | None:
        text = text_of(token)
        if text is None:
            return None
        try:
            return bytes([table[character] for character in text])
        except KeyError:  # an added token, stored as plain text
            return text.encode()

    return Spelling(True, piece)


def _pieces(steps: list[dict[str, Any]], text_of: Callable[[int], str | None]) -> Spelling:
    """Steps that change single tokens, and an optional last one that strips the text."""
    kinds = [step["type"] for step in steps]
    whole = steps[kinds.index("Fuse") :] if "Fuse" in kinds else []
    alone = steps[: len(steps) - len(whole)]
    if "ByteFallback" in kinds[:-1] and kinds[kinds.index("ByteFallback") + 1] != "Fuse":
        raise _unknown("ByteFallback before " + kinds[kinds.index("ByteFallback") + 1])
    for step in alone:
        if step["type"] not in ("ByteFallback", "Metaspace", "Replace") or "String" not in step.get(
            "pattern", "String"
        ):
            raise _unknown(step["type"])
    for step in whole[1:]:
        if step["type"] != "Fuse" and (step["type"] != "Strip" or step["stop"] or step["content"] != " "):
            raise _unknown(f"{step['type']} after Fuse")
    strip = sum(int(step.get("start", 0)) for step in whole[1:])

    def piece(token: int, first: bool = False) -> Piece:
        text = text_of(token)
        if text is None:
            return None
        for step in alone:
            if step["type"] == "Replace":
                text = text.replace(step["pattern"]["String"], step["content"])
            elif step["type"] == "Metaspace":
                drops = step.get("prepend_scheme", "always") != "never"
                text = text.replace(step["replacement"], "" if first and drops else " ")
            elif match := _BYTE.fullmatch(text):
                return bytes([int(match[1], 16)])
        return text

    lead = (lambda token: piece(token, True)) if "Metaspace" in kinds else None
    return Spelling(False, piece, lead, strip)


def _unknown(what: str) -> UsageError:
    return UsageError(
        f"the tokenizer has a decoder that no backend of gpuinfer knows ({what}). Serve the model with a program that "
        "does, such as vLLM's own server (`vllm serve`)."
    )


Encoded = NDArray[np.int32] | BadPrompt


class Codec(Protocol):
    """A tokenizer: texts to tokens and back. Threads may share one."""

    spelling: Spelling
    literal: Spelling  # in which special tokens have a text too
    size: int  # one more than the highest token
    hidden: frozenset[int]  # special tokens: never part of a text

    def encode(self, texts: Sequence[str], special_tokens: bool) -> list[Encoded]:
        """The tokens or the error of each text, in order."""
        ...

    def decode(self, tokens: Sequence[int], special_tokens: bool = False) -> str:
        """Tokens beyond the vocabulary are left out, and special tokens unless `special_tokens`."""
        ...


def bad_unicode(error: UnicodeEncodeError) -> BadPrompt:
    return BadPrompt(
        f"the text is not valid Unicode: half a surrogate pair at character {error.start}. Write the whole character."
    )


_utf8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """The text of one answer. The cost of a token does not depend on the length of the text.

    A stop string is found once its last character is complete; of several, the first to be complete, and of those the
    longest. Token boundaries do not matter. If more tokens are pushed after it, the text continues without a stop.
    """

    def __init__(self, spelling: Spelling, stop: Sequence[str] = (), *, incremental: bool = True) -> None:
        """`incremental`: `settled` is called, and what is certain is noted with each token."""
        self._spelling, self._stop = spelling, [one for one in stop if one]
        self._reach = max(map(len, self._stop), default=1) - 1  # characters of a stop string's beginning, at most
        self._tail = ""  # the last characters of the text
        self._parts: list[str] = []
        self._length = 0  # characters in parts
        self._ends: list[int] = []  # length of the text after each token, for `kept`
        self._sure: list[int] = []  # characters after each token that no later token can change
        self._cut: int | None = None  # where the text ends, if the last token has completed a stop string
        self._incremental = incremental
        self._given = self._given_tokens = 0  # characters and tokens that `settled` has returned
        self._bytes = _utf8("replace" if spelling.raw else "strict")
        self._first = True
        self._strip = spelling.strip
        self._run = _Run()

    def push(self, token: int) -> str | None:
        """Append a token. Returns the stop string that the token completes, if any."""
        self._cut = found = None
        piece = self._spelling.piece(token)
        if self._first and piece is not None:
            self._first = False
            if self._spelling.lead is not None:
                piece = self._spelling.lead(token)
        if new := self._written(piece):
            self._parts.append(new)
            self._length += len(new)
            if self._stop:
                window, old = self._tail + new, len(self._tail)
                best = (len(window) + 1, 0)
                for one in self._stop:
                    place = window.find(one, max(0, old - len(one) + 1))
                    if place >= 0 and (place + len(one), place) < best:
                        found, best = one, (place + len(one), place)
                if found is not None:
                    self._cut = self._length - len(window) + best[1]
                self._tail = window[-self._reach :] if self._reach else ""
        self._ends.append(self._length)
        if self._incremental:
            length, tail = (self._run.length, self._run.tail) if self._unsure else (self._length, self._tail)
            certain = length - self._held(tail)
            self._sure.append(certain if self._cut is None else min(certain, self._cut))
        return found

    def begin(self, tokens: Sequence[int]) -> int:
        """First tokens, whose text `settled` has returned elsewhere. Returns the number of its characters."""
        for token in tokens:
            self.push(token)
        self._given, self._given_tokens = self._sure[-1] if self._sure else 0, len(tokens)
        return self._given

    @property
    def text(self) -> str:
        """The text of all tokens so far: that of `decode`, cut before the stop string."""
        if self._cut is not None:
            return "".join(self._parts)[: self._cut]
        if self._run.open and self._bytes.getstate()[0]:  # an incomplete character makes the whole run invalid
            return "".join(self._parts[: self._run.parts]) + REPLACEMENT * self._run.bytes
        return "".join(self._parts) + self._bytes.getstate()[0].decode("utf-8", "replace")

    def settled(self) -> tuple[str, int]:
        """The text that has become final since the last call, and how many tokens are final in all.

        Incomplete characters and possible beginnings of a stop string are held back, and so are tokens that a stop
        string would remove. All texts together are a prefix of `text`, now and later; the tokens never exceed `kept` of
        an answer that ends with a stop string.

        All texts together are those that were final when the last of these tokens was pushed, even if more are by now:
        the number of tokens alone determines the text, whatever the number and times of calls.
        """
        if not (self._stop or self._unsure or self._bytes.getstate()[0]):
            tokens = len(self._ends)
        else:
            certain = self._sure[-1] if self._sure else 0
            tokens = bisect_left(self._ends, certain) + 1 if certain else 0
        tokens = max(self._given_tokens, tokens)
        sure = self._sure[tokens - 1] if tokens else 0
        if sure == self._given and self._stop:  # no new text: the tokens wait for theirs
            return "", self._given_tokens
        lacking, last = self._length - self._given, []
        for part in reversed(self._parts):
            last.append(part)
            lacking -= len(part)
            if lacking <= 0:
                break
        text = "".join(reversed(last))
        new = (text[-lacking:] if lacking else text)[: sure - self._given]
        self._given, self._given_tokens = sure, tokens
        return new, tokens

    @property
    def kept(self) -> int:
        """How many tokens the text needs; those after them belong to the stop string alone."""
        if self._cut is None:
            return len(self._ends)
        return bisect_left(self._ends, self._cut) + 1 if self._cut else 0

    def _written(self, piece: Piece) -> str:
        """The characters that become complete with a piece. Those of a run of bytes are text for as long as the whole
        run is valid.
        """
        if piece is None:
            return ""
        if isinstance(piece, bytes) and self._spelling.raw:
            return self._bytes.decode(piece)
        run = self._run
        if not isinstance(piece, bytes):
            lost = self._broken() if run.open and self._bytes.getstate()[0] else ""
            if run.open:
                self._run = _Run()
            return lost + self._stripped(piece)
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
        """The run is invalid: replace its characters by one replacement character per byte."""
        run = self._run
        run.broken = True
        self._bytes.reset()
        del self._parts[run.parts :]
        self._length, self._tail, self._strip = run.length, run.tail, 0
        return REPLACEMENT * run.bytes

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text, self._strip = text[1:], self._strip - 1
        return text

    @property
    def _unsure(self) -> bool:
        """Whether the last characters may still become replacement characters."""
        return self._run.open and not self._run.broken

    def _held(self, text: str) -> int:
        """Characters at the end that may begin a stop string."""
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
    """Consecutive byte tokens in a vocabulary of texts, and the state before them."""

    __slots__ = ("broken", "bytes", "length", "open", "parts", "strip", "tail")

    def __init__(self, open: bool = False, parts: int = 0, length: int = 0, tail: str = "", strip: int = 0) -> None:
        self.open, self.parts, self.length, self.tail, self.strip = open, parts, length, tail, strip
        self.bytes = 0
        self.broken = False
