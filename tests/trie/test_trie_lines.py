"""What lists are refused, how their lines are spelt, and that every legal list can be said."""

import random

import numpy as np
import pytest
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from listing import KINDS, ORDERS, allowed, codec_of, spelt
from msgspec import structs

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Constraint, Listed
from gpuinfer.text.language import Language, list_trie
from gpuinfer.text.language.list_trie import MOST_ITEMS, MOST_KEPT, TokenBytes, Tries, lines_of


def language_of(kind: str) -> Language:
    codec = codec_of(kind)
    return Language(codec, codec.size + 3, (codec.size,))


LANGUAGES = {kind: language_of(kind) for kind in KINDS}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        pytest.param({"items": ()}, "no items", id="no items"),
        pytest.param({"items": (("u", ""),)}, "0 characters", id="an empty item"),
        pytest.param({"items": (("u", "a\nb"),)}, "holds its separator", id="an item of several lines"),
        pytest.param({"items": (("u", "a</orders>"),)}, "holds its end", id="an item with the end"),
        pytest.param({"items": (("u", "x" * 1001),)}, "1001 characters", id="a long item"),
        pytest.param({"items": (("u", "\ud800"),)}, "no valid Unicode", id="half a character"),
        pytest.param({"items": (("u", "\ufffd"),)}, "replacement character", id="a replacement character"),
        pytest.param({"items": tuple(("u", str(n)) for n in range(MOST_ITEMS + 1))}, "Give at most", id="too many"),
        pytest.param({"separator": ""}, "`separator`", id="no separator"),
        pytest.param({"end": ""}, "`end`", id="no end"),
        pytest.param({"begin": "x" * 65}, "`begin`", id="a long tag"),
        pytest.param({"separator": "aa", "items": (("u", "b"), ("v", "ba"))}, "two ways", id="lines that begin alike"),
    ],
)
def test_a_bad_list_is_refused_with_the_cure(change, complaint):
    listed = structs.replace(ORDERS, **change)
    for _ in range(2):  # the second time from the cache
        with pytest.raises(BadPrompt, match=complaint) as raised:
            LANGUAGES["bytes"].matcher(Constraint(listed=listed))
        assert str(raised.value).endswith(".")


def test_an_item_that_goes_on_as_a_line_begins_is_refused():
    listed = Listed(items=(("u", "a"), ("v", "a, b")), separator=", b", begin="[", end="]")
    with pytest.raises(BadPrompt, match="holds its separator"):
        LANGUAGES["bytes"].matcher(Constraint(listed=listed))
    listed = Listed(items=(("u", "a"), ("v", "a,c")), separator=", ", begin="[", end="]")
    with pytest.raises(BadPrompt, match="read in two ways"):
        LANGUAGES["bytes"].matcher(Constraint(listed=listed))


def test_an_item_beyond_the_vocabulary_is_named():
    listed = structs.replace(ORDERS, separator=", ", items=(("u", "ok"), ("v", "日"), ("w", "ελλ")))
    with pytest.raises(BadPrompt, match="cannot spell 'ελλ'"):
        LANGUAGES["metaspace"].matcher(Constraint(listed=listed))


def test_a_constraint_is_a_list_or_something_else():
    with pytest.raises(BadPrompt, match="sets regex and listed"):
        LANGUAGES["bytes"].matcher(Constraint(regex="a", listed=ORDERS))


@pytest.mark.parametrize("kind", KINDS)
def test_lines_say_what_they_are_told(kind):
    codec, listed = codec_of(kind), structs.replace(ORDERS, separator=", ")
    said = TokenBytes(codec.spelling, codec.size + 3)
    lines = lines_of(listed, codec, said)
    texts = [b"".join(said.of(lines.tokens[a:b])) for a, b in zip(lines.starts, lines.starts[1:], strict=False)]
    items = dict.fromkeys(text for _, text in listed.items)
    assert texts == [f", {text}".encode() for text in (*items, listed.end)]


@st.composite
def legal(draw: st.DrawFn) -> tuple[Listed, list[str]]:
    """A list whose items have one unit each, and what somebody says with it."""
    texts = draw(st.lists(st.text("abAB- é", min_size=1, max_size=6), min_size=1, max_size=40, unique=True))
    items = tuple((draw(st.sampled_from(["x", "y", "z", "w"])), text) for text in texts)
    listed = Listed(items=items, begin="<o>", end="</o>", separator=draw(st.sampled_from([",", "; ", " / "])))
    said: dict[str, str] = {}
    for unit, text in draw(st.permutations(items)):
        said.setdefault(unit, text)
    return listed, list(said.values())[: draw(st.integers(0, 4))]


@pytest.mark.parametrize("kind", KINDS)
@given(asked=legal(), seed=st.integers(0, 1 << 20))
@settings(max_examples=examples(150))
def test_every_legal_list_can_be_said(kind, asked, seed):
    listed, wanted = asked
    language, codec = LANGUAGES[kind], codec_of(kind)
    try:
        at = language.matcher(Constraint(listed=listed))
    except BadPrompt:
        return
    said = TokenBytes(codec.spelling, codec.size)
    lines = lines_of(listed, codec, said)
    of_text = {
        b"".join(said.of(lines.tokens[a:b])).decode(): lines.tokens[a:b].tolist()
        for a, b in zip(lines.starts, lines.starts[1:], strict=False)
    }
    tokens = spelt(codec, "no " + listed.begin, codec.size, random.Random(seed), beyond=False)
    for text in (*wanted, listed.end):
        tokens += of_text[listed.separator + text]
    for token in tokens:
        assert not at.complete
        assert token in allowed(at, language.vocabulary)
        at.advance(token)
    assert at.complete
    assert at.nodes(tokens)[-1] >= 0


def test_compiled_lists_are_shared_and_few_are_kept():
    tries = Tries(codec_of("bytes"), 300)
    assert tries.trie(ORDERS) is tries.trie(structs.replace(ORDERS))
    first = tries.trie(ORDERS)
    for number in range(MOST_KEPT):
        tries.trie(structs.replace(ORDERS, items=(("u", str(number)),)))
    assert tries.trie(ORDERS) is not first
    assert np.array_equal(tries.trie(ORDERS).image, first.image)


def test_one_long_item_among_many_is_sorted_in_another_way_to_the_same(monkeypatch):
    items = tuple((f"u{n}", f"{n % 7} {n} é{'x' * (n % 5)}") for n in range(300))
    listed = Listed(items=(*items, ("long", "7 " * 400)), begin="[", end="]")
    images = []
    for most in (1 << 30, 0):
        monkeypatch.setattr(list_trie, "MOST_PADDED", most)
        images.append(Tries(codec_of("byte level"), 600).trie(listed).image)
    assert np.array_equal(*images)
