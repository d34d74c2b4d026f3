"""A stream of bytes is cut into the same rows wherever its chunks end."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuinfer.serving.openai.row_splitter import RowSplitter, Unusable

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ROWS = st.lists(st.dictionaries(st.text(), VALUES, max_size=3) | st.text(), max_size=6)


def numbered(data: bytes, cuts: list[int], most: int = 1 << 20) -> list[tuple[int, object]]:
    splitter, found, begun = RowSplitter(most), [], 0
    for cut in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
        found += splitter.feed(data[begun:cut])
        begun = cut
    return found + splitter.end()


def pieces(data: bytes, cuts: list[int], most: int = 1 << 20) -> list[object]:
    return [piece for _, piece in numbered(data, cuts, most)]


@settings(deadline=None)
@given(ROWS, st.lists(st.integers(0, 10_000)), st.booleans(), st.sampled_from([None, 1]))
def test_an_array_is_cut_into_its_elements(rows, cuts, plain, indent):
    data = json.dumps(rows, ensure_ascii=plain, indent=indent).encode()
    assert [json.loads(piece) for piece in pieces(b"\xef\xbb\xbf \n" + data + b"\n ", cuts)] == rows


@settings(deadline=None)
@given(ROWS.filter(bool), st.lists(st.integers(0, 10_000)), st.sampled_from(["\n", "\r\n", "\n\n  \n"]))
def test_lines_are_rows_and_blank_ones_are_none(rows, cuts, end):
    data = end.join(json.dumps(row) for row in rows).encode()
    assert [json.loads(piece) for piece in pieces(data, cuts)] == rows


@settings(deadline=None)
@given(st.binary(max_size=200), st.lists(st.integers(0, 10_000)))
def test_any_bytes_at_all_are_cut_alike_whatever_the_chunks(data, cuts):
    assert numbered(data, cuts) == numbered(data, []) == numbered(data, list(range(len(data))))


@pytest.mark.parametrize("form", ["{}\n{}\n", "[{},{}]"])
def test_a_row_that_is_too_long_is_passed_over_alone(form):
    long, short = json.dumps("x" * 5000), json.dumps("y")
    first, second = pieces(form.format(long, short).encode(), list(range(0, 5000, 7)), most=1000)
    assert isinstance(first, Unusable)
    assert "5,002 bytes" in first.why
    assert second == b'"y"'
    (other, _) = pieces(form.format(json.dumps("z" * 5000), short).encode(), [], most=1000)
    assert other.content != first.content


@pytest.mark.parametrize(
    ("text", "whole", "why"),
    [
        ("[1,2", 1, "has no end"),
        ("[1]2", 1, "follows"),
        ("[1,,2]", 1, "nothing stands"),
        ("[1,]", 1, "nothing stands"),
        ('["a', 0, "has no end"),
        ("[", 0, "has no end"),
        ("[1}", 1, "ends with a }"),
        ("[1,2}\n", 2, "ends with a }"),
        ("[}", 0, "ends with a }"),
        ('["a"},"b"]', 0, "ends with a }"),
    ],
)
def test_a_broken_array_gives_what_is_whole_and_says_what_is_wrong(text, whole, why):
    found = pieces(text.encode(), [])
    assert found[:whole] == [b"1", b"2"][:whole]
    assert any(isinstance(piece, Unusable) and why in piece.why for piece in found)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        pytest.param(b'"a"\n\n  \n"b"\r\n"c"', [1, 4, 5], id="JSONL with blank lines"),
        pytest.param(b'\n\n"a"\n"b"\n', [3, 4], id="JSONL after blank lines"),
        pytest.param(b"\xef\xbb\xbf\n[\n1,\n\n2,3\n,\n4]", [3, 5, 5, 7], id="an array over many lines"),
        pytest.param(b'[{"a":\n\n1},\n2]', [1, 4], id="an element over many lines"),
        pytest.param(b"[1,\n,2\n}", [1, 2, 2, 3], id="what is wrong with an array has its line too"),
        pytest.param(b"[1]\n\n x", [1, 3], id="and so has what follows it"),
    ],
)
def test_a_row_knows_the_line_on_which_an_editor_shows_it(text, lines):
    for cuts in ([], [5], list(range(len(text)))):
        assert [line for line, _ in numbered(text, cuts)] == lines
