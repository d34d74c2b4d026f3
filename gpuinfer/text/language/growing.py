"""A text as it grows token by token, and the stop strings in it."""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Sequence

from gpuinfer.text.language.spelling import REPLACEMENT, Piece, Spelling

_utf8 = codecs.getincrementaldecoder("utf-8")


class Growing:
    """The text of one answer. Each token costs the same however long the text is.

    A stop string counts as soon as its last character is complete; of several, that which is complete first, and of
    those the longest. Where the tokens end makes no difference. If more tokens come after it, it did not count: the
    text goes on as if there had been no such string.
    """

    def __init__(self, spelling: Spelling, stop: Sequence[str] = (), *, told: bool = True) -> None:
        """`told`: `settled` will be asked for what is certain, which is noted with each token then."""
        self._spelling, self._stop = spelling, [one for one in stop if one]
        self._reach = max(map(len, self._stop), default=1) - 1  # characters of a stop string's beginning, at most
        self._tail = ""  # the last of them
        self._parts: list[str] = []
        self._length = 0  # characters in parts
        self._ends: list[int] = []  # characters after each token, for `kept`
        self._sure: list[int] = []  # of them, those that no later token can take back
        self._cut: int | None = None  # where the text ends, if a stop string has just been completed
        self._notes = told
        self._said = self._said_tokens = 0  # characters and tokens that `settled` has told
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
        if self._notes:
            self._sure.append(self._certain())
        return found

    def begin(self, tokens: Sequence[int]) -> int:
        """First tokens, which `settled` has told elsewhere. Returns how many characters it told with them."""
        for token in tokens:
            self.push(token)
        self._said, self._said_tokens = self._sure[-1] if self._sure else 0, len(tokens)
        return self._said

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
        tokens = max(self._said_tokens, self._certain_tokens())
        sure = self._sure[tokens - 1] if tokens else 0
        if sure == self._said and self._stop:  # nothing that anybody would see: the tokens wait for their text
            return "", self._said_tokens
        new = self._since(self._said)[: sure - self._said]
        self._said, self._said_tokens = sure, tokens
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
