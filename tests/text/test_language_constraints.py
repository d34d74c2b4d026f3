"""Whatever is drawn within the masks matches the constraint, and bad constraints are refused with a reason."""

import contextlib
import io
import json
import random
import re
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import numpy as np
import pytest
from language_samples import Files, byte_fallback, byte_level, language, shape, whole_words

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Constraint
from gpuinfer.text.language import Language, grammar_examiner, open_language
from gpuinfer.text.language import grammar as grammars
from gpuinfer.text.language import grammar as matcher

ALPHABET = tuple(' !"#\\[]{}:,.-_()+*/abcdefghijklmnopqrstuvwxyzABC0123456789\né')
END = 1  # of the folders below


@pytest.fixture(scope="module")
def languages(tmp_path_factory) -> dict[str, Language]:
    at = tmp_path_factory.mktemp("constraints")
    return {
        "byte level": language(at / "a", byte_level(), 70, tokenizer_config={"eos_token": "<|im_start|>"}),
        "byte fallback": language(at / "b", byte_fallback(), 5, tokenizer_config={"eos_token": "</s>"}),
        "metaspace": language(at / "c", byte_fallback(True), 0, tokenizer_config={"eos_token": "</s>"}),
        "bytes": open_language(Files(bytes=True), shape(320, end_tokens=(256, 257))),
        "characters": open_language(Files(characters=ALPHABET), shape(64)),  # no end token
    }


def allowed(at, words: int) -> list[int]:
    mask = np.full(words, -1, np.int32)
    at.mask(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(opened: Language, constraint: Constraint, seed: int, most: int = 150) -> str | None:
    """A text drawn at random within the masks; None when it has not ended after `most` tokens.

    It ends as soon as it may: the lowest end token is drawn whenever it is allowed, half the time.
    """
    draws = random.Random(seed)
    at = opened.matcher(constraint)
    tokens: list[int] = []
    while len(tokens) < most:
        if at.complete:
            return opened.decode(tokens)
        choices = allowed(at, matcher.words_of(opened.vocabulary))
        assert choices
        assert choices[-1] < opened.vocabulary
        ends = [token for token in choices if token in opened.end_tokens]
        assert not ends or ends == sorted(opened.end_tokens)
        token = draws.choice(ends) if ends and draws.random() < 0.5 else draws.choice(choices)
        tokens.append(token)
        at.advance(token)
        if token in ends:
            assert at.complete
    return None


def walks(opened: Language, constraint: Constraint, count: int) -> list[str]:
    found = [walk(opened, constraint, seed) for seed in range(count)]
    return [one for one in found if one is not None]


SCHEMAS = [
    pytest.param({"type": "integer", "minimum": -5, "maximum": 120}, id="an integer in a range"),
    pytest.param({"enum": ["red", "green é", 3, None, {"a": [1]}]}, id="an enumeration"),
    pytest.param({"type": "string", "minLength": 2, "maxLength": 5}, id="a short string"),
    pytest.param({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}, id="an array"),
    pytest.param(
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 4}, "sort": {"$ref": "#/$defs/sort"}},
            "required": ["name"],
            "additionalProperties": False,
            "$defs": {"sort": {"enum": ["a", "b"]}},
        },
        id="an object",
    ),
]
REGEXES = [
    r"[0-9]{3}-[a-z]{1,9}",
    r"(foo|ba[rz])?",
    r" ?a[^b\n]{0,3}b",
    r" two  spaces",
    r"[A-C]+\.(?:1|20|300)/",
]
CHOICES = [("yes", "no"), ("a", "ab", "abd", "c"), (" a.*b", "(c)", "[d]", '"e"\\'), ("é", "e-f", "0#1"), ("", "x")]
KINDS = ["byte level", "byte fallback", "metaspace", "bytes", "characters"]


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "bytes"])
def test_a_text_within_the_masks_follows_the_schema(languages, kind, schema):
    texts = walks(languages[kind], Constraint(json_schema=schema), 12)
    assert texts
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_within_the_masks_matches_the_regex(languages, kind):
    for regex in REGEXES:
        texts = walks(languages[kind], Constraint(regex=regex), 12)
        assert texts
        assert all(re.fullmatch(regex, text) for text in texts), (regex, texts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_within_the_masks_is_one_of_the_choices(languages, kind):
    for choice in CHOICES:
        texts = walks(languages[kind], Constraint(choice=choice), 25)
        assert len(texts) == 25
        assert set(texts) <= set(choice)
        assert len(set(texts)) > 1 or ("" in choice and not languages[kind].end_tokens)


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "bytes"])
def test_a_choice_may_hold_any_characters(languages, kind):
    for choice in ("two\nlines\r\t", "^$|{}&~-/\\\\", "日本😀", "\x7f\x01", "  ", "<0x41>"):
        assert walk(languages[kind], Constraint(choice=(choice,)), 1) == choice


