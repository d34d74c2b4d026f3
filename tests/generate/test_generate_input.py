"""The input: a stream is cut into the same rows wherever its chunks end; keys that came before are known."""

from __future__ import annotations

import collections
import hashlib
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.serving.openai import row_names
from gpuinfer.serving.openai.row_names import KeySet
from gpuinfer.serving.openai.row_splitter import RowSplitter, Unusable

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ROWS = st.lists(st.dictionaries(st.text(), VALUES, max_size=3) | st.text(), max_size=6)
CUTS = st.lists(st.integers(0, 10_000))


def numbered(data: bytes, cuts: list[int], most: int = 1 << 20) -> list[tuple[int, object]]:
    """Each row with its line, of chunks that end at these places."""
    splitter, found, begun = RowSplitter(most), [], 0
    for cut in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
        found += splitter.feed(data[begun:cut])
        begun = cut
    return found + splitter.end()


def pieces(data: bytes, cuts: list[int], most: int = 1 << 20) -> list[object]:
    return [piece for _, piece in numbered(data, cuts, most)]


@given(ROWS, CUTS, st.booleans(), st.sampled_from([None, 1]), st.sampled_from(["\n", "\r\n", "\n\n  \n"]))
def test_arrays_and_lines_are_cut_into_their_rows(rows, cuts, plain, indent, end):
    data = json.dumps(rows, ensure_ascii=plain, indent=indent).encode()
    assert [json.loads(piece) for piece in pieces(b"\xef\xbb\xbf \n" + data + b"\n ", cuts)] == rows
    assert [json.loads(piece) for piece in pieces(end.join(map(json.dumps, rows)).encode(), cuts)] == rows


@given(st.binary(max_size=200), CUTS)
def test_any_bytes_are_cut_alike_whatever_the_chunks(data, cuts):
    assert numbered(data, cuts) == numbered(data, []) == numbered(data, list(range(len(data))))


@pytest.mark.parametrize("form", ["{}\n{}\n", "[{},{}]"])
def test_a_row_that_is_too_long_is_passed_over_alone(form):
    first, second = pieces(form.format(json.dumps("x" * 5000), '"y"').encode(), list(range(0, 5000, 7)), most=1000)
    assert "5,002 bytes" in first.why
    assert second == b'"y"'
    (other, _) = pieces(form.format(json.dumps("z" * 5000), '"y"').encode(), [], most=1000)
    assert other.content != first.content


@pytest.mark.parametrize(
    ("text", "whole", "why"),
    [
        ("[1,2", 1, "has no end"),
        ("[1]2", 1, "follows"),
        ("[1,,2]", 1, "nothing stands"),
        ("[1,]", 1, "nothing stands"),
        ('["a', 0, "has no end"),
        ("[1,2}\n", 2, "ends with a }"),
        ('["a"},"b"]', 0, "ends with a }"),
    ],
)
def test_a_broken_array_gives_its_whole_rows_and_names_the_fault(text, whole, why):
    found = pieces(text.encode(), [])
    assert found[:whole] == [b"1", b"2"][:whole]
    assert any(isinstance(piece, Unusable) and why in piece.why for piece in found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'"a"\n\n  \n"b"\r\n"c"', [1, 4, 5]),
        (b'\n\n"a"\n"b"\n', [3, 4]),
        (b"\xef\xbb\xbf\n[\n1,\n\n2,3\n,\n4]", [3, 5, 5, 7]),
        (b'[{"a":\n\n1},\n2]', [1, 4]),
        (b"[1,\n,2\n}", [1, 2, 2, 3]),
        (b"[1]\n\n x", [1, 3]),
    ],
)
def test_a_row_knows_its_line(text, expected):
    for cuts in ([], [5], list(range(len(text)))):
        assert [line for line, _ in numbered(text, cuts)] == expected


def key(number: int) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=12).digest()


@given(st.lists(st.lists(st.integers(0, 60), max_size=40), max_size=40))
def test_a_set_of_keys_counts_like_a_counter(blocks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_names, "RECENT", 8)
        patch.setattr(row_names, "LEAST_RUN", 64)
        known, counter = KeySet(), collections.Counter()
        for block in blocks:
            assert known.has([key(one) for one in block]) == [counter[one] > 0 for one in block]
            expected = []
            for one in block:
                expected.append(counter[one])
                counter[one] += 1
            assert known.count([key(one) for one in block]) == expected
        assert len(known) == counter.total()


def test_keys_take_twelve_bytes_each_and_agree_in_all_their_bits():
    known, count, alike = KeySet(), 100_000, b"same bits"[:8]
    known.count([alike + b"aaaa"])
    for start in range(0, count, 1000):
        assert not any(known.count([key(number) for number in range(start, start + 1000)]))
    assert sum(part.nbytes for run in known._runs for part in run) <= 12 * (count + 1)
    assert sys.getsizeof(known._recent) < 1 << 20
    assert len(known._runs) < 16
    assert all(known.has([key(number) for number in range(0, count, 997)]))
    assert known.has([alike + b"aaaa", alike + b"bbbb", key(count)]) == [True, False, False]
