"""Lists between tags, compiled for one vocabulary: a trie of tokens, and the tag that leads into it.

A line is the separator and an item, or the separator and the end. It has one spelling: the tokens that the tokenizer
gives it, if their bytes are those of the line. The tag before a list may be spelled by any tokens, and is matched by an
automaton over their bytes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Listed
from gpuinfer.text.language import cpu_trie
from gpuinfer.text.language.detokenizer import REPLACEMENT, Codec, Piece, Spelling

Ints = NDArray[np.int32]
Bytes = NDArray[np.uint8]


class TokenBytes:
    """The bytes of each token: `data[starts[t]:starts[t + 1]]`; `kinds` uint8 [tokens]: NOTHING, TEXT, or one BYTE of a
    run.

    At the beginning of a text, `lead` has the tokens' bytes, and `strip` spaces are dropped. Making one takes some
    tenths of a second for 150,000 tokens. Raises `BadPrompt` for a vocabulary of whole words.
    """

    def __init__(self, spelling: Spelling, vocabulary: int) -> None:
        if spelling.joins:
            raise BadPrompt("this model's tokens are whole words, and cannot follow a constraint. Leave it out.")
        pieces = [spelling.piece(token) for token in range(vocabulary)]
        self.raw, self.strip = spelling.raw, spelling.strip
        self.starts, self.data = _joined_pieces(pieces)
        byte = cpu_trie.TEXT if spelling.raw else cpu_trie.BYTE
        kinds = [
            cpu_trie.NOTHING if one is None else byte if isinstance(one, bytes) else cpu_trie.TEXT for one in pieces
        ]
        self.kinds = np.array(kinds, np.uint8)
        self.differs = spelling.lead is not None
        self.lead = (self.starts, self.data)
        if spelling.lead is not None:
            self.lead = _joined_pieces([spelling.lead(token) for token in range(vocabulary)])

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """The arguments of kernels."""
        return (self.starts, self.data, self.kinds, *self.lead)

    @property
    def vocabulary(self) -> int:
        return len(self.kinds)

    def of(self, tokens: Sequence[int]) -> list[bytes]:
        """The bytes of each token, in the middle of a text."""
        starts, data = self.starts, self.data
        return [data[starts[token] : starts[token + 1]].tobytes() for token in tokens]


def _joined_pieces(pieces: Sequence[Piece]) -> tuple[NDArray[np.int64], Bytes]:
    written = [piece.encode("utf-8", "replace") if isinstance(piece, str) else piece or b"" for piece in pieces]
    starts = np.zeros(len(written) + 1, np.int64)
    np.cumsum([len(one) for one in written], out=starts[1:])
    return starts, np.frombuffer(b"".join(written), np.uint8).copy()


MOST_ITEMS = 10_000
LONGEST_ITEM = 1_000  # characters
LONGEST_ITEMS = 1 << 20  # of all together
LONGEST_TAG = 64  # bytes
NONE: Ints = np.zeros(0, np.int32)
SHOWN = 60  # characters of an item in a message


@dataclass(frozen=True, slots=True, eq=False)
class ListLines:
    """`tokens` int32: those of line i from `starts[i]` to `starts[i + 1]`; `units`: the numbers of each line's units,
    none for the end; `names`: of all units.
    """

    tokens: Ints
    starts: NDArray[np.int64]
    units: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]


def check_list(listed: Listed) -> None:
    """Raises `BadPrompt` for a list that is empty, too long, or ambiguous."""
    for name in ("begin", "end", "separator") if listed.begin else ("end", "separator"):
        tag = getattr(listed, name)
        if not tag or len(tag.encode("utf-8", "replace")) > LONGEST_TAG:
            raise BadPrompt(f"`{name}` of the list has {len(tag)} characters. Give one to {LONGEST_TAG} bytes.")
        _check_unicode(tag)
    if not listed.begin and (not listed.ends or listed.separator.startswith(" ")):
        raise BadPrompt(
            "a list without `begin` begins with the answer: it must end it too (`ends`), and its separator may not "
            "begin with a space, which some tokenizers lose there. Give it a `begin`."
        )
    if not listed.items:
        raise BadPrompt("the list has no items: no answer could follow it. Give some, or leave the constraint out.")
    texts = [text for _, text in listed.items]
    if len(texts) > MOST_ITEMS or sum(map(len, texts)) > LONGEST_ITEMS:
        raise BadPrompt(
            f"the list has {len(texts)} items of {sum(map(len, texts))} characters. "
            f"Give at most {MOST_ITEMS} of {LONGEST_ITEMS} in all."
        )
    for text in texts:
        if not text or len(text) > LONGEST_ITEM:
            raise BadPrompt(f"an item of the list has {len(text)} characters. Give 1 to {LONGEST_ITEM} to each.")
        _check_unicode(text)
        for name in ("separator", "end"):
            if (inside := getattr(listed, name)) in text:
                raise BadPrompt(
                    f"the item {_shown(text)} of the list holds its {name}, {inside!r}: it would be read as several. "
                    f"Use another {name}, or write the item in another way."
                )


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadPrompt(f"{_shown(text)} in the list is no valid Unicode. Write whole characters.") from None
    if REPLACEMENT in text:
        raise BadPrompt(f"{_shown(text)} in the list holds a replacement character. Write the character itself.")


def spelt_lines(listed: Listed, codec: Codec, token_bytes: TokenBytes) -> ListLines:
    """The list as lines of tokens. Raises `BadPrompt` as `check_list` does, or if the tokenizer cannot spell it."""
    check_list(listed)
    names = tuple(dict.fromkeys(unit for unit, _ in listed.items))
    numbers = {name: number for number, name in enumerate(names)}
    units: dict[str, list[int]] = {}
    for unit, text in listed.items:
        units.setdefault(text, []).append(numbers[unit])
    texts = [listed.separator + text for text in (*units, listed.end)]
    spelt = spell_texts(texts, listed, codec, token_bytes)
    if not listed.ends and token_bytes.kinds[spelt[-1][-1]] == cpu_trie.BYTE:
        raise BadPrompt(
            f"the tokenizer spells the end of {listed.end!r} byte by byte, which what follows could undo. "
            "Use another `end`, or let the answer end there (`ends`)."
        )
    if not listed.begin and token_bytes.differs:  # a line may be the first of the text
        starts, data = token_bytes.lead
        for token in {int(tokens[0]) for tokens in spelt}:
            if data[starts[token] : starts[token + 1]].tobytes() != token_bytes.of([token])[0]:
                raise BadPrompt(
                    "the tokenizer says something else at the beginning of a text than further on, and a list without "
                    "`begin` begins there. Give it a `begin`."
                )
    return ListLines(
        np.concatenate(spelt), offsets(spelt), (*(tuple(dict.fromkeys(some)) for some in units.values()), ()), names
    )


def spell_texts(texts: Sequence[str], listed: Listed, codec: Codec, token_bytes: TokenBytes) -> list[Ints]:
    """The tokens of each text, in the middle of a longer one."""
    found: list[Ints | None] = [None] * len(texts)
    # a tokenizer may put tokens before a text, so spellings are looked for in the middle of another
    before = ("",) if token_bytes.raw else (listed.begin, "x", "")
    for context in before:
        left = [number for number, tokens in enumerate(found) if tokens is None]
        for number, tokens in zip(
            left, _spelt(context, [texts[number] for number in left], codec, token_bytes), strict=True
        ):
            found[number] = tokens
    for tokens, text in zip(found, texts, strict=True):
        if tokens is None:
            item = text.removeprefix(listed.separator)
            raise BadPrompt(
                f"the tokenizer cannot spell {_shown(item)} of the list after {listed.separator!r}. "
                "Write it with characters that the model knows."
            )
    return [tokens for tokens in found if tokens is not None]


def _spelt(context: str, texts: Sequence[str], codec: Codec, token_bytes: TokenBytes) -> list[Ints | None]:
    """The tokens of each text after the context, if their bytes are those of the text."""
    if not texts:
        return []
    encoded = [
        NONE if isinstance(tokens, BadPrompt) else tokens
        for tokens in codec.encode([context + text for text in texts], False)
    ]
    written = [text.encode() for text in texts]
    places = np.zeros(len(texts), np.int64)
    starts, text_starts = offsets(encoded), offsets(written)
    tokens, letters = np.concatenate(encoded), np.frombuffer(b"".join(written), np.uint8)
    cpu_trie.endings(
        tokens.astype(np.int32), starts, letters, text_starts, token_bytes.starts, token_bytes.data, places
    )
    return [one[place:] if place >= 0 else None for one, place in zip(encoded, places.tolist(), strict=True)]


def offsets(parts: Sequence[Sized]) -> NDArray[np.int64]:
    """Where each part begins in their concatenation, and where the last one ends."""
    starts = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=starts[1:])
    return starts


def _shown(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 1] + "…")


STATES_AT_ONCE = 1 << 14  # initial room for tokens that continue after the tag


@dataclass(frozen=True, slots=True, eq=False)
class ListTag:
    """`goto` int32 [length, 256]. The other three have an entry for each state and token that completes the tag and has
    more bytes, ordered by state, then token; `offsets`: where in the vocabulary's data those bytes begin.

    State `length` stands for the beginning of a text, where tokens may have other bytes.
    """

    goto: Ints
    states: Ints
    tokens: Ints
    offsets: NDArray[np.int64]


def tag_of(text: str, token_bytes: TokenBytes) -> ListTag:
    """Takes some 10 ms for 150,000 tokens."""
    goto = automaton(text.encode())
    if not text:
        return ListTag(goto, NONE, NONE, np.zeros(0, np.int64))
    room = STATES_AT_ONCE
    while True:
        states, tokens, offsets = np.zeros(room, np.int32), np.zeros(room, np.int32), np.zeros(room, np.int64)
        count = 0
        for state in range(len(goto) + 1):
            fresh = state == len(goto)
            starts, data = token_bytes.lead if fresh else (token_bytes.starts, token_bytes.data)
            strip = token_bytes.strip if fresh else 0
            count = cpu_trie.bordering(
                goto, data, starts, token_bytes.kinds, strip, state, states, tokens, offsets, count
            )
        if count <= room:
            return ListTag(goto, states[:count].copy(), tokens[:count].copy(), offsets[:count].copy())
        room = count


def automaton(text: bytes) -> Ints:
    """int32 [length, 256]: by state and next byte, how many bytes of the text the input ends with. Knuth, Morris and
    Pratt (1977).
    """
    goto = np.zeros((len(text), 256), np.int32)
    if not text:
        return goto
    goto[0, text[0]] = 1
    fallback = 0
    for state in range(1, len(text)):
        goto[state] = goto[fallback]
        goto[state, text[state]] = state + 1
        fallback = int(goto[fallback, text[state]])
    return goto


MOST_KEPT, KEPT_BYTES = 256, 256 << 20  # compiled lists in the cache, and their bytes
MOST_TAGS = 16
MOST_PADDED = 1 << 20  # tokens of all lines, padded to the longest, that are sorted by columns


@dataclass(frozen=True, slots=True, eq=False)
class Trie:
    """A compiled list. It never changes, so all rows and threads share it.

    `image`: int32, described in `cpu_trie`; `words`: int32 words of a set of units; `most`: tokens that any state
    allows or bars at most.
    """

    image: Ints
    words: int
    most: int
    nodes: int

    @property
    def tagged(self) -> bool:
        """Whether a tag begins the list; else the list begins with the answer."""
        return bool(self.image[cpu_trie.LENGTH])

    @property
    def address(self) -> int:
        return int(self.image.ctypes.data)


def build_trie(lines: ListLines, tag: ListTag, token_bytes: TokenBytes, ends: bool) -> Trie:
    """The trie of all lines. Raises `BadPrompt` for an ambiguous list."""
    order = sorted_lines(lines)
    first, token, line = _grown(lines, order)
    units = [lines.units[number] for number in order.tolist()]
    several = sum(len(some) > 1 for some in units)
    sets = np.zeros((several + 2 * len(units) + 1, -(-max(len(lines.names), 1) // 32)), np.int32)
    codes, count = np.empty(len(units), np.int32), 0  # of each line in `item`; sets of items with several units
    for place, some in enumerate(units):
        codes[place] = some[0] if len(some) == 1 else -3 - count if some else cpu_trie.END
        if len(some) > 1:
            for unit in some:
                sets[count, unit // 32] |= np.uint32(1 << unit % 32).astype(np.int32)
            count += 1
    nodes = len(token)
    need, item = np.zeros(nodes, np.int32), np.zeros(nodes, np.int32)
    count = cpu_trie.gather_units(nodes, first, line, codes, sets, count, need, item)
    after_item = np.repeat(item != cpu_trie.NO_ITEM, np.diff(first))  # of each node but the first, in order
    if np.isin(token[1:][after_item], token[first[0] : first[1]]).any():
        raise BadPrompt(
            "an item of the list begins with another one, and goes on as the separator does: the text could be "
            "read in two ways. Use another separator."
        )
    words = sets.shape[1]
    parts = {
        cpu_trie.FIRST: first,
        cpu_trie.TOKEN: token,
        cpu_trie.NEED: need,
        cpu_trie.ITEM: item,
        cpu_trie.SETS: sets[:count].reshape(-1),
        cpu_trie.GOTO: tag.goto.reshape(-1),
    }
    header = np.zeros(cpu_trie.HEADER, np.int32)
    header[list(parts)] = len(header) + np.cumsum([0, *map(len, parts.values())])[:-1]
    header[[cpu_trie.NODES, cpu_trie.WORDS, cpu_trie.LENGTH, cpu_trie.ENDS]] = nodes, words, len(tag.goto), int(ends)
    image = np.concatenate([header, *parts.values()])
    letter = int(token_bytes.data[token_bytes.starts[token[1]]])  # each line begins with the separator
    starts, bars = _bars(image, tag, token_bytes, letter)
    image = np.concatenate([image, starts, bars])
    image[cpu_trie.BAR_STARTS], image[cpu_trie.BARS] = len(image) - len(bars) - len(starts), len(image) - len(bars)
    degrees = np.diff(first)
    most = max(int(degrees.max()) + int(degrees[0]), int(np.diff(starts).max()))
    image[cpu_trie.MOST] = most
    return Trie(image, words, most, nodes)


def sorted_lines(lines: ListLines) -> NDArray[np.int64]:
    """The lines' numbers, ordered by tokens; a prefix goes before longer lines."""
    lengths = np.diff(lines.starts)
    if int(lengths.max()) * len(lengths) > MOST_PADDED:
        written, starts = lines.tokens.astype(">u4").tobytes(), lines.starts.tolist()
        keys = [written[4 * start : 4 * end] for start, end in pairwise(starts)]
        return np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)
    padded = np.full((int(lengths.max()), len(lengths)), -1, np.int32)
    inside = np.arange(len(padded))[:, None] < lengths
    padded.T[inside.T] = lines.tokens
    return np.lexsort(padded[::-1])


