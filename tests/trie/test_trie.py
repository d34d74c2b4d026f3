"""Whatever is drawn within what a list allows is a legal list, and every legal list can be said."""

import random

import pytest
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from listing import KINDS, ORDERS, allowed, codec_of, is_legal, spelt
from msgspec import structs

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Constraint, Listed
from gpuinfer.text.language import Language

PADDED = 7  # tokens that the model has and the tokenizer does not


def language_of(kind: str) -> Language:
    codec = codec_of(kind)
    return Language(codec, codec.size + PADDED, (codec.size,))


LANGUAGES = {kind: language_of(kind) for kind in KINDS}


def walked(language: Language, codec: object, listed: Listed, draws: random.Random, lists: int = 1) -> str | None:
    """A text with so many lists in it, within what is allowed; None where a token that says the tag was barred."""
    at, tokens = language.matcher(Constraint(listed=listed)), []
    for _ in range(lists):
        for _ in range(draws.randrange(4)):
            tokens.append(draws.choice(allowed(at, language.vocabulary)))
            at.advance(tokens[-1])
        for token in spelt(codec, listed.begin, codec.size, draws):
            if token not in allowed(at, language.vocabulary):
                return None
            at.advance(token)
            tokens.append(token)
        for _ in range(2000):
            if at.complete or not _inside(at):
                break
            tokens.append(draws.choice(allowed(at, language.vocabulary)))
            at.advance(tokens[-1])
    return language.decode(tokens)


def _inside(at: object) -> bool:
    return int(at.walks._places[0]["node"]) >= 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drawn_is_a_legal_list(kind):
    language, codec, found = LANGUAGES[kind], codec_of(kind), set()
    listed = ORDERS if kind != "metaspace" else structs.replace(ORDERS, separator=", ")  # it has no new line
    for seed in range(60):
        text = walked(language, codec, listed, random.Random(seed))
        if text is not None:
            assert is_legal(text, listed), text
            found.add(text.partition(listed.begin)[2])
    assert len(found) > 20


TEXTS = st.text(st.sampled_from("ab<>é日 h\n"), min_size=1, max_size=4)


@st.composite
def lists(draw: st.DrawFn) -> Listed:
    return Listed(
        items=tuple(draw(st.lists(st.tuples(st.sampled_from("uvwx"), TEXTS), min_size=1, max_size=8))),
        begin=draw(TEXTS),
        end=draw(TEXTS),
        separator=draw(st.sampled_from(["\n", ", ", " ", "ab", "a", "\n\n", "日"])),
        ends=draw(st.booleans()),
    )


@pytest.mark.parametrize("kind", KINDS)
@given(listed=lists(), seed=st.integers(0, 1 << 32))
@settings(max_examples=examples(200))
def test_what_is_drawn_within_any_list_is_legal(kind, listed, seed):
    language, codec, draws = LANGUAGES[kind], codec_of(kind), random.Random(seed)
    try:
        text = walked(language, codec, listed, draws, lists=1 if listed.ends else 2)
    except BadPrompt:
        return
    if text is not None:
        assert is_legal(text, listed, whole=False), text
