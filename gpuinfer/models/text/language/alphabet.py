"""Tokens that are bytes, as of the built-in models, and tokens that are characters, as of nanoGPT's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from gpuinfer.errors import BadPrompt
from gpuinfer.models.text.language.codec import Encoded, bad_unicode
from gpuinfer.models.text.language.spelling import Spelling

NAMED = 5  # of the characters that are not in an alphabet, how many an error shows


class Bytes:
    """Token i is byte i; what is above is special."""

    size = 256

    def __init__(self) -> None:
        self.spelling = self.literal = Spelling(True, lambda token: bytes([token]) if 0 <= token < 256 else None)
        self.hidden: frozenset[int] = frozenset()

    def encode(self, texts: Sequence[str], special_tokens: bool) -> list[Encoded]:
        return [self._encoded(text) for text in texts]

    def decode(self, tokens: Sequence[int], special_tokens: bool = False) -> str:
        return bytes([token for token in tokens if 0 <= token < 256]).decode("utf-8", "replace")

    def _encoded(self, text: str) -> Encoded:
        try:
            return np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        except UnicodeEncodeError as error:
            return bad_unicode(error)


class Characters:
    """Token i is the i-th character. There are no special tokens."""

    def __init__(self, characters: Sequence[str]) -> None:
        self._characters = tuple(characters)
        self._tokens = {character: token for token, character in enumerate(self._characters)}
        self.size = len(self._characters)
        self.spelling = self.literal = Spelling(True, self._piece)
        self.hidden: frozenset[int] = frozenset()

    def encode(self, texts: Sequence[str], special_tokens: bool) -> list[Encoded]:
        return [self._encoded(text) for text in texts]

    def decode(self, tokens: Sequence[int], special_tokens: bool = False) -> str:
        return "".join([self._characters[token] for token in tokens if 0 <= token < self.size])

    def token(self, character: str) -> int | None:
        return self._tokens.get(character)

    def _encoded(self, text: str) -> Encoded:
        try:
            return np.array([self._tokens[character] for character in text], np.int32)
        except KeyError:
            return self._missing(text)

    def _missing(self, text: str) -> BadPrompt:
        missing = list(islice(dict.fromkeys(one for one in text if one not in self._tokens), NAMED + 1))
        named = ", ".join(map(repr, missing[:NAMED])) + (", …" if len(missing) > NAMED else "")
        return BadPrompt(f"the model's alphabet of {self.size} characters lacks {named}. Leave them out of the prompt.")

    def _piece(self, token: int) -> bytes | None:
        if not 0 <= token < self.size:
            return None
        return self._characters[token].encode("utf-8", "replace")
