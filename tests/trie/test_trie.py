"""Lists between tags: an answer within the masks holds legal lists, every legal list can be drawn, and bad lists are
refused.
"""

import random

import numpy as np
import pytest
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from listing import KINDS, ORDERS, allowed, codec_of, drawn, is_legal, spelt
from msgspec import structs

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Constraint, Listed
from gpuinfer.text.language import Language, list_trie
from gpuinfer.text.language.list_trie import MOST_ITEMS, MOST_KEPT, TokenBytes, Tries, spelt_lines
from gpuinfer.text.language.list_walks import list_support

PADDED = 7  # tokens that the model has and the tokenizer does not
LANGUAGES = {kind: Language(codec_of(kind), codec_of(kind).size + PADDED, (codec_of(kind).size,)) for kind in KINDS}
UNTAGGED = structs.replace(ORDERS, begin="")


def matcher_of(kind, listed):
    return LANGUAGES[kind].matcher(Constraint(listed=listed))


def walked(kind, listed, draws, lists=1):
    """A text with so many lists in it, within what is allowed; None where a token that completes the tag is barred."""
    language, codec = LANGUAGES[kind], codec_of(kind)
    at, tokens = matcher_of(kind, listed), []

    def push(token):
        at.advance(token)
        tokens.append(token)

    for _ in range(lists):
        for _ in range(draws.randrange(4)):
            push(draws.choice(allowed(at, language.vocabulary)))
        for token in spelt(codec, listed.begin, codec.size, draws):
            if token not in allowed(at, language.vocabulary):
                return None
            push(token)
        for _ in range(2000):
            if at.complete or int(at.walks._places[0]["node"]) < 0:
                break
            push(draws.choice(allowed(at, language.vocabulary)))
    return language.decode(tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_of_orders_are_drawn_and_legal(kind):
    listed = ORDERS if kind != "metaspace" else structs.replace(ORDERS, separator=", ")  # it has no new line
    texts = [text for seed in range(60) if (text := walked(kind, listed, random.Random(seed))) is not None]
    assert all(is_legal(text, listed) for text in texts), texts
    assert len({text.partition(listed.begin)[2] for text in texts}) > 20


TEXTS = st.text(st.sampled_from("ab<>é日 h\n"), min_size=1, max_size=4)
SEPARATORS = ["\n", ", ", " ", "ab", "a", "\n\n", "日"]
LISTS = st.builds(
    Listed,
    items=st.lists(st.tuples(st.sampled_from("uvwx"), TEXTS), min_size=1, max_size=8).map(tuple),
    begin=TEXTS,
    end=TEXTS,
    separator=st.sampled_from(SEPARATORS),
    ends=st.booleans(),
)


@pytest.mark.parametrize("kind", KINDS)
@given(listed=LISTS, seed=st.integers(0, 1 << 32))
@settings(max_examples=examples(200))
def test_what_is_drawn_within_any_list_is_legal(kind, listed, seed):
    try:
        text = walked(kind, listed, random.Random(seed), lists=1 if listed.ends else 2)
    except BadPrompt:
        return
    assert text is None or is_legal(text, listed, whole=False), text


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_without_a_tag_is_the_whole_answer(kind):
    listed = structs.replace(UNTAGGED, separator=",") if kind == "metaspace" else UNTAGGED
    texts = set()
    for seed in range(60):
        at = matcher_of(kind, listed)
        tokens = drawn(at, LANGUAGES[kind].vocabulary, random.Random(seed))
        assert at.complete
        assert at.nodes(tokens)[0] == 0 <= min(at.nodes(tokens))
        texts.add(LANGUAGES[kind].decode(tokens))
    assert len(texts) > 20
    for text in texts:
        assert is_legal(f"<orders>{text}", structs.replace(listed, begin="<orders>")), text
    if kind == "bytes":
        assert allowed(matcher_of(kind, listed), LANGUAGES[kind].vocabulary) == [ord("\n")]


BAD = {
    "no items": ({"items": ()}, "no items"),
    "an empty item": ({"items": (("u", ""),)}, "0 characters"),
    "an item of several lines": ({"items": (("u", "a\nb"),)}, "holds its separator"),
    "an item with the end": ({"items": (("u", "a</orders>"),)}, "holds its end"),
    "a long item": ({"items": (("u", "x" * 1001),)}, "1001 characters"),
    "half a character": ({"items": (("u", "\ud800"),)}, "no valid Unicode"),
    "a replacement character": ({"items": (("u", "\ufffd"),)}, "replacement character"),
    "too many": ({"items": tuple(("u", str(n)) for n in range(MOST_ITEMS + 1))}, "Give at most"),
    "no separator": ({"separator": ""}, "`separator`"),
    "no end": ({"end": ""}, "`end`"),
    "a long tag": ({"begin": "x" * 65}, "`begin`"),
    "lines that begin alike": ({"separator": "aa", "items": (("u", "b"), ("v", "ba"))}, "two ways"),
    "an item that goes on as a line begins": ({"separator": ", ", "items": (("u", "a"), ("v", "a,c"))}, "two ways"),
    "untagged, and text after it": ({"begin": "", "ends": False}, "without `begin`"),
    "untagged, after a space": ({"begin": "", "separator": " "}, "without `begin`"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_list_is_refused_with_the_cure(case):
    change, why = BAD[case]
    for _ in range(2):  # the second time from the cache
        with pytest.raises(BadPrompt, match=why) as raised:
            matcher_of("bytes", structs.replace(ORDERS, **change))
        assert str(raised.value).endswith(".")


def test_an_item_beyond_the_vocabulary_and_two_constraints_at_once_are_refused():
    with pytest.raises(BadPrompt, match="cannot spell 'ελλ'"):
        matcher_of("metaspace", Listed(items=(("u", "ok"), ("v", "日"), ("w", "ελλ")), separator=", "))
    with pytest.raises(BadPrompt, match="sets regex and listed"):
        LANGUAGES["bytes"].matcher(Constraint(regex="a", listed=ORDERS))


def spelled_lines(kind, listed):
    """The tokens of each line by its text, which their bytes make up."""
    token_bytes = TokenBytes(codec_of(kind).spelling, codec_of(kind).size)
    lines = spelt_lines(listed, codec_of(kind), token_bytes)
    each = [lines.tokens[a:b] for a, b in zip(lines.starts, lines.starts[1:], strict=False)]
    return {b"".join(token_bytes.of(tokens)).decode(): tokens.tolist() for tokens in each}


@pytest.mark.parametrize("kind", KINDS)
def test_lines_are_spelled_as_they_are_written(kind):
    listed = structs.replace(ORDERS, separator=", ")
    items = dict.fromkeys(text for _, text in listed.items)
    assert list(spelled_lines(kind, listed)) == [f", {text}" for text in (*items, listed.end)]


@st.composite
def legal(draw):
    """A list whose items have one unit each, and the items of an answer."""
    texts = draw(st.lists(st.text("abAB- é", min_size=1, max_size=6), min_size=1, max_size=40, unique=True))
    items = tuple((draw(st.sampled_from(["x", "y", "z", "w"])), text) for text in texts)
    listed = Listed(items=items, begin="<o>", end="</o>", separator=draw(st.sampled_from([",", "; ", " / "])))
    chosen = {}
    for unit, text in draw(st.permutations(items)):
        chosen.setdefault(unit, text)
    return listed, list(chosen.values())[: draw(st.integers(0, 4))]


@pytest.mark.parametrize("kind", KINDS)
@given(case=legal(), seed=st.integers(0, 1 << 20))
@settings(max_examples=examples(150))
def test_every_legal_list_can_be_drawn(kind, case, seed):
    listed, wanted = case
    codec = codec_of(kind)
    try:
        at = matcher_of(kind, listed)
    except BadPrompt:
        return
    spelled = spelled_lines(kind, listed)
    tokens = spelt(codec, "no " + listed.begin, codec.size, random.Random(seed), beyond=False)
    tokens += [token for text in (*wanted, listed.end) for token in spelled[listed.separator + text]]
    for token in tokens:
        assert not at.complete
        assert token in allowed(at, LANGUAGES[kind].vocabulary)
        at.advance(token)
    assert at.complete
    assert at.nodes(tokens)[-1] >= 0


def test_compiled_lists_are_shared_and_few_are_kept():
    tries = Tries(codec_of("bytes"), 300)
    first = tries.trie(ORDERS)
    assert first is tries.trie(structs.replace(ORDERS))
    for number in range(MOST_KEPT):
        tries.trie(structs.replace(ORDERS, items=(("u", str(number)),)))
    assert tries.trie(ORDERS) is not first
    assert np.array_equal(tries.trie(ORDERS).image, first.image)


def test_one_long_item_among_many_is_sorted_in_another_way_to_the_same_order(monkeypatch):
    items = tuple((f"u{n}", f"{n % 7} {n} é{'x' * (n % 5)}") for n in range(300))
    listed = Listed(items=(*items, ("long", "7 " * 400)), begin="[", end="]")
    images = []
    for most in (1 << 30, 0):
        monkeypatch.setattr(list_trie, "MOST_PADDED", most)
        images.append(Tries(codec_of("byte level"), 600).trie(listed).image)
    assert np.array_equal(*images)


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_finds_the_tokens_that_were_allowed(kind):
    codec, language, draws = codec_of(kind), LANGUAGES[kind], random.Random(5)
    listed = structs.replace(ORDERS, ends=False, separator=", ")
    at, tokens, seen = matcher_of(kind, listed), [], []
    script = [token for part in ("so ", listed.begin) for token in spelt(codec, part, codec.size, draws, beyond=False)]
    while len(tokens) < 80:
        seen.append(allowed(at, language.vocabulary))
        tokens.append(script[len(tokens)] if len(tokens) < len(script) else draws.choice(seen[-1]))
        at.advance(tokens[-1])
    nodes = matcher_of(kind, listed).nodes(tokens)
    assert set(nodes[: len(script)]) == {-1}
    assert max(nodes) > 0
    for (ids, only), choices in zip(list_support(listed, language.tries(), tokens, nodes), seen, strict=True):
        assert choices == (ids.tolist() if only else sorted(set(range(language.vocabulary)) - set(ids.tolist())))


def test_a_trainer_with_another_list_is_refused():
    language, tokens = LANGUAGES["bytes"], list(b"<orders>\nA PAR H\n</orders>")
    nodes = matcher_of("bytes", ORDERS).nodes(tokens)
    assert len(list_support(ORDERS, language.tries(), tokens, nodes)) == len(tokens)
    other = structs.replace(ORDERS, items=(("PAR", "A PAR S"),))
    for given_nodes, why in ((nodes, "another list"), (None, "not allowed by its list")):
        with pytest.raises(BadPrompt, match=why):
            list_support(other, language.tries(), tokens, given_nodes)
