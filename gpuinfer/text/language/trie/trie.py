"""Lists compiled for one vocabulary: a tree of tokens, and the tag that leads into it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Listed
from gpuinfer.text.language.spelling import Codec
from gpuinfer.text.language.trie import cpu_grow, cpu_image, cpu_tag
from gpuinfer.text.language.trie.lines import Lines, lines_of
from gpuinfer.text.language.trie.tag import Tag, tag_of
from gpuinfer.text.language.trie.tokens import Ints, TokenBytes

MOST_KEPT, KEPT_BYTES = 256, 256 << 20  # compiled lists in the cache, and what their arrays take
MOST_TAGS = 16
MOST_PADDED = 1 << 20  # tokens of all lines, each as long as the longest, that are sorted column by column


@dataclass(frozen=True, slots=True, eq=False)
class Trie:
    """One list, compiled; nothing in it changes, so all rows of all threads share it.

    `image`: int32, as `cpu_image` describes it; `words`: int32 words of a set of units; `most`: how many tokens any
    place allows or bars at most.
    """

    image: Ints
    words: int
    most: int
    nodes: int

    @property
    def tagged(self) -> bool:
        """Whether a tag begins the list; else the answer does."""
        return bool(self.image[cpu_image.LENGTH])

    @property
    def address(self) -> int:
        return int(self.image.ctypes.data)


def build(lines: Lines, tag: Tag, said: TokenBytes, ends: bool) -> Trie:
    """From the tokens of all lines. Raises `BadPrompt` where a text could be read in two ways."""
    order = sorted_lines(lines)
    first, token, line = _grown(lines, order)
    codes, sets, count = _codes([lines.units[number] for number in order.tolist()], len(lines.names))
    nodes = len(token)
    need, item = np.zeros(nodes, np.int32), np.zeros(nodes, np.int32)
    count = cpu_grow.gather(nodes, first, line, codes, sets, count, need, item)
    _check_ambiguous(first, token, item)
    words = sets.shape[1]
    parts = {
        cpu_image.FIRST: first,
        cpu_image.TOKEN: token,
        cpu_image.NEED: need,
        cpu_image.ITEM: item,
        cpu_image.SETS: sets[:count].reshape(-1),
        cpu_image.GOTO: tag.goto.reshape(-1),
    }
    lengths = {cpu_image.NODES: nodes, cpu_image.WORDS: words, cpu_image.LENGTH: len(tag.goto)}
    image = _joined(parts, {**lengths, cpu_image.ENDS: int(ends)})
    letter = int(said.data[said.starts[token[1]]])  # each line begins with the separator
    starts, bars = _bars(image, tag, said, letter)
    image = np.concatenate([image, starts, bars])
    image[cpu_image.BAR_STARTS], image[cpu_image.BARS] = len(image) - len(bars) - len(starts), len(image) - len(bars)
    degrees = np.diff(first)
    most = max(int(degrees.max()) + int(degrees[0]), int(np.diff(starts).max()))
    image[cpu_image.MOST] = most
    return Trie(image, words, most, nodes)


def sorted_lines(lines: Lines) -> NDArray[np.int64]:
    """Their numbers, in the order of their tokens; a line goes before those that it begins."""
    lengths = np.diff(lines.starts)
    if int(lengths.max()) * len(lengths) > MOST_PADDED:
        written, starts = lines.tokens.astype(">u4").tobytes(), lines.starts.tolist()
        keys = [written[4 * start : 4 * end] for start, end in pairwise(starts)]
        return np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)
    padded = np.full((int(lengths.max()), len(lengths)), -1, np.int32)
    inside = np.arange(len(padded))[:, None] < lengths
    padded.T[inside.T] = lines.tokens
    return np.lexsort(padded[::-1])


def _grown(lines: Lines, order: NDArray[np.int64]) -> tuple[Ints, Ints, Ints]:
    """First children [nodes + 1], tokens [nodes] and lines [nodes] of the tree of the sorted lines."""
    lengths = np.diff(lines.starts)[order]
    starts = np.zeros(len(order) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    moved = np.repeat(lines.starts[:-1][order] - starts[:-1], lengths) + np.arange(starts[-1])
    room = int(starts[-1]) + 1
    first, token, line, low, high, depth = (np.empty(room + 1, np.int32) for _ in range(6))
    nodes = cpu_grow.grow(lines.tokens[moved], starts, first, token, line, low, high, depth)
    return first[: nodes + 1], token[:nodes], line[:nodes]


def _codes(units: Sequence[Sequence[int]], count: int) -> tuple[Ints, NDArray[np.int32], int]:
    """What `item` says of each line, the sets of units, and how many of these there are already: those of items that
    have several.
    """
    several = sum(len(some) > 1 for some in units)
    sets = np.zeros((several + 2 * len(units) + 1, -(-max(count, 1) // 32)), np.int32)
    codes, row = np.empty(len(units), np.int32), 0
    for place, some in enumerate(units):
        codes[place] = some[0] if len(some) == 1 else -3 - row if some else cpu_image.END
        if len(some) > 1:
            for unit in some:
                sets[row, unit // 32] |= np.uint32(1 << unit % 32).astype(np.int32)
            row += 1
    return codes, sets, row


def _check_ambiguous(first: Ints, token: Ints, item: Ints) -> None:
    """Where an item is complete and another goes on, the tokens of the one may not be those of a new line."""
    after_item = np.repeat(item != cpu_image.NO_ITEM, np.diff(first))  # of each node but the first, in order
    if np.isin(token[1:][after_item], token[first[0] : first[1]]).any():
        raise BadPrompt(
            "an item of the list begins with another one, and goes on as the separator does: the text could be "
            "read in two ways. Use another separator."
        )


def _joined(parts: dict[int, NDArray[np.int32]], numbers: dict[int, int]) -> Ints:
    header = np.zeros(cpu_image.HEADER, np.int32)
    place = len(header)
    for field, part in parts.items():
        header[field] = place
        place += len(part)
    for field, number in numbers.items():
        header[field] = number
    return np.concatenate([header, *parts.values()])


def _bars(image: Ints, tag: Tag, said: TokenBytes, letter: int) -> tuple[Ints, Ints]:
    """Tokens that may not come, by the state of the tag: they say it, and then what no list begins with."""
    barred = np.ones(len(tag.tokens), np.bool_)
    usual = np.flatnonzero(tag.states < len(tag.goto))  # at the beginning of a text none is taken
    some, found = tag.offsets[usual], np.zeros(len(usual), np.bool_)
    ends = said.starts[tag.tokens[usual] + 1]
    cpu_tag.bar(int(image.ctypes.data), said.data, said.starts, some, ends, letter, found)
    barred[usual] = found
    counts = np.bincount(tag.states[barred], minlength=len(tag.goto) + 1)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), tag.tokens[barred]


class Tries:
    """Compiles lists for one vocabulary and keeps the latest, by content. Threads may share it."""

    def __init__(self, codec: Codec, vocabulary: int) -> None:
        self._codec, self._vocabulary = codec, vocabulary
        self._said: TokenBytes | None = None
        self._tags: OrderedDict[str, Tag] = OrderedDict()
        self._kept: OrderedDict[Listed, Trie | str] = OrderedDict()  # bad ones too, with the reason
        self._bytes = 0
        self._lock = threading.Lock()

    def trie(self, listed: Listed) -> Trie:
        """Raises `BadPrompt`. Those who ask for the same one at once wait for the first of them."""
        with self._lock:
            known = self._kept.get(listed)
            if known is None:
                known = self._compiled(listed)
                self._keep(listed, known)
            else:
                self._kept.move_to_end(listed)
        if isinstance(known, str):
            raise BadPrompt(known)
        return known

    def said(self) -> TokenBytes:
        """What the vocabulary's tokens say. Raises `BadPrompt`."""
        with self._lock:
            return self._opened()

    def _opened(self) -> TokenBytes:
        if self._said is None:
            self._said = TokenBytes(self._codec.spelling, self._vocabulary)
        return self._said

    def _compiled(self, listed: Listed) -> Trie | str:
        try:
            said = self._opened()
            lines = lines_of(listed, self._codec, said)
            return build(lines, self._tag(listed.begin, said), said, listed.ends)
        except BadPrompt as error:
            return str(error)

    def _tag(self, text: str, said: TokenBytes) -> Tag:
        if text not in self._tags:
            self._tags[text] = tag_of(text, said)
            while len(self._tags) > MOST_TAGS:
                self._tags.popitem(last=False)
        self._tags.move_to_end(text)
        return self._tags[text]

    def _keep(self, listed: Listed, known: Trie | str) -> None:
        self._kept[listed] = known
        self._bytes += _size(known)
        while len(self._kept) > 1 and (len(self._kept) > MOST_KEPT or self._bytes > KEPT_BYTES):
            self._bytes -= _size(self._kept.popitem(last=False)[1])


def _size(known: Trie | str) -> int:
    return len(known) if isinstance(known, str) else known.image.nbytes
