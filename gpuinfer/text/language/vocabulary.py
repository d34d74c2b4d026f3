"""Vocabularies that are a list of texts, as nanoGPT's meta.pkl has them: characters, pieces of text, or whole words."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np

from gpuinfer.errors import BadPrompt
from gpuinfer.text.language.detokenizer import Encoded, Spelling, bad_unicode

END_OF_TEXT = "<|endoftext|>"  # GPT-2's name for what stands between documents (Radford et al. 2019)
SPECIAL = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")  # such as <pad>, <|endoftext|>, [CLS]
MOST_NAMED, MOST_NEAR = 5, 3  # missing tokens in an error; tokens that are spelled alike
SHOWN = 40  # characters of a token in an error


def separator_of(tokens: Sequence[str]) -> str:
    """What stands between two tokens in a text: "" where tokens are characters or hold their own spaces, else a space.

    Special tokens, such as `<pad>`, do not count.
    """
    written = [one for one in tokens if one and not SPECIAL.fullmatch(one)]
    joined = all(len(one) == 1 for one in written) or any(one[0] == " " or one[-1] == " " for one in written)
    return "" if joined else " "


class Vocabulary:
    """Token i is the i-th text. Without a separator a text is cut from its beginning, each time the longest token that
    fits; with one it is split there, and an answer's tokens are joined by it. With a space any white space separates,
    but for tokens that are white space themselves.

    `<|endoftext|>` is a special token where it is one of the texts: a prompt may hold it, and no answer shows it.
    """

    def __init__(self, tokens: Sequence[str], separator: str | None = None) -> None:
        """`separator`: None for that of `separator_of`."""
        separator = separator_of(tokens) if separator is None else separator
        self._tokens, self.separator = tuple(tokens), separator
        self._numbers = {text: token for token, text in enumerate(self._tokens)}
        self.size = len(self._tokens)
        self.hidden = frozenset({self._numbers[END_OF_TEXT]} if END_OF_TEXT in self._numbers else ())
        self.literal = self._spelling(frozenset())
        self.spelling = self._spelling(self.hidden)
        lengths: dict[str, set[int]] = {}
        for text in filter(None, self._tokens):
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        self._word = _word_pattern(self._tokens)
        self._cut: Callable[[str], Iterator[str]] = (
            self._split_by_space
            if separator.isspace()
            else self._split_by_separator
            if separator
            else iter
            if all(len(text) == 1 for text in self._tokens)
            else self._longest_matches
        )

    def _spelling(self, hidden: frozenset[int]) -> Spelling:
        def text_of(token: int) -> str | None:
            return self._tokens[token] if 0 <= token < self.size and token not in hidden else None

        def piece(token: int) -> bytes | None:
            return None if (text := text_of(token)) is None else text.encode("utf-8", "replace")

        def joined(token: int) -> str | None:
            return None if (text := text_of(token)) is None else self.separator + text

        return Spelling(False, joined, text_of, joins=True) if self.separator else Spelling(True, piece)

    def encode(self, texts: Sequence[str], special_tokens: bool) -> list[Encoded]:
        return [self._encoded(text) for text in texts]

    def _encoded(self, text: str) -> Encoded:
        numbers = self._numbers
        try:
            return np.array([numbers[one] for one in self._cut(text)], np.int32)
        except KeyError:
            return self._unknown(text)

    def _split_by_separator(self, text: str) -> Iterator[str]:
        return filter(None, text.split(self.separator))

    def _split_by_space(self, text: str) -> Iterator[str]:
        return (found[0] for found in self._word.finditer(text))

    def _longest_matches(self, text: str) -> Iterator[str]:
        """Where no token fits, what stands there up to the next white space, as no token is called."""
        start, end, numbers = 0, len(text), self._numbers
        while start < end:
            for length in self._lengths.get(text[start], ()):
                if (found := text[start : start + length]) in numbers:
                    yield found
                    start += len(found)
                    break
            else:
                unknown = re.match(r"\S+|\s", text[start : start + SHOWN])
                yield (word := text[start] if unknown is None else unknown[0])
                start += len(word)

    def _unknown(self, text: str) -> BadPrompt:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return bad_unicode(error)
        missing = list(
            islice(dict.fromkeys(one for one in self._cut(text) if one not in self._numbers), MOST_NAMED + 1)
        )
        named = ", ".join(repr(one[:SHOWN]) for one in missing[:MOST_NAMED]) + (
            ", …" if len(missing) > MOST_NAMED else ""
        )
        if self._cut is iter:
            return BadPrompt(
                f"the model's alphabet of {self.size} characters lacks {named}. Leave them out of the prompt."
            )
        near = difflib.get_close_matches(missing[0][:SHOWN], self._tokens, n=MOST_NEAR, cutoff=0.5)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        if not self.separator:
            cure = "Leave them out of the prompt."
        elif all(one in self._numbers for one in self._longest_matches(missing[0])):
            cure = (
                f'It is several tokens: write {self.separator!r} between them, or add "separator": "" to the meta '
                "file if the model was trained on texts without it."
            )
        else:
            cure = f"Write words of the vocabulary, with {self.separator!r} between them."
        return BadPrompt(f"the model's vocabulary of {self.size} tokens lacks {named}.{hint} {cure}")

    def decode(self, tokens: Sequence[int], special_tokens: bool = False) -> str:
        hidden = frozenset[int]() if special_tokens else self.hidden
        return self.separator.join(
            [self._tokens[token] for token in tokens if 0 <= token < self.size and token not in hidden]
        )

    def token(self, text: str) -> int | None:
        """The token of this text, if there is one."""
        return self._numbers.get(text)


def _word_pattern(tokens: Sequence[str]) -> re.Pattern[str]:
    """Finds words between white space; tokens that hold white space are found first, the longest before all others."""
    spaced = sorted((one for one in tokens if re.search(r"\s", one)), key=len, reverse=True)
    wholes = [re.escape(one) if one.isspace() else rf"(?<!\S){re.escape(one)}(?!\S)" for one in spaced]
    return re.compile("|".join([*wholes, r"\S+"]))
