"""Lists, vocabularies for them, and a judge of texts that does not look at tokens."""

from __future__ import annotations

import random
import sys
from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from gpuinfer.generation import Listed

sys.path.insert(0, str(Path(__file__).parent.parent / "text"))
from language_samples import byte_fallback, byte_level

from gpuinfer.text.language.detokenizer import Codec
from gpuinfer.text.language.tokenizer import Bytes, Subwords

ORDERS = Listed(
    items=(
        ("PAR", "A PAR H"), ("PAR", "A PAR - BUR"), ("PAR", "A PAR - BUR VIA"), ("BRE", "F BRE - MAO"),
        ("BRE", "F BRE S A PAR"), ("MAR", "A MAR - SPA"), ("MAR", "A MAR H"), ("one", "WAIVE"), ("two", "WAIVE"),
    )
)  # fmt: skip


@cache
def codec_of(kind: str) -> Codec:
    if kind == "bytes":
        return Bytes()
    text = {"byte level": byte_level, "byte fallback": byte_fallback, "metaspace": lambda: byte_fallback(True)}[kind]()
    return Subwords(Tokenizer.from_str(text))


KINDS = ["byte level", "byte fallback", "metaspace", "bytes"]


def is_legal(text: str, listed: Listed, *, whole: bool = True) -> bool:
    """Whether each list in the text is one: read from left to right, by text alone. `whole`: none may be cut off."""
    place = text.find(listed.begin)
    while place >= 0:
        end = _end_of_list(text, place + len(listed.begin), listed, [])
        if end is None:
            return not whole and _could_go_on(text[place + len(listed.begin) :], listed, [])
        if listed.ends:
            return end == len(text)
        place = text.find(listed.begin, end)
    return True


def _end_of_list(text: str, place: int, listed: Listed, said: list[str]) -> int | None:
    if not text.startswith(listed.separator, place):
        return None
    place += len(listed.separator)
    if text.startswith(listed.end, place):
        return place + len(listed.end)
    for item in {item for _, item in listed.items}:
        if text.startswith(item, place) and units_suffice([*said, item], listed):
            found = _end_of_list(text, place + len(item), listed, [*said, item])
            if found is not None:
                return found
    return None


def _could_go_on(text: str, listed: Listed, said: list[str]) -> bool:
    """Whether the text begins a list."""
    for line in {listed.separator + item for _, item in listed.items} | {listed.separator + listed.end}:
        if line.startswith(text):
            return True
        item = line[len(listed.separator) :]
        follows = text.startswith(line) and units_suffice([*said, item], listed)
        if follows and _could_go_on(text[len(line) :], listed, [*said, item]):
            return True
    return False


def units_suffice(said: list[str], listed: Listed) -> bool:
    """Whether each of the items can have a unit of its own."""
    if not said:
        return True
    first, *rest = said
    for unit, item in listed.items:
        if item == first:
            left = tuple(pair for pair in listed.items if pair[0] != unit)
            if units_suffice(rest, Listed(items=left)):
                return True
    return False


def allowed(matcher: object, vocabulary: int) -> list[int]:
    words = np.zeros(-(-vocabulary // 32), np.int32)
    matcher.mask(words)  # type: ignore[attr-defined]
    found = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    return found[found < vocabulary].tolist()


def drawn(matcher: object, vocabulary: int, draws: random.Random, most: int = 400) -> list[int]:
    """Tokens at random, within what is allowed, until the list is complete."""
    tokens: list[int] = []
    while not matcher.complete and len(tokens) < most:  # type: ignore[attr-defined]
        token = draws.choice(allowed(matcher, vocabulary))
        matcher.advance(token)  # type: ignore[attr-defined]
        tokens.append(token)
    return tokens


def spelt(codec: Codec, text: str, vocabulary: int, draws: random.Random, beyond: bool = True) -> list[int]:
    """Tokens at random that spell a text in the middle of another; the last may spell more (`beyond`)."""
    left, tokens = text.encode(), []
    while left:
        pieces = _pieces(codec, vocabulary).items()
        choices = [token for token, piece in pieces if left.startswith(piece)]
        if beyond:
            choices += [token for token, piece in pieces if len(piece) > len(left) and piece.startswith(left)]
        if not choices:
            return []  # a character that the vocabulary lacks
        token = draws.choice(choices)
        tokens.append(token)
        left = left[len(_pieces(codec, vocabulary)[token]) :]
    return tokens


@cache
def _pieces(codec: Codec, vocabulary: int) -> dict[int, bytes]:
    """The bytes of each token that has some."""
    pieces = ((token, codec.spelling.piece(token)) for token in range(vocabulary))
    return {token: piece.encode() if isinstance(piece, str) else piece for token, piece in pieces if piece}
