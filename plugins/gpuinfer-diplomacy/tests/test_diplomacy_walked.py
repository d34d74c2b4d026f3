"""Whatever a model draws within what the list of orders allows is a legal set of orders, on positions of real games."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import pytest
from diplomacy_positions import positions
from gpuinfer_diplomacy.board import Position
from gpuinfer_diplomacy.orders import BEGIN, constraint, read_answer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gpuinfer.text.language import Language
from gpuinfer.text.language.tokenizer import Bytes, Subwords

MOST = 2000  # tokens of an answer
GO_ON = 0.8  # how often the list goes on where it could end


def words_of(texts: Iterable[str]) -> Tokenizer:
    """Byte pairs learnt from these: tokens that reach over words, units and the tags' borders."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def vocabularies() -> list[tuple[Language, Bytes | Subwords]]:
    texts = [
        f"{BEGIN}\n{order}\n</orders>"
        for _, position in positions(3, seed=1)
        for places in position.legal.values()
        for orders in places.values()
        for order in orders
    ]
    words = Subwords(words_of(texts))
    return [(Language(codec, codec.size, ()), codec) for codec in (Bytes(), words)]


def drawn(
    language: Language, codec: Bytes | Subwords, position: Position, power: str, begin: str, chance: random.Random
) -> str:
    """Tokens at random among those that the tree allows, after free text and the tag, until the list has ended."""
    at = language.matcher(constraint(position, power, begin))
    tokens = codec.encode([f"I think. {begin}"], False)[0].tolist() if begin else []
    for token in tokens:
        at.advance(token)
    words = np.zeros(-(-language.vocabulary // 32), np.int32)
    while not at.complete and len(tokens) < MOST:
        at.mask(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        further = [token for token in allowed if "<" not in language.decode([token])]
        tokens.append(chance.choice(further if further and chance.random() < GO_ON else allowed))
        at.advance(tokens[-1])
    return language.decode(tokens)


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.thorough)])
def test_what_is_drawn_within_the_list_is_legal(vocabularies, count):
    chance, ordered = random.Random(count), 0
    for number, (board, position) in enumerate(positions(count, seed=count)):
        power = chance.choice([power for power, orders in position.legal.items() if orders])
        begin = chance.choice([BEGIN, ""])
        text = drawn(*vocabularies[number % 2], position, power, begin, chance)
        what = read_answer(text, position, power, begin)
        assert (what.illegal, what.repeated, what.unfinished, what.none) == (0, 0, False, False), text
        assert board.accepts(power, what.orders), (position.phase, power, what.orders)
        ordered += len(what.orders)
    assert ordered > count
