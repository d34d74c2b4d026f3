"""Text as it grows equals the text of all tokens at once, whatever the tokens."""

import random

import pytest
from counts import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from language_samples import KINDS, Files, shape
from tokenizers import Tokenizer

from gpuinfer.text.language import Language, open_language
from gpuinfer.text.language.growing import Growing
from gpuinfer.text.language.subwords import Subwords

TOKENIZERS = {kind: Tokenizer.from_str(make()) for kind, make in KINDS.items()}
LANGUAGES = {kind: Language(Subwords(one), one.get_vocab_size()) for kind, one in TOKENIZERS.items()}
LANGUAGES["bytes"] = open_language(Files(bytes=True), shape(260, end_tokens=(256,)))
LANGUAGES["characters"] = open_language(Files(characters=tuple("abc de\né日😀")), shape(16))
TEXTS = ["hello 日本 😀😀", "  two spaces", "é\tü", "e4 e5 Nf3", "�", "{ the lo: a b"]


@st.composite
def tokens_of(draw: st.DrawFn, language: Language) -> list[int]:
    """Tokens at random, runs of bytes, and tokens of texts, one after another."""
    single = st.integers(0, language.vocabulary - 1).map(lambda token: [token])
    low = st.lists(st.integers(0, min(language.vocabulary, 262) - 1), max_size=6)
    written = st.sampled_from(TEXTS).map(lambda text: byte_tokens(language, text))
    return [token for some in draw(st.lists(st.one_of(single, low, written), max_size=12)) for token in some]


def byte_tokens(language: Language, text: str) -> list[int]:
    """A text as tokens of one byte each, where the vocabulary has them."""
    spelling = language.growing()._spelling
    single = {piece: token for token in range(language.vocabulary) if isinstance(piece := spelling.piece(token), bytes)}
    return [single[bytes([byte])] for byte in text.encode() if bytes([byte]) in single]


def grown(language: Language, tokens: list[int], stop: tuple[str, ...] = ()) -> tuple[Growing, str | None]:
    growing = language.growing(stop)
    for token in tokens:
        if (found := growing.push(token)) is not None:
            return growing, found
    return growing, None


def check_growth(kind: str, tokens: list[int]) -> None:
    language = LANGUAGES[kind]
    growing, shown = language.growing(), [""]
    for count, token in enumerate(tokens, 1):
        growing.push(token)
        assert growing.text == language.decode(tokens[:count])
        assert growing.shown.startswith(shown[-1])
        shown.append(growing.shown)
    assert growing.kept == len(tokens)
    whole = language.decode(tokens)
    assert all(whole.startswith(one) for one in shown)


@pytest.mark.parametrize("kind", LANGUAGES)
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_a_text_grows_to_what_all_its_tokens_decode_to(kind, data):
    check_growth(kind, data.draw(tokens_of(LANGUAGES[kind])))


@pytest.mark.soak
@pytest.mark.parametrize("kind", LANGUAGES)
@settings(max_examples=2000, deadline=None)
@given(data=st.data())
def test_a_text_grows_to_what_all_its_tokens_decode_to_at_length(kind, data):
    check_growth(kind, data.draw(tokens_of(LANGUAGES[kind])))


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_decoding_is_that_of_the_tokenizers_library(kind):
    draws = random.Random(5)
    tokenizer, language = TOKENIZERS[kind], LANGUAGES[kind]
    for _ in range(200):
        tokens = [draws.randrange(language.vocabulary) for _ in range(draws.randrange(12))]
        assert language.decode(tokens) == grown(language, tokens)[0].text == tokenizer.decode(tokens)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_special_tokens_are_part_of_the_text_on_request(kind):
    draws = random.Random(6)
    tokenizer, language = TOKENIZERS[kind], LANGUAGES[kind]
    special = [token for token, entry in tokenizer.get_added_tokens_decoder().items() if entry.special]
    for _ in range(200):
        tokens = [draws.choice([draws.randrange(language.vocabulary), *special]) for _ in range(draws.randrange(12))]
        growing = language.growing(special_tokens=True)
        for token in tokens:
            growing.push(token)
        assert language.decode(tokens, True) == growing.text == tokenizer.decode(tokens, skip_special_tokens=False)


def test_half_a_character_is_never_shown():
    for kind in ("bytes", "byte level", "byte fallback"):
        language = LANGUAGES[kind]
        growing = language.growing()
        for token in byte_tokens(language, "日本😀"):
            growing.push(token)
            assert "�" not in growing.shown
        assert growing.text == "日本😀"


def test_bytes_that_turn_out_to_be_no_text_replace_their_whole_run():
    language = LANGUAGES["byte fallback"]
    broken = [byte + 3 for byte in b"\xc3\xa9\xff"]
    growing, _ = grown(language, broken)
    assert growing.text == language.decode(broken) == "���"


def first_stop(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """By definition: read the text character by character; what ends first is cut off, and of those the longest."""
    for end in range(len(text) + 1):
        ended = [one for one in stop if text[:end].endswith(one)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("kind", ["bytes", "byte level", "byte fallback", "metaspace", "characters"])
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_stop_strings_are_found_wherever_the_tokens_end(kind, data):
    language = LANGUAGES[kind]
    tokens = data.draw(tokens_of(language))
    whole = language.decode(tokens)
    within = st.tuples(st.integers(0, 40), st.integers(1, 5)).map(lambda at: whole[at[0] : sum(at)])
    stop = tuple(data.draw(st.lists(st.one_of(within, st.text("ab 日", max_size=2)), max_size=3)))
    stop = tuple(one for one in stop if one and "�" not in one)
    if "�" in whole and stop:
        return  # where a run of bytes turns out to be no text, its characters had counted until then
    growing, found = grown(language, tokens, stop)
    assert (growing.text, found) == first_stop(whole, stop)
    assert growing.shown == growing.text[: len(growing.shown)]
    assert language.decode(tokens[: growing.kept]).startswith(growing.text)
    if found and growing.kept:
        assert not language.decode(tokens[: growing.kept - 1]).startswith(growing.text)


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_none():
    language = LANGUAGES["bytes"]
    growing = language.growing(["###", "\n\n"])
    shown = []
    for byte in b"a##b\nc":
        growing.push(byte)
        shown.append(growing.shown)
    assert shown == ["a", "a", "a", "a##b", "a##b", "a##b\nc"]


def test_a_stop_string_that_did_not_count_stays_in_the_text():
    growing = LANGUAGES["bytes"].growing(["ab"])
    assert [growing.push(byte) for byte in b"xab"] == [None, None, "ab"]
    assert growing.text == "x"
    assert [growing.push(byte) for byte in b"yab"] == [None, None, "ab"]
    assert growing.text == "xaby"


@example("日😀")
@given(st.text(max_size=8))
def test_special_tokens_and_unknown_ones_leave_no_trace(text):
    language = LANGUAGES["bytes"]
    tokens = [one for byte in text.encode("utf-8", "replace") for one in (byte, 256, 259)]
    assert grown(language, tokens)[0].text == language.decode(tokens) == text.encode("utf-8", "replace").decode()
