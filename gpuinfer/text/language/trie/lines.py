"""What a list says, line by line, as tokens.

A line is the separator and an item, or the separator and the end. It is said in one way: by the tokens that the
tokenizer makes of it, where they say nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Listed
from gpuinfer.text.language.spelling import REPLACEMENT, Codec
from gpuinfer.text.language.trie import cpu_tag
from gpuinfer.text.language.trie.tokens import BYTE, Ints, TokenBytes

MOST_ITEMS = 10_000
LONGEST_ITEM = 1_000  # characters
LONGEST_ITEMS = 1 << 20  # of all together
LONGEST_TAG = 64  # bytes
NONE: Ints = np.zeros(0, np.int32)
SHOWN = 60  # characters of an item in a message


@dataclass(frozen=True, slots=True, eq=False)
class Lines:
    """`tokens` int32, those of line i from `starts[i]` to `starts[i + 1]`; `units`: of each line the numbers of its
    units, none for the end; `names`: of all units.
    """

    tokens: Ints
    starts: NDArray[np.int64]
    units: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]


def check(listed: Listed) -> None:
    """Raises `BadPrompt` for a list that is empty, too long, or can be read in two ways."""
    for name in ("begin", "end", "separator") if listed.begin else ("end", "separator"):
        _check_tag(name, getattr(listed, name))
    if not listed.begin and (not listed.ends or listed.separator.startswith(" ")):
        raise BadPrompt(
            "a list without `begin` begins with the answer: it must end it too (`ends`), and its separator may not "
            "begin with a space, which some tokenizers lose there. Give it a `begin`."
        )
    if not listed.items:
        raise BadPrompt("the list has no items: nothing could be said in it. Give some, or leave the constraint out.")
    texts = [text for _, text in listed.items]
    if len(texts) > MOST_ITEMS or sum(map(len, texts)) > LONGEST_ITEMS:
        raise BadPrompt(
            f"the list has {len(texts)} items of {sum(map(len, texts))} characters. "
            f"Give at most {MOST_ITEMS} of {LONGEST_ITEMS} in all."
        )
    for text in texts:
        _check_item(text, listed)


def _check_tag(name: str, text: str) -> None:
    if not text or len(text.encode("utf-8", "replace")) > LONGEST_TAG:
        raise BadPrompt(f"`{name}` of the list has {len(text)} characters. Give one to {LONGEST_TAG} bytes.")
    _check_unicode(text)


def _check_item(text: str, listed: Listed) -> None:
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


def lines_of(listed: Listed, codec: Codec, said: TokenBytes) -> Lines:
    """Raises `BadPrompt` for a list that `check` refuses, or that the tokenizer cannot spell."""
    check(listed)
    names = tuple(dict.fromkeys(unit for unit, _ in listed.items))
    numbers = {name: number for number, name in enumerate(names)}
    units: dict[str, list[int]] = {}
    for unit, text in listed.items:
        units.setdefault(text, []).append(numbers[unit])
    texts = [listed.separator + text for text in (*units, listed.end)]
    spelt = spell(texts, listed, codec, said)
    if not listed.ends and said.kinds[spelt[-1][-1]] == BYTE:
        raise BadPrompt(
            f"the tokenizer spells the end of {listed.end!r} byte by byte, which what follows could undo. "
            "Use another `end`, or let the answer end there (`ends`)."
        )
    if not listed.begin and said.differs:
        _check_first(spelt, said)
    return Lines(
        np.concatenate(spelt), offsets(spelt), (*(tuple(dict.fromkeys(some)) for some in units.values()), ()), names
    )


def _check_first(spelt: Sequence[Ints], said: TokenBytes) -> None:
    """Each line may be the first of the text, where its first token must say the same as further on."""
    starts, data = said.lead
    for token in {int(tokens[0]) for tokens in spelt}:
        if data[starts[token] : starts[token + 1]].tobytes() != said.said([token])[0]:
            raise BadPrompt(
                "the tokenizer says something else at the beginning of a text than further on, and a list without "
                "`begin` begins there. Give it a `begin`."
            )


def spell(texts: Sequence[str], listed: Listed, codec: Codec, said: TokenBytes) -> list[Ints]:
    """The tokens of each text, in the middle of a longer one."""
    found: list[Ints | None] = [None] * len(texts)
    before = ("",) if said.raw else (listed.begin, "x", "")  # what a tokenizer puts before a text is no part of it
    for context in before:
        left = [number for number, tokens in enumerate(found) if tokens is None]
        for number, tokens in zip(left, _spelt(context, [texts[number] for number in left], codec, said), strict=True):
            found[number] = tokens
    for tokens, text in zip(found, texts, strict=True):
        if tokens is None:
            item = text.removeprefix(listed.separator)
            raise BadPrompt(
                f"the tokenizer cannot spell {_shown(item)} of the list after {listed.separator!r}. "
                "Write it with characters that the model knows."
            )
    return [tokens for tokens in found if tokens is not None]


def _spelt(context: str, texts: Sequence[str], codec: Codec, said: TokenBytes) -> list[Ints | None]:
    """Of each text the tokens after the context that say it and no more."""
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
    cpu_tag.endings(tokens.astype(np.int32), starts, letters, text_starts, said.starts, said.data, places)
    return [one[place:] if place >= 0 else None for one, place in zip(encoded, places.tolist(), strict=True)]


def offsets(parts: Sequence[Sized]) -> NDArray[np.int64]:
    """Where each part begins when they lie one after another, and where the last one ends."""
    starts = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=starts[1:])
    return starts


def _shown(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 1] + "…")