def test_any_json_is_json(languages):
    texts = walks(languages["bytes"], Constraint(json_schema=True), 30)
    assert texts
    assert all(json.dumps(json.loads(text)) for text in texts)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        pytest.param('start: "(" item ("," item)* ")"\nitem: /[0-9]/ | "x"', r"\(([0-9]|x)(,([0-9]|x))*\)", id="Lark"),
        pytest.param('root ::= "<" body ">"\nbody ::= [a-c] | [a-c] body', r"<[a-c]+>", id="GBNF"),
    ],
)
@pytest.mark.parametrize("kind", ["byte level", "characters"])
def test_a_text_within_the_masks_follows_the_grammar(languages, kind, grammar, pattern):
    opened = languages["byte level"] if "<" in pattern else languages[kind]
    texts = walks(opened, Constraint(grammar=grammar), 12)
    assert texts
    assert all(re.fullmatch(pattern, text) for text in texts), texts


def test_the_end_is_allowed_exactly_when_the_text_may_end(languages):
    opened = languages["bytes"]
    at = opened.matcher(Constraint(regex="ab?"))
    words = matcher.words_of(opened.vocabulary)
    assert allowed(at, words) == [ord("a")]
    at.advance(ord("a"))
    assert not at.complete
    assert allowed(at, words) == [ord("b"), 256, 257]
    at.advance(ord("b"))
    assert at.complete
    assert allowed(at, words) == [256, 257]


def test_without_an_end_token_an_answer_is_complete_when_nothing_can_follow(languages):
    at = languages["characters"].matcher(Constraint(regex="ab?"))
    at.advance(ALPHABET.index("a"))
    assert not at.complete
    assert allowed(at, 2) == [ALPHABET.index("b")]
    at.advance(ALPHABET.index("b"))
    assert at.complete


def test_a_copy_goes_its_own_way(languages):
    opened = languages["bytes"]
    at = opened.matcher(Constraint(choice=("ax", "by")))
    other = at.copy()
    at.advance(ord("a"))
    other.advance(ord("b"))
    again = other.copy()
    assert (allowed(at, 10), allowed(other, 10), allowed(again, 10)) == ([ord("x")], [ord("y")], [ord("y")])


def test_a_token_that_is_not_allowed_is_refused(languages):
    at = languages["bytes"].matcher(Constraint(regex="ab"))
    with pytest.raises(BadPrompt):
        at.advance(ord("z"))


def test_what_the_alphabet_cannot_write_is_refused_at_once_or_where_it_gets_stuck(languages):
    with pytest.raises(BadPrompt, match="no token of the model"):
        languages["characters"].matcher(Constraint(choice=("Ω",)))
    at = languages["characters"].matcher(Constraint(choice=("aΩ",)))
    at.advance(ALPHABET.index("a"))
    with pytest.raises(BadPrompt, match="no token of the model"):
        at.mask(np.zeros(2, np.int32))