def _grown(lines: ListLines, order: NDArray[np.int64]) -> tuple[Ints, Ints, Ints]:
    """First children [nodes + 1], tokens [nodes] and lines [nodes] of the tree of the sorted lines."""
    lengths = np.diff(lines.starts)[order]
    starts = np.zeros(len(order) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    moved = np.repeat(lines.starts[:-1][order] - starts[:-1], lengths) + np.arange(starts[-1])
    room = int(starts[-1]) + 1
    first, token, line, low, high, depth = (np.empty(room + 1, np.int32) for _ in range(6))
    nodes = cpu_trie.grow_trie(lines.tokens[moved], starts, first, token, line, low, high, depth)
    return first[: nodes + 1], token[:nodes], line[:nodes]


def _bars(image: Ints, tag: ListTag, token_bytes: TokenBytes, letter: int) -> tuple[Ints, Ints]:
    """Barred tokens by state of the tag: they complete the tag and go on as no list begins."""
    barred = np.ones(len(tag.tokens), np.bool_)
    usual = np.flatnonzero(tag.states < len(tag.goto))  # at the beginning of a text all are barred
    some, found = tag.offsets[usual], np.zeros(len(usual), np.bool_)
    ends = token_bytes.starts[tag.tokens[usual] + 1]
    cpu_trie.bar_tokens(int(image.ctypes.data), token_bytes.data, token_bytes.starts, some, ends, letter, found)
    barred[usual] = found
    counts = np.bincount(tag.states[barred], minlength=len(tag.goto) + 1)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), tag.tokens[barred]


