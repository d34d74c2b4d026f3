"""A vocabulary and legal orders of the size that large models and large games have, made up from a seed.

The orders are such as Diplomacy's: a unit, what it does, and where; each a line of some seven tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from gpuinfer.text.language.spelling import Encoded, Spelling

PLACES = 75  # of the map
UNITS = 17  # that one power may have at most
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Vocabulary:
    """`size` tokens: the bytes, the words of orders, and words that nobody says. A `Codec`: the longest token first."""

    def __init__(self, size: int, seed: int = 0) -> None:
        dice = random.Random(seed)
        words = [f" {word}" for word in places(dice)] + [" A", " F", " S", " C", " H", " -", ">\n", "</", "orders"]
        known = dict.fromkeys([bytes([byte]) for byte in range(256)] + [word.encode() for word in words])
        while len(known) < size:
            known[" ".join("".join(dice.choices(LETTERS, k=3)).lower() for _ in range(2)).encode()] = None
        self.pieces, self.size = list(known), size
        self.tokens = {piece: token for token, piece in enumerate(self.pieces)}
        self.hidden: frozenset[int] = frozenset()
        self.spelling = self.literal = _spelling(self.pieces)

    def encode(self, texts: Sequence[str], special_tokens: bool) -> list[Encoded]:
        return [np.array(list(self._tokens(text.encode())), np.int32) for text in texts]

    def decode(self, tokens: Sequence[int], special_tokens: bool = False) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode("utf-8", "replace")

    def _tokens(self, text: bytes) -> list[int]:
        found, place = [], 0
        while place < len(text):
            end = min(len(text), place + 8)
            while text[place:end] not in self.tokens:
                end -= 1
            found.append(self.tokens[text[place:end]])
            place = end
        return found


def _spelling(pieces: Sequence[bytes]) -> Spelling:
    from gpuinfer.text.language.spelling import Spelling

    return Spelling(True, pieces.__getitem__)


def places(dice: random.Random) -> list[str]:
    return [
        "".join(word) for word in dice.sample([(a, b, c) for a in LETTERS for b in LETTERS for c in "AEIOU"], PLACES)
    ]


def orders(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """So many orders, with the unit that each is for; no two are alike."""
    names, dice = places(random.Random(seed)), random.Random(seed + 1)
    found: dict[str, str] = {}
    while len(found) < count:
        unit, kind = dice.choice(names[:UNITS]), dice.choice("AF")
        one, other = dice.sample(names, 2)
        text = dice.choice([
            f" {kind} {unit} H", f" {kind} {unit} - {one}", f" {kind} {unit} S A {one}",
            f" {kind} {unit} S A {one} - {other}", f" F {unit} C A {one} - {other}",
        ])  # fmt: skip
        found.setdefault(text, unit)
    return [(unit, text) for text, unit in found.items()]
