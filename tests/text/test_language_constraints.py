"""Whatever is drawn within the masks matches the constraint, and bad constraints are refused with a reason."""

import contextlib
import json
import random
import re
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import numpy as np
import pytest
from language_samples import byte_fallback, byte_level, language, shape, whole_words

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Constraint
from gpuinfer.text.checkpoint import LanguageFiles
from gpuinfer.text.language import Language, grammar_examiner, open_language
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
        "bytes": open_language(LanguageFiles(bytes=True), shape(320, end_tokens=(256, 257))),
        "characters": open_language(LanguageFiles(vocabulary=ALPHABET), shape(64)),  # no end token
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
    True,
    {"type": "integer", "minimum": -5, "maximum": 120},
    {"enum": ["red", "green é", 3, None, {"a": [1]}]},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 4}, "sort": {"$ref": "#/$defs/sort"}},
        "required": ["name"],
        "additionalProperties": False,
        "$defs": {"sort": {"enum": ["a", "b"]}},
    },
]
REGEXES = [r"[0-9]{3}-[a-z]{1,9}", r"(foo|ba[rz])?", r" ?a[^b\n]{0,3}b", r" two  spaces", r"[A-C]+\.(?:1|20|300)/"]
CHOICES = [("yes", "no"), ("a", "ab", "abd", "c"), (" a.*b", "(c)", "[d]", '"e"\\'), ("é", "e-f", "0#1"), ("", "x")]
KINDS = ["byte level", "byte fallback", "metaspace", "bytes", "characters"]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "bytes"])
def test_a_text_within_the_masks_follows_the_schema(languages, kind, schema):
    texts = walks(languages[kind], Constraint(json_schema=schema), 12)
    assert texts
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_within_the_masks_matches_the_regex_or_is_one_of_the_choices(languages, kind):
    for regex in REGEXES:
        texts = walks(languages[kind], Constraint(regex=regex), 12)
        assert texts
        assert all(re.fullmatch(regex, text) for text in texts), (regex, texts)
    for choice in CHOICES:
        texts = walks(languages[kind], Constraint(choice=choice), 25)
        assert len(texts) == 25
        assert set(texts) <= set(choice)
        assert len(set(texts)) > 1 or ("" in choice and not languages[kind].end_tokens)
    if kind in ("byte level", "byte fallback", "bytes"):  # a choice may hold any characters
        for choice in ("two\nlines\r\t", "^$|{}&~-/\\\\", "日本😀", "\x7f\x01", "  ", "<0x41>"):
            assert walk(languages[kind], Constraint(choice=(choice,)), 1) == choice


@pytest.mark.parametrize(
    ("kind", "grammar", "pattern"),
    [
        ("byte level", 'start: "(" item ("," item)* ")"\nitem: /[0-9]/ | "x"', r"\(([0-9]|x)(,([0-9]|x))*\)"),
        ("characters", 'start: "(" item ("," item)* ")"\nitem: /[0-9]/ | "x"', r"\(([0-9]|x)(,([0-9]|x))*\)"),
        ("byte level", 'root ::= "<" body ">"\nbody ::= [a-c] | [a-c] body', r"<[a-c]+>"),
    ],
)
def test_a_text_within_the_masks_follows_the_grammar(languages, kind, grammar, pattern):
    texts = walks(languages[kind], Constraint(grammar=grammar), 12)
    assert texts
    assert all(re.fullmatch(pattern, text) for text in texts), texts


def test_the_end_is_allowed_exactly_when_the_text_may_end(languages):
    at = languages["bytes"].matcher(Constraint(regex="ab?"))
    for token, choices in ((None, [ord("a")]), (ord("a"), [ord("b"), 256, 257]), (ord("b"), [256, 257])):
        if token is not None:
            at.advance(token)
        assert allowed(at, matcher.words_of(languages["bytes"].vocabulary)) == choices
        assert at.complete == (token == ord("b"))
    unended = languages["characters"].matcher(Constraint(regex="ab?"))
    unended.advance(ALPHABET.index("a"))
    assert not unended.complete
    assert allowed(unended, 2) == [ALPHABET.index("b")]
    unended.advance(ALPHABET.index("b"))
    assert unended.complete


def test_a_copy_goes_its_own_way(languages):
    opened = languages["bytes"]
    at = opened.matcher(Constraint(choice=("ax", "by")))
    other = at.copy()
    at.advance(ord("a"))
    other.advance(ord("b"))
    again = other.copy()
    assert (allowed(at, 10), allowed(other, 10), allowed(again, 10)) == ([ord("x")], [ord("y")], [ord("y")])


def test_what_cannot_be_drawn_is_refused(languages, tmp_path):
    with pytest.raises(BadPrompt):
        languages["bytes"].matcher(Constraint(regex="ab")).advance(ord("z"))
    with pytest.raises(BadPrompt, match="no token of the model"):
        languages["characters"].matcher(Constraint(choice=("Ω",)))
    at = languages["characters"].matcher(Constraint(choice=("aΩ",)))
    at.advance(ALPHABET.index("a"))
    with pytest.raises(BadPrompt, match="no token of the model"):
        at.mask(np.zeros(2, np.int32))
    with pytest.raises(BadPrompt, match="whole words"):
        language(tmp_path / "m", whole_words()).matcher(Constraint(choice=("e4",)))