class Tries:
    """Compiles lists for one vocabulary and caches the latest by content. Threads may share it."""

    def __init__(self, codec: Codec, vocabulary: int) -> None:
        self._codec, self._vocabulary = codec, vocabulary
        self._token_bytes: TokenBytes | None = None
        self._tags: OrderedDict[str, ListTag] = OrderedDict()
        self._kept: OrderedDict[Listed, Trie | str] = OrderedDict()  # errors too
        self._bytes = 0
        self._lock = threading.RLock()

    def trie(self, listed: Listed) -> Trie:
        """The trie of a list. Concurrent calls for the same list compile it once. Raises `BadPrompt`."""
        with self._lock:
            known = self._kept.get(listed)
            if known is None:
                known = self._kept[listed] = self._compile(listed)
                self._bytes += _size(known)
                while len(self._kept) > 1 and (len(self._kept) > MOST_KEPT or self._bytes > KEPT_BYTES):
                    self._bytes -= _size(self._kept.popitem(last=False)[1])
            else:
                self._kept.move_to_end(listed)
        if isinstance(known, str):
            raise BadPrompt(known)
        return known

    def _compile(self, listed: Listed) -> Trie | str:
        try:
            token_bytes = self.token_bytes()
            lines = spelt_lines(listed, self._codec, token_bytes)
            if listed.begin not in self._tags:
                self._tags[listed.begin] = tag_of(listed.begin, token_bytes)
                while len(self._tags) > MOST_TAGS:
                    self._tags.popitem(last=False)
            self._tags.move_to_end(listed.begin)
            return build_trie(lines, self._tags[listed.begin], token_bytes, listed.ends)
        except BadPrompt as error:
            return str(error)

    def token_bytes(self) -> TokenBytes:
        """The bytes of the vocabulary's tokens. Raises `BadPrompt`."""
        with self._lock:
            if self._token_bytes is None:
                self._token_bytes = TokenBytes(self._codec.spelling, self._vocabulary)
            return self._token_bytes


def _size(known: Trie | str) -> int:
    return len(known) if isinstance(known, str) else known.image.nbytes
