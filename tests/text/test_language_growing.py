"""Text as it grows equals the text of all tokens at once, whatever the tokens."""

import random

import pytest
from counts import SOAK, examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from language_samples import KINDS, shape
from tokenizers import Tokenizer

from gpuinfer.text.checkpoint import LanguageFiles
from gpuinfer.text.language import Language, open_language
from gpuinfer.text.language.detokenizer import IncrementalDetokenizer
from gpuinfer.text.language.tokenizer import Subwords

TOKENIZERS = {kind: Tokenizer.from_str(make()) for kind, make in KINDS.items()}
LANGUAGES = {kind: Language(Subwords(one), one.get_vocab_size()) for kind, one in TOKENIZERS.items()}
LANGUAGES["bytes"] = open_language(LanguageFiles(bytes=True), shape(260, end_tokens=(256,)))
LANGUAGES["characters"] = open_language(LanguageFiles(vocabulary=tuple("abc de\né日😀")), shape(16))
LANGUAGES["words"] = open_language(LanguageFiles(vocabulary=("e4", "e5", "\n", "<|endoftext|>", "é東")), shape(8))
LANGUAGES["pieces"] = open_language(LanguageFiles(vocabulary=("e", "e4", " e5", " ", "<|endoftext|>")), shape(8))
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
    spelling = language.detokenizer()._spelling
    single = {piece: token for token in range(language.vocabulary) if isinstance(piece := spelling.piece(token), bytes)}
    return [single[bytes([byte])] for byte in text.encode() if bytes([byte]) in single]


def grown(
    language: Language, tokens: list[int], stop: tuple[str, ...] = ()
) -> tuple[IncrementalDetokenizer, str | None]:
    growing = language.detokenizer(stop)
    for token in tokens:
        if (found := growing.push(token)) is not None:
            return growing, found
    return growing, None


@pytest.mark.parametrize("kind", LANGUAGES)
@settings(max_examples=2000 if SOAK else examples(60), deadline=None)
@given(data=st.data())
def test_a_text_grows_to_what_all_its_tokens_decode_to(kind, data):
    language = LANGUAGES[kind]
    tokens = data.draw(tokens_of(language))
    growing, shown, certain = language.detokenizer(), "", 0
    whole = language.decode(tokens)
    for count, token in enumerate(tokens, 1):
        growing.push(token)
        assert growing.text == language.decode(tokens[:count])
        before, (new, certain) = certain, growing.settled()
        shown += new
        assert whole.startswith(shown)
        assert before <= certain <= count
    assert growing.kept == len(tokens)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_decoding_is_that_of_the_tokenizers_library_with_special_tokens_and_without(kind):
    draws = random.Random(5)
    tokenizer, language = TOKENIZERS[kind], LANGUAGES[kind]
    special = [token for token, entry in tokenizer.get_added_tokens_decoder().items() if entry.special]
    for _ in range(200):
        tokens = [draws.choice([draws.randrange(language.vocabulary), *special]) for _ in range(draws.randrange(12))]
        assert language.decode(tokens) == grown(language, tokens)[0].text == tokenizer.decode(tokens)
        growing = language.detokenizer(special_tokens=True)
        for token in tokens:
            growing.push(token)
        assert language.decode(tokens, True) == growing.text == tokenizer.decode(tokens, skip_special_tokens=False)


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
    assert language.decode(tokens[: growing.kept]).startswith(growing.text)
    if found and growing.kept:
        assert not language.decode(tokens[: growing.kept - 1]).startswith(growing.text)


@pytest.mark.parametrize("kind", LANGUAGES)
@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_what_is_certain_stays_so_however_the_answer_ends(kind, data):
    """At each token, the given text is a prefix of the text if the answer ended there, with a stop string or not, in
    characters and in tokens.
    """
    language = LANGUAGES[kind]
    tokens = data.draw(tokens_of(language))
    whole = language.decode(tokens)
    within = st.tuples(st.integers(0, 40), st.integers(1, 5)).map(lambda at: whole[at[0] : sum(at)])
    stop = data.draw(st.lists(st.one_of(within, st.text("ab 日�", max_size=3)), max_size=4))
    growing, given, certain = language.detokenizer(stop), "", 0
    for count, token in enumerate(tokens, 1):
        found = growing.push(token)
        ends = [(language.decode(tokens[:count]), count)] + ([(growing.text, growing.kept)] if found else [])
        for text, kept in ends:
            assert text.startswith(given)
            assert certain <= kept
        new, certain = growing.settled()
        given += new
        for text, kept in ends:
            assert text.startswith(given)
            assert certain <= kept


STOPPED = {  # stop strings; for each byte the stop string that it completes, and the new final text and tokens
    "a beginning is held back until it is none": (
        ["###", "\n\n"],
        [("a", None, "a", 1), ("#", None, "", 1), ("#", None, "", 1), ("b", None, "##b", 4), ("\n", None, "", 4)],
    ),
    "the shorter counts first, the longer if more comes": (
        ["bc", "abcd"],
        [("x", None, "x", 1), ("a", None, "", 1), ("b", None, "", 1), ("c", "bc", "", 1), ("d", "abcd", "", 1)],
    ),
    "a stop string that did not count stays in the text": (
        ["ab"],
        [("x", None, "x", 1), ("a", None, "", 1), ("b", "ab", "", 1), ("y", None, "aby", 4), ("a", None, "", 4)],
    ),
}


@pytest.mark.parametrize("case", STOPPED)
def test_text_that_may_be_a_stop_string_is_held_back(case):
    stop, steps = STOPPED[case]
    growing = LANGUAGES["bytes"].detokenizer(stop)
    for letter, found, text, tokens in steps:
        assert growing.push(ord(letter)) == found
        assert growing.settled() == (text, tokens)


def test_half_a_character_is_never_shown_and_a_whole_one_at_once():
    for kind in ("bytes", "byte level", "byte fallback"):
        growing, given = LANGUAGES[kind].detokenizer(), ""
        for token in byte_tokens(LANGUAGES[kind], "abc日本😀"):
            growing.push(token)
            given += growing.settled()[0]
            assert "�" not in given
        assert growing.text == "abc日本😀"
        assert given == ("" if kind == "byte fallback" else "abc日本😀")  # there the run of bytes may go on


@example("日😀")
@given(st.text(max_size=8))
def test_special_tokens_and_unknown_ones_leave_no_trace(text):
    language = LANGUAGES["bytes"]
    tokens = [one for byte in text.encode("utf-8", "replace") for one in (byte, 256, 259)]
    assert grown(language, tokens)[0].text == language.decode(tokens) == text.encode("utf-8", "replace").decode()