def nested(depth: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


BAD = {
    "nothing": Constraint(),
    "two at once": Constraint(regex="a", choice=("b",)),
    "an unclosed group": Constraint(regex="(a"),
    "an empty regex": Constraint(regex=""),
    "a zero byte": Constraint(regex="a\x00"),
    "a long regex": Constraint(regex="a" * 20_000),
    "a deep regex": Constraint(regex="(" * 8000 + "a" + ")" * 8000),
    "half a character": Constraint(regex="\ud800"),
    "no choice": Constraint(choice=()),
    "many choices": Constraint(choice=("x",) * 10_001),
    "a schema that nothing follows": Constraint(json_schema=False),
    "an unknown type": Constraint(json_schema={"type": "intger"}),
    "a schema from elsewhere": Constraint(json_schema={"$ref": "http://127.0.0.1:9/schema.json"}),
    "a schema that is itself": Constraint(json_schema={"$ref": "#"}),
    "a deep schema": Constraint(json_schema=nested(70)),
    "a large schema": Constraint(json_schema={"enum": ["x" * 200_000]}),
    "a schema that is no JSON": Constraint(json_schema={"minimum": object()}),
    "an unknown rule": Constraint(grammar="start: unknown"),
    "a torn grammar": Constraint(grammar="root ::= ("),
    "a grammar without an end": Constraint(grammar="start: a\na: a"),
    "a deep grammar": Constraint(grammar="start: " + "(" * 9000 + '"a"' + ")" * 9000),
    "a deep GBNF grammar": Constraint(grammar="root ::= " + "(" * 9000 + '"a"' + ")" * 9000),
    "an escape cut off": Constraint(grammar='root ::= "\\'),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_constraint_is_refused_with_a_reason(languages, case):
    with pytest.raises(BadPrompt) as caught:
        languages["bytes"].matcher(BAD[case])
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


def test_threads_may_share_a_language(languages):
    opened = languages["byte level"]
    constraints = [Constraint(choice=(f"w{number % 5}",)) for number in range(40)]
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda one: walk(opened, one, 0), constraints))
    assert texts == [f"w{number % 5}" for number in range(40)]


ENDLESS = {  # llguidance bounds none of these: each doubles its work with each part
    "patterns that hold together": Constraint(
        json_schema={"allOf": [{"type": "string", "pattern": f"[a-z]{{{n}}}.*[0-9]{{{n}}}"} for n in range(2, 60)]}
    ),
    "expressions that hold together": Constraint(
        grammar="start: A\nA: " + " & ".join(f"/[a-z]{{{n}}}.*[0-9]{{{n}}}/" for n in range(2, 40))
    ),
    "multiples of primes": Constraint(
        json_schema={"type": "integer", "allOf": [{"multipleOf": n} for n in (7, 11, 13, 17, 19, 23, 29)]}
    ),
}


@pytest.mark.parametrize("case", ENDLESS)
def test_a_grammar_that_does_not_end_is_given_up_and_the_next_compiles(languages, monkeypatch, case):
    examiner = grammar_examiner.GrammarExaminer()
    monkeypatch.setattr(matcher, "EXAMINER", examiner)
    assert walk(languages["bytes"], Constraint(regex=f"[ab]{{3}}{len(case)}"), 0)
    with monkeypatch.context() as limited:
        limited.setattr(grammar_examiner, "SECONDS", 0.3)
        with pytest.raises(BadPrompt, match="to compile"):
            languages["bytes"].matcher(ENDLESS[case])
    assert "unknown name" in examiner.examine("start: unknown")
    examiner._process.kill()
    examiner._process.wait()
    assert walk(languages["bytes"], Constraint(regex=f"[ab]{{4}}{len(case)}"), 0)
    examiner.close()


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


LARGE = {
    "repetitions of repetitions": Constraint(regex="(a{1,1000}){1,1000}"),
    "and of those": Constraint(regex="((a{1,100}){1,100}){1,100}"),
    "a state for every history": Constraint(regex="(a|b)*a(a|b){400}"),
    "long": Constraint(json_schema={"type": "array", "items": {"type": "null"}, "minItems": 10**6}),
    "all of any": Constraint(json_schema={"allOf": [{"anyOf": [{"type": "object"}] * 9}] * 9}),
    "ambiguous": AMBIGUOUS,
}


@pytest.mark.parametrize("case", LARGE)
def test_a_large_grammar_is_compiled_or_refused(languages, case):
    """Within the child's limits on time and memory, whose enforcement is tested above."""
    words = np.zeros(matcher.words_of(languages["bytes"].vocabulary), np.int32)
    with contextlib.suppress(BadPrompt):
        languages["bytes"].matcher(LARGE[case]).mask(words)