def test_tokens_that_are_whole_words_cannot_follow_a_constraint(tmp_path):
    opened = language(tmp_path / "m", whole_words())
    with pytest.raises(BadPrompt, match="whole words"):
        opened.matcher(Constraint(choice=("e4",)))


def nested(depth: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "constraint",
    [
        pytest.param(Constraint(), id="nothing"),
        pytest.param(Constraint(regex="a", choice=("b",)), id="two at once"),
        pytest.param(Constraint(regex="(a"), id="an unclosed group"),
        pytest.param(Constraint(regex=""), id="an empty regex"),
        pytest.param(Constraint(regex="a\x00"), id="a zero byte"),
        pytest.param(Constraint(regex="a" * 20_000), id="a long regex"),
        pytest.param(Constraint(regex="(" * 8000 + "a" + ")" * 8000), id="a deep regex"),
        pytest.param(Constraint(regex="\ud800"), id="half a character"),
        pytest.param(Constraint(choice=()), id="no choice"),
        pytest.param(Constraint(choice=("x",) * 10_001), id="many choices"),
        pytest.param(Constraint(json_schema=False), id="a schema that nothing follows"),
        pytest.param(Constraint(json_schema={"type": "intger"}), id="an unknown type"),
        pytest.param(Constraint(json_schema={"$ref": "http://127.0.0.1:9/schema.json"}), id="a schema from elsewhere"),
        pytest.param(Constraint(json_schema={"$ref": "#"}), id="a schema that is itself"),
        pytest.param(Constraint(json_schema=nested(70)), id="a deep schema"),
        pytest.param(Constraint(json_schema={"enum": ["x" * 200_000]}), id="a large schema"),
        pytest.param(Constraint(json_schema={"minimum": object()}), id="a schema that is no JSON"),
        pytest.param(Constraint(grammar="start: unknown"), id="an unknown rule"),
        pytest.param(Constraint(grammar="root ::= ("), id="a torn grammar"),
        pytest.param(Constraint(grammar="start: a\na: a"), id="a grammar without an end"),
        pytest.param(Constraint(grammar="start: " + "(" * 9000 + '"a"' + ")" * 9000), id="a deep grammar"),
        pytest.param(Constraint(grammar="root ::= " + "(" * 9000 + '"a"' + ")" * 9000), id="a deep GBNF grammar"),
        pytest.param(Constraint(grammar='root ::= "\\'), id="an escape cut off"),
    ],
)
def test_a_bad_constraint_is_refused_with_a_reason(languages, constraint):
    with pytest.raises(BadPrompt) as caught:
        languages["bytes"].matcher(constraint)
    assert str(caught.value).endswith(".")
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_compiled_constraints_are_kept_but_not_for_ever(languages, monkeypatch):
    monkeypatch.setattr(matcher, "MOST_COMPILED", 3)
    matchers = matcher.GrammarMatchers(languages["bytes"]._codec, 260, (256,))
    compiled = []
    monkeypatch.setattr(matcher, "grammar_of", lambda key, real=matcher.grammar_of: compiled.append(key) or real(key))
    for text in ("a", "b", "a", "c", "d", "a", "b"):
        matchers.matcher(Constraint(choice=(text,)))
    for _ in range(2):
        with pytest.raises(BadPrompt, match="unclosed"):
            matchers.matcher(Constraint(regex="("))
    assert [key[1] for key in compiled] == ["(?:a)", "(?:b)", "(?:c)", "(?:d)", "(?:b)", "("]
    assert len(matchers._compiled) == 3


def test_threads_may_ask_at_once(languages):
    opened = languages["byte level"]
    constraints = [Constraint(choice=(f"w{number % 5}",)) for number in range(40)]
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda one: walk(opened, one, 0), constraints))
    assert texts == [f"w{number % 5}" for number in range(40)]


OPTIONS = "\n" + grammars.OPTIONS
PATTERNS = [{"type": "string", "pattern": f"[a-z]{{{n}}}.*[0-9]{{{n}}}"} for n in range(2, 60)]


def test_a_schema_that_would_take_for_ever_is_given_up(languages, monkeypatch):
    fine = Constraint(regex="[ab]{3}")
    monkeypatch.setattr(matcher, "EXAMINER", grammar_examiner.GrammarExaminer())
    assert walk(languages["bytes"], fine, 0)
    with monkeypatch.context() as limited:
        limited.setattr(grammar_examiner, "SECONDS", 0.3)
        with pytest.raises(BadPrompt, match="to compile"):
            languages["bytes"].matcher(Constraint(json_schema={"allOf": PATTERNS}))
    assert walk(languages["bytes"], Constraint(regex="[ab]{4}"), 0)
    matcher.EXAMINER.close()


def test_an_examiner_that_was_killed_is_replaced():
    one = grammar_examiner.GrammarExaminer()
    grammar = 'start: "a"' + OPTIONS
    assert one.examine(grammar) == ""
    one._process.kill()
    one._process.wait()
    assert one.examine(grammar) == ""
    assert "unknown" in one.examine("start: unknown")
    one.close()


def test_an_examiner_says_what_the_library_says():
    asked, answers = io.BytesIO(), io.BytesIO()
    for grammar in ('start: "a"' + OPTIONS, "start: b", "start: a\na: a" + OPTIONS):
        asked.write(len(grammar).to_bytes(4, "little") + grammar.encode())
    asked.seek(0)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_bound", "_bound_next"):  # this process is not to be bounded
            patch.setattr(grammar_examiner, name, lambda: None)
        grammar_examiner.main(asked, answers)
    said = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert said[0] == ""
    assert "unknown name" in said[1]
    assert "NoExtensionBias" in said[2]


AMBIGUOUS = Constraint(grammar='start: e\ne: e e e e | e e e | e e | "a"')  # more ways to read it with each letter


def test_a_grammar_that_takes_ever_longer_is_given_up_and_others_go_on(languages, monkeypatch):
    monkeypatch.setattr("gpuinfer.text.language.grammar.PATIENCE_S", 0.05)
    monkeypatch.setattr("gpuinfer.text.language.grammar.TOKEN_S", 0.0)
    language = languages["bytes"]
    slow, quick = language.matcher(AMBIGUOUS), language.matcher(Constraint(regex="a*"))
    words = np.zeros(matcher.words_of(language.vocabulary), np.int32)

    def go_on(one, tokens):
        for _ in range(tokens):
            one.mask(words)
            one.advance(ord("a"))

    with pytest.raises(BadPrompt, match="takes too long"):
        go_on(slow, 2000)
    go_on(quick, 2)


@pytest.mark.parametrize(
    "constraint",
    [
        pytest.param(Constraint(regex="(a{1,1000}){1,1000}"), id="repetitions of repetitions"),
        pytest.param(Constraint(regex="((a{1,100}){1,100}){1,100}"), id="and of those"),
        pytest.param(Constraint(regex="(a|b)*a(a|b){400}"), id="a state for every history"),
        pytest.param(
            Constraint(json_schema={"type": "array", "items": {"type": "null"}, "minItems": 10**6}), id="long"
        ),
        pytest.param(Constraint(json_schema={"allOf": [{"anyOf": [{"type": "object"}] * 9}] * 9}), id="all of any"),
        pytest.param(AMBIGUOUS, id="ambiguous"),
    ],
)
def test_whatever_a_constraint_is_made_of_it_is_compiled_or_refused(languages, constraint):
    """In bounded time and memory: the examiner sees to that, whose own end is tested above."""
    words = np.zeros(matcher.words_of(languages["bytes"].vocabulary), np.int32)
    with contextlib.suppress(BadPrompt):
        languages["bytes"].matcher(constraint).mask(words)
